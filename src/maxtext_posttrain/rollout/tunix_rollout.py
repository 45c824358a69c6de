"""Engines behind Tunix's `BaseRollout`, so that whatever takes a Tunix engine takes them.

Tokens cross the border in both directions: prompts may be lists of ids, and completions are ids. Prompt i of a call
draws by (seed, i, token) alone, so a prompt that is repeated gets another completion each time, and the same call with
the same weights gives the same bits.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tunix.rl.rollout import base_rollout

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.errors import GenerationError
from maxtext_posttrain.losses.sft import token_log_probs
from maxtext_posttrain.maxtext_api import MaxTextConfig
from maxtext_posttrain.rollout.native import NativeEngine
from maxtext_posttrain.rollout.options import Completion, SamplingOptions
from maxtext_posttrain.rollout.text import WrittenEnd, completion_text
from maxtext_posttrain.rollout.weights import model_weights, placeholder, weights_of
from maxtext_posttrain.tokenizers import Tokenizer


class MaxTextRollout(base_rollout.BaseRollout, abc.ABC):
  """What engines have in common: a live MaxText model, whose weights `update_params` replaces without a copy.

  What a trainer donates to its next update must be replaced by its result before the next call.
  """

  name: str

  def __init__(
    self,
    *,
    rollout_actor: nnx.Module,
    mesh: Mesh,
    rollout_config: base_rollout.RolloutConfig,
    maxtext: MaxTextConfig,
    texts: Tokenizer,
    stop_sequences: Sequence[Sequence[int]] = (),
    written_end: WrittenEnd | None = None,
  ):
    """Takes the parts.

    Args:
      rollout_actor: the live MaxText model, or an abstract one whose weights come with `update_params`.
      mesh: the devices the model lies on.
      rollout_config: the tokens that end a completion (`eos_tokens`), unless a call brings its own.
      maxtext: the model's configuration.
      texts: of the prompts given as text, and of the completions.
      stop_sequences: a completion ends with one of these too.
      written_end: what a completion's text goes up to.
    """
    self._model = rollout_actor
    self._texts = texts
    self._stop_sequences = stop_sequences
    self._end = written_end
    self._mesh = mesh
    self._maxtext = maxtext
    self._eos_tokens = tuple(rollout_config.eos_tokens or (texts.eos_id,))
    self._weights: nnx.State | None = None
    self._compiled_log_probs = jax.jit(self._per_token_log_probs)

  @abc.abstractmethod
  def _complete(self, prompts: Sequence[Sequence[int]], options: SamplingOptions) -> list[Completion]:
    """Completes each prompt with the weights of the last `update_params`."""

  def close(self) -> None:
    """Gives back what the engine holds; it is not used any more."""

  def generate(
    self,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    rollout_config: base_rollout.RolloutConfig,
    **kwargs: Any,
  ) -> base_rollout.RolloutOutput:
    """Completes each prompt once.

    Args:
      prompts: texts, or token ids.
      rollout_config: `max_tokens_to_generate`, `temperature`, `top_k`, `top_p`, `seed`, `eos_tokens` and
        `max_prompt_length` are read.
      **kwargs: none are known.

    Returns:
      Tokens with the one that ends a completion included, and log-probabilities at the call's temperature.

    Raises:
      GenerationError: a prompt is longer than `max_prompt_length`, or is none the engine takes.
    """
    if kwargs:
      raise GenerationError(f"the {self.name} engine takes no {', '.join(sorted(kwargs))}")
    ids = [self._texts.encode(prompt, add_bos=True) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    longest = max(map(len, ids), default=0)
    if longest > rollout_config.max_prompt_length:
      raise GenerationError(
        f"a prompt has {longest} tokens, more than max_prompt_length={rollout_config.max_prompt_length}; shorten it or"
        " raise max_prefill_predict_length"
      )
    completions = self._complete(ids, self._sampling(rollout_config))
    padded = np.full((len(ids), rollout_config.max_prompt_length), self.pad_id(), np.int32)
    for row, prompt in enumerate(ids):
      padded[row, rollout_config.max_prompt_length - len(prompt) :] = prompt
    return base_rollout.RolloutOutput(
      text=[completion_text(self._texts, completion, self._end) for completion in completions],
      logits=[],
      tokens=[np.asarray(completion.token_ids, np.int32) for completion in completions],
      left_padded_prompt_tokens=padded,
      logprobs=[np.asarray(completion.log_probs, np.float32) for completion in completions],
    )

  def _sampling(self, rollout_config: base_rollout.RolloutConfig) -> SamplingOptions:
    seed: Any = rollout_config.seed
    return SamplingOptions(
      max_new_tokens=rollout_config.max_tokens_to_generate,
      temperature=float(rollout_config.temperature),
      top_k=max(rollout_config.top_k or 0, 0),
      top_p=1.0 if rollout_config.top_p is None else float(rollout_config.top_p),
      seed=0 if seed is None else int(seed),
      stop_token_ids=tuple(rollout_config.eos_tokens or self._eos_tokens),
      stop_sequences=self._stop_sequences,
      tempered_log_probs=True,
    )

  def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
    """Log-probabilities of completions by the trainer's forward pass, at temperature 1.

    Args:
      prompt_tokens: [batch, prompt] int32, padded on the left with the pad id.
      completion_tokens: [batch, completion] int32, padded on the right; what follows a completion's end means nothing.

    Returns:
      [batch, completion] float32.
    """
    graphdef, state = nnx.split(self._model)
    weights = self._weights
    if weights is not None:
      state = nnx.merge_state(state, weights)
    # An abstract model's rng keys: nothing is drawn.
    state = jax.tree.map(lambda leaf: placeholder(leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, state)
    with maxtext_api.mesh_context(self._maxtext, self._mesh):
      return self._compiled_log_probs(graphdef, state, jnp.asarray(prompt_tokens), jnp.asarray(completion_tokens))

  def _per_token_log_probs(
    self, graphdef: nnx.GraphDef, state: nnx.State, prompts: jax.Array, completions: jax.Array
  ) -> jax.Array:
    model = nnx.merge(graphdef, state)
    # A leading pad is no token; one inside a prompt is, whatever its id.
    present = jnp.cumsum(prompts != self.pad_id(), axis=1) > 0
    present = jnp.concatenate([present, jnp.ones_like(completions, dtype=bool)], axis=1).astype(jnp.int32)
    tokens = jnp.concatenate([prompts, completions], axis=1)
    batch = {
      "inputs": tokens,
      "inputs_position": jnp.maximum(jnp.cumsum(present, axis=1) - 1, 0),
      "inputs_segmentation": present,
      "targets": tokens,
      "targets_segmentation": present,
    }
    logits = maxtext_api.forward(self._maxtext, model, batch, is_train=False)
    return token_log_probs(logits[:, prompts.shape[1] - 1 : -1], completions)

  def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
    """Takes the weights of the next calls, without a copy; what `params` leaves out stays the model's own.

    Args:
      params: an `nnx.State` of the model, or of a part of it.
      filter_types: the kinds of variables in it, for engines that have to know.
    """
    del filter_types
    self._weights = nnx.merge_state(model_weights(self._model), weights_of(params))

  def pad_id(self) -> int:
    """The id that fills prompts on the left."""
    return int(self._texts.pad_id)

  def eos_id(self) -> int:
    """The first token that ends a completion."""
    return int(self._eos_tokens[0])

  def model(self) -> nnx.Module:
    """The actor; its weights are those of the last `update_params`, where there was one."""
    return self._model


class NativeRollout(MaxTextRollout):
  """Completions by a live MaxText model's own weights, which are used where they lie.

  As a Tunix engine: `ClusterConfig(rollout_engine=functools.partial(NativeRollout, maxtext=config, ...))`.
  """

  name = "native"

  def __init__(self, *, tokenizer: Any, max_batch: int = 64, **parts: Any):
    """Looks at the model; nothing is compiled yet.

    Args:
      tokenizer: Tunix's adapter, which is left unused: `texts` reads and writes the text.
      max_batch: completions generated at once, at most.
      **parts: see `MaxTextRollout`.

    Raises:
      GenerationError: the architecture is none we generate with.
    """
    del tokenizer
    super().__init__(**parts)
    self._engine = NativeEngine(self._maxtext, self._mesh, self._model, max_batch=max_batch)

  def _complete(self, prompts: Sequence[Sequence[int]], options: SamplingOptions) -> list[Completion]:
    return self._engine.generate(prompts, options, weights=self._weights)
