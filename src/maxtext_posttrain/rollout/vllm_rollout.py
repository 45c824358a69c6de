"""vLLM behind Tunix's `BaseRollout`, with a check that it computes what the trainer does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl.rollout import base_rollout

from maxtext_posttrain.errors import GenerationError
from maxtext_posttrain.rollout.options import Completion, SamplingOptions
from maxtext_posttrain.rollout.tunix_rollout import MaxTextRollout
from maxtext_posttrain.rollout.vllm_engine import VllmEngine
from maxtext_posttrain.rollout.vllm_settings import VllmSettings
from maxtext_posttrain.rollout.vllm_tpu import TpuVllmEngine
from maxtext_posttrain.rollout.weights import model_weights

TOLERANCE = {True: 1e-3, False: 0.1}
"""How far log-probabilities may be from the trainer's: in float32, and in bfloat16."""

_PROMPTS = 4
_PROMPT_TOKENS = 4
_NEW_TOKENS = 12
_SEED = 20


class VllmRollout(MaxTextRollout):
  """Completions by vLLM, which takes over the weights of each `update_params`.

  After the first one, and every `settings.check_period` after it, vLLM's greedy log-probabilities are compared with the
  trainer's.
  """

  name = "vllm"

  def __init__(
    self,
    *,
    tokenizer: Any,
    settings: VllmSettings,
    rollout_config: base_rollout.RolloutConfig,
    max_batch: int = 64,
    report: Callable[[str], None] = print,
    **parts: Any,
  ):
    """Starts vLLM.

    Args:
      tokenizer: Tunix's adapter, which is left unused.
      settings: how vLLM is set up.
      rollout_config: as `MaxTextRollout`'s; calls may filter by top-k or top-p where it does.
      max_batch: completions generated at once, at most, unless `settings` say how many.
      report: is told what vLLM was not given, and what checks found, a line each.
      **parts: see `MaxTextRollout`.

    Raises:
      ConfigError, GenerationError, ModelError: see `VllmEngine`.
    """
    del tokenizer
    if jax.process_count() > 1:
      raise GenerationError(
        f"rollout_engine=vllm: runs in one process, and this run has {jax.process_count()}; set rollout_engine=native"
      )
    super().__init__(rollout_config=rollout_config, **parts)
    sampling = self._sampling(rollout_config)
    platform = self._mesh.devices.flat[0].platform
    start = functools.partial(TpuVllmEngine, mesh=self._mesh) if platform == "tpu" else VllmEngine
    self._engine = start(
      self._maxtext,
      settings=settings,
      platform=platform,
      max_batch=max_batch,
      filters=sampling.top_k > 0 or sampling.top_p < 1,
      report=report,
    )
    self._period = settings.check_period
    self._report = report
    self._loaded: list[Any] = []
    self._updates = 0

  def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
    """Hands the weights to vLLM, unless they are the very arrays it has.

    Args:
      params: an `nnx.State` of the model, or of a part of it.
      filter_types: the kinds of variables in it, for engines that have to know.

    Raises:
      GenerationError: vLLM does not take them, or a check finds that it computes something else.
    """
    super().update_params(params, filter_types)
    assert self._weights is not None
    leaves = jax.tree.leaves(nnx.filter_state(self._weights, nnx.Param))
    if len(leaves) == len(self._loaded) and all(new is old for new, old in zip(leaves, self._loaded, strict=True)):
      return
    self._engine.load(self._weights)
    self._loaded = leaves
    due = self._updates == 0 or (self._period and self._updates % self._period == 0)
    self._updates += 1
    if due:
      self.check()

  def check(self) -> float:
    """Compares greedy log-probabilities with the trainer's, by the weights of the last `update_params` or the model's.

    Returns:
      The largest difference.

    Raises:
      GenerationError: it is above `TOLERANCE`.
    """
    self._have_weights()
    prompts = self._check_prompts()
    room = self._engine.max_context - prompts.shape[1]
    completions = self._engine.generate(prompts.tolist(), SamplingOptions(min(_NEW_TOKENS, room), temperature=0.0))
    said = np.array([each.token_ids for each in completions], np.int32)
    trainers = np.asarray(self.get_per_token_logps(jnp.asarray(prompts), jnp.asarray(said)))
    gap = float(np.max(np.abs(trainers - np.array([each.log_probs for each in completions]))))
    limit = TOLERANCE[self._engine.exact]
    if not gap <= limit:
      raise GenerationError(
        f"vLLM {self._engine.version}: greedy log-probabilities are up to {gap:.2g} from the trainer's, more than"
        f" {limit:g}: it computes another model, or less exactly (matmul_precision=highest makes the trainer exact);"
        " set rollout_engine=native"
      )
    self._report(f"vLLM {self._engine.version}: greedy log-probabilities are within {gap:.1e} of the trainer's")
    return gap

  def _check_prompts(self) -> np.ndarray:
    """Prompts [batch, prompt] of random tokens, none of them the pad, in a batch that the mesh can share."""
    size = self._mesh.size
    rows = -(-_PROMPTS // size) * size
    length = min(_PROMPT_TOKENS, self._engine.max_context - 1)
    drawn = np.random.default_rng(_SEED).integers(0, self._engine.vocab_size - 1, (rows, length), dtype=np.int32)
    # One above from the pad on, so that it is never drawn.
    return drawn + (drawn >= self.pad_id()) if 0 <= self.pad_id() < self._engine.vocab_size else drawn

  def _have_weights(self) -> None:
    if not self._loaded:
      self.update_params(model_weights(self._model))

  def _complete(self, prompts: Sequence[Sequence[int]], options: SamplingOptions) -> list[Completion]:
    self._have_weights()
    return self._engine.generate(prompts, options)

  def close(self) -> None:
    """Ends vLLM."""
    self._engine.close()
