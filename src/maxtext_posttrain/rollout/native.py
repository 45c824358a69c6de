"""The native engine: completions from a live MaxText model, on MaxText's own KV cache.

A request's prompts are generated in waves. A wave is one compiled program: it fills the caches with all prompts but
their last tokens, then takes one token of every sequence at a time until all have stopped. The sizes it is compiled for
are powers of two, so that prompts, budgets and batches of other sizes compile nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.errors import GenerationError
from maxtext_posttrain.losses.sft import token_log_probs
from maxtext_posttrain.maxtext_api import MaxTextConfig
from maxtext_posttrain.performance import compiler_options
from maxtext_posttrain.rollout import sampling
from maxtext_posttrain.rollout.options import Completion, SamplingOptions
from maxtext_posttrain.rollout.requests import Request, make_requests
from maxtext_posttrain.rollout.weights import LayerSplitter, Path, by_path, model_weights, placeholder

_SMALLEST_LENGTH = 16
_STOPS = 8
_NO_TOKEN = -1
_ANY_TOKEN = -2


class NativeEngine:
  """Generates with one MaxText model, whose weights may be others at each call.

  The engine holds no weights of its own: those of `model` are used where they lie, without a copy where the model's
  layers are apart; stacked layers (`scan_layers`) are taken apart once a wave, for its duration.

  Attributes:
    max_context: tokens of a prompt and its completion together, at most.
    max_batch: sequences generated at once, at most.
    vocab_size: of the model.
    programs: waves traced and compiled so far, one for each combination of sizes.
  """

  def __init__(
    self,
    config: MaxTextConfig,
    mesh: Mesh,
    model: nnx.Module,
    *,
    max_context: int | None = None,
    max_batch: int = 32,
  ):
    """Looks at the model; nothing is compiled yet.

    Args:
      config: the model's.
      mesh: the devices it lies on.
      model: a live model, scanned or not; its weights are those of calls that bring none.
      max_context: tokens of a prompt and its completion together; `max_target_length` where not given.
      max_batch: sequences generated at once, at most.

    Raises:
      GenerationError: the architecture is none we generate with, or the model is not that of `config`.
    """
    if max_batch < 1:
      raise GenerationError(f"max_batch is {max_batch}: it must be at least 1")
    self.max_context = config.max_target_length if max_context is None else max_context
    self.max_batch = max_batch
    self.vocab_size = config.vocab_size
    self._mesh = mesh
    self._config = maxtext_api.inference_config(config, mesh.devices.flat[0].platform)
    self._model = model
    decoder = maxtext_api.decoding_model(self._config, mesh)
    self._weights = model_weights(decoder)
    self._graphdef, self._drawn, _ = nnx.split(decoder, nnx.RngState, ...)
    self._split_layers = LayerSplitter(model_weights(model), self._weights, config.param_scan_axis)
    options = compiler_options(mesh.devices.flat[0].platform)
    # Every process gets all of what is written.
    whole = NamedSharding(mesh, PartitionSpec())
    self._wave = jax.jit(self._run_wave, static_argnames=("room",), out_shardings=whole, compiler_options=options)
    self.programs = 0

  def generate(
    self,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    *,
    weights: nnx.State | None = None,
    progress: Callable[[int, int], None] | None = None,
  ) -> list[Completion]:
    """Completes each prompt `options.n` times.

    Args:
      prompts: token ids, at least one each.
      options: how tokens are chosen.
      weights: those of a model like the engine's (`model_weights`), in place of its own.
      progress: is told after each wave how many completions there are, and how many there will be.

    Returns:
      The completions of the first prompt, then those of the second, and so on.

    Raises:
      GenerationError: a prompt is empty, too long, or has a token out of the vocabulary; so is a stop token.
    """
    requests = make_requests(prompts, options, vocab_size=self.vocab_size, max_context=self.max_context)
    arrays = by_path(model_weights(self._model) if weights is None else weights)
    completions: dict[int, Completion] = {}
    with maxtext_api.mesh_context(self._config, self._mesh):
      for wave in _waves(requests, self.max_batch):
        completions |= self._generate_wave(arrays, wave, options)
        if progress is not None:
          progress(len(completions), len(requests))
    return [completions[number] for number in range(len(requests))]

  def _generate_wave(
    self, weights: Mapping[Path, jax.Array], wave: Sequence[Request], options: SamplingOptions
  ) -> dict[int, Completion]:
    batch = _power_of_two(len(wave), at_least=self._mesh.size)
    width = _power_of_two(max(request.tokens.size - 1 for request in wave), at_least=_SMALLEST_LENGTH)
    room = _power_of_two(max(request.budget for request in wave), at_least=_SMALLEST_LENGTH)
    arrays = _Wave(
      prompts=np.zeros((batch, width), np.int32),
      lengths=np.zeros(batch, np.int32),
      last=np.zeros(batch, np.int32),
      budgets=np.zeros(batch, np.int32),
      prompt=np.zeros(batch, np.int32),
      sample=np.zeros(batch, np.int32),
      seed=sampling.request_key(options.seed),
      stops=_stops(options.stops),
      temperature=np.float32(options.temperature),
      top_k=np.int32(options.top_k),
      top_p=np.float32(options.top_p),
      log_prob_temperature=np.float32((options.tempered_log_probs and options.temperature) or 1.0),
    )
    for row, request in enumerate(wave):
      size = request.tokens.size - 1
      arrays.prompts[row, :size] = request.tokens[:-1]
      arrays.lengths[row] = size
      arrays.last[row] = request.tokens[-1]
      arrays.budgets[row] = request.budget
      arrays.prompt[row] = request.prompt
      arrays.sample[row] = request.sample
    tokens, log_probs, counts, stopped = jax.device_get(self._wave(weights, arrays, room=room))
    return {
      request.number: Completion(
        token_ids=tokens[row, : counts[row]].tolist(),
        log_probs=log_probs[row, : counts[row]].tolist(),
        finish_reason="stop" if stopped[row] else "length",
      )
      for row, request in enumerate(wave)
    }

  def _run_wave(
    self, weights: Mapping[Path, jax.Array], wave: _Wave, *, room: int
  ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Generates a wave; returns tokens and log-probabilities [batch, room], how many of each row count, and whether
    it stopped by a stop token or sequence."""
    # Runs when it is traced, so once for each combination of sizes.
    self.programs += 1
    batch, longest_stop = wave.prompts.shape[0], wave.stops.shape[1]
    # Dropout is off: what would be drawn is never read.
    drawn = jax.tree.map(placeholder, self._drawn)
    apart = self._split_layers(weights)
    variables = nnx.map_state(lambda path, variable: variable.replace(apart[tuple(path)]), self._weights)
    model = nnx.merge(self._graphdef, drawn, variables, copy=True)
    maxtext_api.prefill(model, wave.prompts, wave.lengths, new_tokens=room)
    graphdef, caches, rest = nnx.split(model, nnx.Cache, ...)
    # Else XLA keeps the prompts' keys and values as the layers made them, and transposes them again for each token.
    caches = jax.lax.optimization_barrier(caches)
    draws = sampling.uniforms(sampling.sequence_keys(wave.seed, wave.prompt, wave.sample), room)

    def step(state: _State) -> _State:
      model = nnx.merge(graphdef, state.caches, rest, copy=True)
      logits = maxtext_api.decode(model, state.last, wave.lengths, state.step)
      token = sampling.choose(
        logits,
        draws[state.step],
        temperature=wave.temperature,
        top_k=wave.top_k,
        top_p=wave.top_p,
      )
      log_prob = token_log_probs(logits / wave.log_prob_temperature, token)
      # In front of the first token are as many columns as the longest stop sequence needs.
      tokens = jax.lax.dynamic_update_index_in_dim(state.tokens, token, state.step + longest_stop - 1, 1)
      newest = jax.lax.dynamic_slice_in_dim(tokens, state.step, longest_stop, 1)[:, None]
      ended = jnp.any(jnp.all((newest == wave.stops) | (wave.stops == _ANY_TOKEN), axis=-1), axis=-1)
      counts = state.counts + state.active
      return _State(
        step=state.step + 1,
        last=token,
        active=state.active & ~ended & (counts < wave.budgets),
        stopped=state.stopped | (state.active & ended),
        counts=counts,
        tokens=tokens,
        log_probs=jax.lax.dynamic_update_index_in_dim(state.log_probs, log_prob, state.step, 1),
        caches=nnx.state(model, nnx.Cache),
      )

    start = _State(
      step=jnp.int32(0),
      last=wave.last,
      active=wave.budgets > 0,
      stopped=jnp.zeros(batch, bool),
      counts=jnp.zeros(batch, jnp.int32),
      tokens=jnp.full((batch, longest_stop - 1 + room), _NO_TOKEN, jnp.int32),
      log_probs=jnp.zeros((batch, room), jnp.float32),
      caches=caches,
    )
    end = jax.lax.while_loop(lambda state: jnp.any(state.active), step, start)
    return end.tokens[:, longest_stop - 1 :], end.log_probs, end.counts, end.stopped


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class _Wave:
  """What a wave's program takes beside the weights.

  The first six are [batch, …], rows without a budget are empty. Stops are rows of tokens, filled from the left with
  what any token fits, from above with what none fits.
  """

  prompts: Any
  lengths: Any
  last: Any
  budgets: Any
  prompt: Any
  sample: Any
  seed: Any
  stops: Any
  temperature: Any
  top_k: Any
  top_p: Any
  log_prob_temperature: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
  """What a wave carries from token to token."""

  step: jax.Array
  last: jax.Array
  active: jax.Array
  stopped: jax.Array
  counts: jax.Array
  tokens: jax.Array
  log_probs: jax.Array
  caches: Any


def _stops(sequences: Sequence[Sequence[int]]) -> np.ndarray:
  """Stop sequences as `_Wave` has them, [stops, longest] int32."""
  longest = _power_of_two(max(map(len, sequences), default=1), at_least=1)
  stops = np.full((_power_of_two(len(sequences), at_least=_STOPS), longest), _NO_TOKEN, np.int32)
  for row, sequence in enumerate(sequences):
    stops[row] = [_ANY_TOKEN] * (longest - len(sequence)) + list(sequence)
  return stops


def _waves(requests: Sequence[Request], size: int) -> list[list[Request]]:
  """Requests of like lengths together, the longest first."""
  ordered = sorted(requests, key=lambda request: (-request.tokens.size, request.number))
  return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def _power_of_two(number: int, *, at_least: int) -> int:
  return 1 << (max(number, at_least) - 1).bit_length()
