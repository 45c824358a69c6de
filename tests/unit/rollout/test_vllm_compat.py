"""What mends vLLM beside tpu-inference, on the smallest faithful models of their code.

The real libraries are in tests/integration/test_vllm_patches.py. Here stands what they do in few lines, so that it is
tested without them: `is_init_field` and `replace` of vLLM 0.12 to 0.32, `with_hf_config` of those up to 0.29 (it ends
in `replace`, whose `__post_init__` runs the platform's checks), and `ShardingConfigManager.from_vllm_config` of
tpu-inference 0.20 to 0.32 (the strategy has to use all devices; afterwards `data_parallel_size` is 1).
"""

from __future__ import annotations

import dataclasses
import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from maxtext_posttrain.errors import ConfigError, GenerationError
from maxtext_posttrain.rollout import vllm_compat
from maxtext_posttrain.rollout.vllm_compat import DataParallelPatch, InitFieldPatch, Patch, patched


class Manager:
  """tpu-inference's, as far as it counts devices."""

  def __init__(self, config: Any):
    parallel, strategy = config.parallel_config, config.additional_config["sharding"]["sharding_strategy"]
    tensor, decode = strategy.get("tensor_parallelism") or parallel.tensor_parallel_size, _decode(parallel)
    self.sharding_strategy = SimpleNamespace(
      tensor_parallelism=tensor // decode,
      data_parallelism=parallel.data_parallel_size,
      expert_parallelism=strategy.get("expert_parallelism", 1),
      sequence_parallelism=strategy.get("sequence_parallelism", 1),
      decode_context_parallelism=decode,
    )
    parallel.data_parallel_size = 1
    assert math.prod(vars(self.sharding_strategy).values()) == len(strategy["device_indexes"])

  from_vllm_config = classmethod(lambda cls, config: cls(config))


def _decode(parallel: Any) -> int:
  return getattr(parallel, "decode_context_parallel_size", 1)


@dataclasses.dataclass
class ModelConfig:
  name: str = "model"


@dataclasses.dataclass
class NewModelConfig(ModelConfig):
  """As of vLLM 0.30, whose `__post_init__` of a rebuilt configuration returns early."""

  is_submodel_config: bool = False


@dataclasses.dataclass
class VllmConfig:
  parallel_config: Any
  additional_config: dict[str, Any]
  model_config: Any = None
  lora_config: Any = None
  instance: int = dataclasses.field(default=0, init=False)

  def __post_init__(self):
    self.instance = id(self)
    self.sharding_config = Manager.from_vllm_config(self)

  def with_hf_config(self, hf_config: Any) -> VllmConfig:
    return sys.modules["vllm_stand_in"].replace(self, model_config=hf_config)  # type: ignore[attr-defined]


class Rebuilt(VllmConfig):
  """Whose rebuilding runs no checks, so that nothing sets `sharding_config` anew."""

  def __post_init__(self):
    pass


def make(dp: int, *, tp: int = 1, devices: int = 8, kind: type = VllmConfig, dcp: int | None = None, **strategy: int):
  parallel = SimpleNamespace(data_parallel_size=dp, tensor_parallel_size=tp)
  if dcp is not None:
    parallel.decode_context_parallel_size = dcp
  additional = {"sharding": {"sharding_strategy": {"device_indexes": list(range(devices)), **strategy}}}
  return kind(parallel, additional)


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
  """`vllm.config.utils`, and a module that imported its functions under other names."""
  module, importer = ModuleType("vllm_stand_in"), ModuleType("vllm_importer")

  def is_init_field(cls: Any, name: str) -> bool:
    for field in dataclasses.fields(cls):
      if field.name == name:
        return field.init
    raise ValueError(f"Field {name!r} not found in {cls.__name__}.")

  def replace(instance: Any, /, **changes: Any) -> Any:
    cls = type(instance)
    values = {key: value for key, value in vars(instance).items() if module.is_init_field(cls, key)}  # type: ignore[attr-defined]
    return cls(**{**values, **changes})

  module.is_init_field, module.replace = is_init_field, replace  # type: ignore[attr-defined]
  importer.imported = is_init_field  # type: ignore[attr-defined]
  monkeypatch.setitem(sys.modules, "vllm_stand_in", module)
  monkeypatch.setitem(sys.modules, "vllm_importer", importer)
  return module


def patches(utils: ModuleType, model_config: type = ModelConfig) -> list[Patch]:
  return [InitFieldPatch(utils, VllmConfig), DataParallelPatch(VllmConfig, model_config, Manager)]


def test_the_faults_are_there_and_are_mended_and_the_mending_undone(utils: ModuleType):
  config = make(8)
  with pytest.raises(ValueError, match="sharding_config"):
    config.with_hf_config("other")
  with patched(patches(utils)) as applied:
    assert applied == [InitFieldPatch.name, DataParallelPatch.name]
    rebuilt = config.with_hf_config("other")
    assert (rebuilt.model_config, rebuilt.sharding_config.sharding_strategy.data_parallelism) == ("other", 8)
    # As tpu-inference left it: one engine for all replicas.
    assert config.parallel_config.data_parallel_size == 1
    again = rebuilt.with_hf_config("third")
    assert again.sharding_config.sharding_strategy.data_parallelism == 8
  with pytest.raises(ValueError, match="sharding_config"):
    config.with_hf_config("other")


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize(
  ("dp", "sizes"),
  [
    (8, {}),
    (4, {"tp": 2}),
    (4, {"tp": 2, "dcp": 1}),
    # Decode context parallelism lies within the tensor axis: 8 devices, not 16.
    (2, {"tp": 4, "dcp": 2}),
    (2, {"tp": 1, "tensor_parallelism": 4, "dcp": 4}),
    (2, {"tp": 2, "expert_parallelism": 2}),
    (1, {"tp": 2, "expert_parallelism": 2, "sequence_parallelism": 2}),
  ],
)
def test_data_parallelism_comes_back(utils: ModuleType, dp: int, sizes: dict[str, int], seen: bool):
  config = make(dp, **sizes)
  assert config.parallel_config.data_parallel_size == 1
  if not seen:
    del config.sharding_config
  assert vllm_compat.original_data_parallelism(config) == dp
  with patched(patches(utils)):
    rebuilt = config.with_hf_config("other")
  assert rebuilt.sharding_config.sharding_strategy.data_parallelism == dp


