"""The door to MaxText's vLLM integration: vLLM on TPUs, where tpu_inference runs MaxText's own model.

It can be imported where vllm and tpu_inference are installed, and runs on TPUs alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from maxtext_posttrain.maxtext_api import MaxTextConfig

ARCHITECTURE = "MaxTextForCausalLM"
"""The name under which MaxText registers its model with vLLM."""


class DirectSampler:
  """vLLM with MaxText's model, and the trainer's weights put where its own lie.

  Attributes:
    llm: vLLM's `LLM`.
  """

  llm: Any

  def __init__(
    self,
    config: MaxTextConfig,
    mesh: Mesh,
    *,
    model: Mapping[str, Any],
    arguments: Mapping[str, Any],
    additional: Mapping[str, Any],
    memory_share: float,
  ):
    """Starts vLLM on the mesh's devices, with random weights.

    Args:
      config: the run's.
      mesh: its devices are vLLM's.
      model: MaxText's keys for the model, on top of its inference/vllm.yml.
      arguments: of vLLM's `EngineArgs`; not the parallelism, which Tunix works out.
      additional: of its `additional_config`, beside what is made here.
      memory_share: of each device's memory, vLLM's.
    """
    from maxtext.integration.vllm.maxtext_vllm_adapter import register
    from maxtext.integration.vllm.maxtext_vllm_rollout import MaxTextVllmSampler
    from tunix.generate.vllm_sampler import VllmConfig

    register(config)
    # Without mappings Tunix hands MaxText's tree over as it is.
    settings: Any = VllmConfig(
      mesh=mesh,
      hbm_utilization=memory_share,
      init_with_random_weights=True,
      tpu_backend_type="maxtext",
      return_logprobs=True,
      engine_kwargs={
        **arguments,
        "hf_overrides": {**arguments.get("hf_overrides", {}), "architectures": [ARCHITECTURE]},
      },
      additional_config={**additional, "maxtext_config": {**model, **additional.get("maxtext_config", {})}},
    )
    self._sampler = MaxTextVllmSampler(
      tokenizer=_NoTokenizer(), config=settings, direct_maxtext_sync=True, model_name=config.model_name
    )
    self.llm = self._sampler.llm

  def load(self, weights: Mapping[str, Any]) -> None:
    """Puts a model's weights in the place of vLLM's.

    Args:
      weights: a nested mapping of arrays, every layer's apart.

    Raises:
      ValueError: a layer of vLLM's model would keep its random weights.
    """
    from maxtext.integration.vllm.maxtext_vllm_rollout import validate_direct_sync_layer_coverage

    # Tunix hands over what both trees have, and says nothing of the rest.
    validate_direct_sync_layer_coverage(weights, self._sampler.transformer_state)
    self._sampler.update_params(weights)
    jax.block_until_ready(jax.tree.leaves(self._sampler.transformer_state))


class _NoTokenizer:
  """What Tunix's sampler asks for and tokens going in and out leave unused."""

  def encode(self, text: str, **_: Any) -> list[int]:
    raise NotImplementedError(text)

  def decode(self, ids: list[int], **_: Any) -> str:
    raise NotImplementedError(ids)

  def bos_id(self) -> int:
    return 0

  def eos_id(self) -> int:
    return 0

  def pad_id(self) -> int:
    return 0
