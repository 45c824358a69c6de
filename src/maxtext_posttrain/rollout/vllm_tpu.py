"""The vLLM engine on TPUs: tpu_inference runs MaxText's own model, which takes the trainer's weights as they are.

It is the way of MaxText's own `MaxTextVllmRollout`. tpu_inference starts on TPUs alone, so what is tested elsewhere is
what vLLM is started with and that weights reach the places it names; `VllmRollout` compares log-probabilities with the
trainer's before the first rollout here too. It knows no seeds of single requests, so a rollout is not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx, traverse_util
from jax.sharding import Mesh

from maxtext_posttrain import maxtext_decoding
from maxtext_posttrain.errors import GenerationError
from maxtext_posttrain.maxtext_api import MaxTextConfig
from maxtext_posttrain.models.architecture import Architecture
from maxtext_posttrain.models.maxtext_config import maxtext_keys
from maxtext_posttrain.rollout.options import SamplingOptions
from maxtext_posttrain.rollout.requests import Request
from maxtext_posttrain.rollout.vllm_engine import VllmEngine
from maxtext_posttrain.rollout.weights import LayerSplitter, by_path, model_weights, weights_of

_MEMORY_SHARE = 0.5
"""Of each device's memory, vLLM's where `hbm_utilization_vllm` does not say."""


class TpuVllmEngine(VllmEngine):
  """As `VllmEngine`, on the devices of the trainer's mesh."""

  def __init__(self, config: MaxTextConfig, *, mesh: Mesh, filters: bool = True, **parts: Any):
    """Starts vLLM; its weights are random until `load`.

    Args:
      config: the model's.
      mesh: the trainer's.
      filters: calls may ask for top-k and top-p, which are refused.
      **parts: see `VllmEngine`.

    Raises:
      ConfigError, GenerationError, ModelError: see `VllmEngine`.
    """
    if filters:
      raise GenerationError(
        "rollout_engine=vllm: on TPUs vLLM gives log-probabilities from after top-k and top-p; leave"
        " decode_sampling_top_k and decode_sampling_nucleus_p out, or set rollout_engine=native"
      )
    self._mesh = mesh
    self._split: Any = None
    super().__init__(config, filters=False, **parts)

  def _own_arguments(self, architecture: Architecture) -> dict[str, Any]:
    own = super()._own_arguments(architecture)
    # It is compiled there.
    del own["enforce_eager"]
    return own

  def _launch(self, arguments: Mapping[str, Any], architecture: Architecture) -> Any:
    from maxtext_posttrain.maxtext_vllm import DirectSampler

    rest = dict(arguments)
    share, additional = rest.pop("gpu_memory_utilization", _MEMORY_SHARE), rest.pop("additional_config", {})
    self._sampler = DirectSampler(
      self._config,
      self._mesh,
      model=maxtext_keys(architecture) | {"dtype": self._dtype, "weight_dtype": self._dtype, "log_config": False},
      arguments=rest,
      additional=additional,
      memory_share=share,
    )
    return self._sampler.llm

  def _take(self, weights: nnx.State) -> None:
    given = weights_of(weights)
    if self._split is None:
      apart = maxtext_decoding.decoding_model(maxtext_decoding.inference_config(self._config, "tpu"), self._mesh)
      self._split = jax.jit(LayerSplitter(given, model_weights(apart), self._config.param_scan_axis))
    self._sampler.load(traverse_util.unflatten_dict(self._split(by_path(given))))

  def _seed(self, request: Request, options: SamplingOptions) -> int | None:
    del request, options
    return None