@pytest.mark.parametrize(
  ("sizes", "says"),
  [
    ({"tp": 3}, r"8 devices / \(tensor 3 x expert 1 x sequence 1 x prefill_context 1\) = 8 / 3"),
    ({"tp": 16}, "= 8 / 16 leaves no whole number"),
    ({"tp": 6, "dcp": 3}, r"= 8 / 6 .*\(decode context 3 lies within tensor\)"),
    ({"tp": 4, "dcp": 3}, "tensor parallelism 4 is not a multiple of decode context parallelism 3"),
  ],
)
def test_devices_that_do_not_come_out_are_an_error_with_the_arithmetic(sizes: dict[str, int], says: str):
  config = make(1, kind=Rebuilt, **sizes)
  with pytest.raises(GenerationError, match=says) as wrong:
    vllm_compat.original_data_parallelism(config)
  assert "\n" not in str(wrong.value)


@pytest.mark.parametrize(
  "additional", [None, {}, {"sharding": None}, {"sharding": {"sharding_strategy": {}}}, {"sharding": "auto"},
                 {"sharding": {"sharding_strategy": {"device_indexes": None}}},
                 {"sharding": {"sharding_strategy": {"device_indexes": 8}}}]
)  # fmt: skip
def test_where_no_devices_are_named_nothing_is_worked_out(additional: Any):
  config = Rebuilt(SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1), additional)
  assert vllm_compat.original_data_parallelism(config) is None


def test_a_rebuilt_configuration_keeps_what_was_set_at_run_time(utils: ModuleType):
  config = make(8, kind=Rebuilt)
  config.sharding_config = "set"
  with patched(patches(utils)):
    assert utils.replace(config).sharding_config == "set"
    assert utils.replace(config, sharding_config="new").sharding_config == "new"
    assert not hasattr(utils.replace(make(8, kind=Rebuilt)), "sharding_config")


def test_what_was_found_is_there_again_where_no_check_sets_it(utils: ModuleType):
  config = make(1, kind=Rebuilt)
  assert vllm_compat.original_data_parallelism(config) == 8
  with patched(patches(utils)):
    config.with_hf_config("other")
  assert config.parallel_config.data_parallel_size == 1


def test_only_the_known_fields_are_tolerated_and_everywhere(utils: ModuleType):
  importer = sys.modules["vllm_importer"]
  original = utils.is_init_field
  with patched(patches(utils)):
    assert importer.imported is utils.is_init_field is not original
    assert importer.imported(VllmConfig, "sharding_config") is False
    assert importer.imported(VllmConfig, "parallel_config") is True
    assert importer.imported(VllmConfig, "instance") is False
    with pytest.raises(ValueError, match="shard_config"):
      importer.imported(VllmConfig, "shard_config")
  assert importer.imported is utils.is_init_field is original


def test_applied_twice_it_is_applied_once_and_undone_by_the_first(utils: ModuleType):
  original, method = utils.is_init_field, VllmConfig.with_hf_config
  with patched(patches(utils)):
    once, once_method = utils.is_init_field, VllmConfig.with_hf_config
    with patched(patches(utils)):
      assert (utils.is_init_field, VllmConfig.with_hf_config) == (once, once_method)
    assert utils.is_init_field is once
  assert (utils.is_init_field, VllmConfig.with_hf_config) == (original, method)


def test_it_is_undone_after_an_error(utils: ModuleType):
  original = utils.is_init_field
  with pytest.raises(RuntimeError), patched(patches(utils)):
    raise RuntimeError
  assert utils.is_init_field is original


def test_where_nothing_is_wrong_nothing_is_patched(utils: ModuleType):
  assert DataParallelPatch(VllmConfig, NewModelConfig, Manager).fault() is None
  assert DataParallelPatch(VllmConfig, ModelConfig, None).fault() is None

  class Declaring(Rebuilt):
    pass

  declared = dataclasses.make_dataclass("Declared", [("sharding_config", Any, None)])
  assert InitFieldPatch(utils, declared).fault() is None
  method = VllmConfig.with_hf_config
  with patched([InitFieldPatch(utils, declared), DataParallelPatch(VllmConfig, NewModelConfig, Manager)]) as applied:
    assert applied == []
    assert VllmConfig.with_hf_config is method


def test_arguments_go_through_the_filter():
  wanted = {"model": "m", "swap_space": 4, "seed": 1}
  kept, dropped = vllm_compat.supported_arguments(wanted, {"model", "seed"}, {"seed": "seed=1"}, "0.31.0")
  assert (kept, dropped) == ({"model": "m", "seed": 1}, {"swap_space": 4})
  with pytest.raises(ConfigError) as refused:
    vllm_compat.supported_arguments(wanted, {"model"}, {"swap_space": "swap_space_vllm_gb=4", "seed": "s=1"}, "0.31.0")
  assert refused.value.problems == [
    "swap_space_vllm_gb=4: vLLM 0.31.0 has no engine argument swap_space; leave it out",
    "s=1: vLLM 0.31.0 has no engine argument seed; leave it out",
  ]


def test_without_the_libraries_there_is_nothing_to_patch(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  assert vllm_compat.known_patches() == []
