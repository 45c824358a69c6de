"""The shim on real vLLM, and on real tpu-inference's configuration where that is installed (eight simulated devices).

tpu-inference's classes run on the CPU; its engine does not. With vLLM up to 0.29 beside it both faults are there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from maxtext_posttrain.rollout import vllm_compat
from maxtext_posttrain.rollout.vllm_compat import InitFieldPatch, argument_names, known_patches, patched

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

MODEL = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "hidden_size": 64,
  "intermediate_size": 128,
  "num_attention_heads": 8,
  "num_key_value_heads": 2,
  "num_hidden_layers": 2,
  "vocab_size": 256,
  "max_position_embeddings": 128,
  "hidden_act": "silu",
  "torch_dtype": "float32",
}


def vllm_config(folder: Path, dp: int = 1, tp: int = 1, dcp: int = 1, **strategy: int) -> Any:
  """A real `VllmConfig` on eight devices."""
  from vllm.config import DeviceConfig, ModelConfig, ParallelConfig, VllmConfig  # pyright: ignore[reportMissingImports]

  (folder / "config.json").write_text(json.dumps(MODEL))
  sharding = {"sharding_strategy": {"device_indexes": list(range(8)), **strategy}}
  return VllmConfig(
    model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=64),
    parallel_config=ParallelConfig(
      data_parallel_size=dp,
      tensor_parallel_size=tp,
      decode_context_parallel_size=dcp,
      distributed_executor_backend="mp",
    ),
    device_config=DeviceConfig(device="cpu"),
    additional_config={"sharding": sharding},
  )


def init_field_patch() -> InitFieldPatch:
  from vllm import config  # pyright: ignore[reportMissingImports]
  from vllm.config import utils  # pyright: ignore[reportMissingImports]

  return InitFieldPatch(utils, config.VllmConfig)


def test_swap_space_is_gone(tmp_path: Path):
  from vllm import EngineArgs  # pyright: ignore[reportMissingImports]

  (tmp_path / "config.json").write_text(json.dumps(MODEL))
  kept, dropped = vllm_compat.supported_arguments(
    {"model": str(tmp_path), "max_num_seqs": 4, "swap_space": 2}, argument_names(EngineArgs), {}, "installed"
  )
  assert dropped == {"swap_space": 2}
  assert EngineArgs(**kept).max_num_seqs == 4
  with pytest.raises(TypeError, match="swap_space"):
    EngineArgs(**kept, **dropped)


def test_a_field_set_at_run_time_survives_a_rebuilding(tmp_path: Path):
  import vllm.config  # pyright: ignore[reportMissingImports]
  import vllm.entrypoints.llm  # pyright: ignore[reportMissingImports]

  patch, config = init_field_patch(), vllm_config(tmp_path)
  original = vllm.config.is_init_field
  config.sharding_config = "set at run time"
  assert patch.fault() == "raises on sharding_config, which tpu-inference sets at run time"
  with pytest.raises(ValueError, match="sharding_config"):
    config.with_hf_config(config.model_config.hf_config)
  with patched([patch]) as applied:
    assert applied == [patch.name]
    # Wherever it was imported to.
    assert vllm.config.is_init_field is vllm.entrypoints.llm.is_init_field is not original
    rebuilt = config.with_hf_config(config.model_config.hf_config)
    assert rebuilt.sharding_config == "set at run time"
    assert rebuilt is not config
    with pytest.raises(ValueError, match="sharding_confg"):
      vllm.config.is_init_field(type(config), "sharding_confg")
  assert vllm.config.is_init_field is vllm.entrypoints.llm.is_init_field is original
  with pytest.raises(ValueError, match="sharding_config"):
    config.with_hf_config(config.model_config.hf_config)


@pytest.fixture
def on_tpu_inference(monkeypatch: pytest.MonkeyPatch) -> None:
  """The platform's checks are tpu-inference's, as far as they are of the sharding."""
  sharding = pytest.importorskip("tpu_inference.layers.common.sharding", exc_type=ImportError)
  from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

  def check(config: Any) -> None:
    config.sharding_config = sharding.ShardingConfigManager.from_vllm_config(config)

  monkeypatch.setattr(type(current_platform), "check_and_update_config", staticmethod(check))
  monkeypatch.setenv("NEW_MODEL_DESIGN", "1")


@pytest.mark.usefixtures("on_tpu_inference")
@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize(
  ("dp", "sizes"),
  [(8, {}), (4, {"tp": 2}), (2, {"tp": 4, "dcp": 2}), (2, {"tp": 2, "expert_parallelism": 2})],
  ids=str,
)
def test_data_parallelism_comes_back(tmp_path: Path, dp: int, sizes: dict[str, int], seen: bool):
  config = vllm_config(tmp_path, dp, **sizes)
  strategy = config.sharding_config.sharding_strategy
  assert (config.parallel_config.data_parallel_size, strategy.data_parallelism) == (1, dp)
  if not seen:
    del config.sharding_config
  assert vllm_compat.original_data_parallelism(config) == dp
  patches = known_patches()
  faults = {patch.name: patch.fault() for patch in patches}
  assert faults[InitFieldPatch.name] is not None
  if faults[vllm_compat.DataParallelPatch.name] is None:
    pytest.skip("this vLLM runs the platform's checks once: nothing to mend")
  with patched(patches[:1]), pytest.raises(ValueError, match="Assertion failed"):
    config.with_hf_config(config.model_config.hf_config)
  with patched(patches) as applied:
    assert len(applied) == 2
    rebuilt = config.with_hf_config(config.model_config.hf_config)
  assert rebuilt.sharding_config.sharding_strategy == strategy
  assert rebuilt.parallel_config.data_parallel_size == 1
