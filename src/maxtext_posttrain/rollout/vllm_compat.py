"""What breaks before the first rollout when vLLM and tpu-inference are of different releases, and what mends it.

Three things, each looked for in the installed versions and mended only where it is there:

- Arguments of the engine come and go (`swap_space` went with vLLM 0.18): `supported_arguments` drops what the installed
  `EngineArgs` has no field for, unless the user set it.
- vLLM rebuilds a configuration from its init fields, and `is_init_field` raises on the field that tpu-inference sets at
  run time (`sharding_config`). Treated as no init field it does not, and the rebuilt configuration is given the field.
- `VllmConfig.with_hf_config` ran the platform's checks anew up to vLLM 0.29. tpu-inference's had by then set
  `data_parallel_size` to 1, so that the devices it was given no longer came out: the original is put back for the call.

Nothing here imports vLLM or tpu-inference before a function is called, and none of it is applied by importing it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

from maxtext_posttrain.errors import ConfigError, GenerationError

RUNTIME_FIELDS = ("sharding_config",)
"""What tpu-inference sets on a `VllmConfig` without declaring it."""

_PATCHED = "_maxtext_posttrain_patch_of"
_MULTIPLYING = ("expert_parallelism", "sequence_parallelism")
"""Of tpu-inference's sharding strategy, the parallelisms that take devices beside the tensor axis."""


def supported_arguments(
  wanted: Mapping[str, Any], fields: Collection[str], set_by: Mapping[str, str], version: str
) -> tuple[dict[str, Any], dict[str, Any]]:
  """The arguments that an installed engine has a field for, and those that it has not.

  Args:
    wanted: argument to value.
    fields: the names of `EngineArgs`'s fields.
    set_by: of the arguments that the user asked for, how they said it, as `vllm_engine_args.swap_space=2`.
    version: of vLLM, for the message.

  Raises:
    ConfigError: the user asked for what there is no more (or never was).
  """
  dropped = {name: value for name, value in wanted.items() if name not in fields}
  asked = [name for name in dropped if name in set_by]
  if asked:
    raise ConfigError([f"{set_by[name]}: vLLM {version} has no engine argument {name}; leave it out" for name in asked])
  return {name: value for name, value in wanted.items() if name in fields}, dropped


def argument_names(engine_args: type) -> frozenset[str]:
  """The names of `EngineArgs`'s fields."""
  return frozenset(field.name for field in dataclasses.fields(engine_args))


class Patch(Protocol):
  """A fault of installed versions, and its remedy.

  Attributes:
    name: of the function that is patched.
  """

  name: str

  def fault(self) -> str | None:
    """What is wrong, in a line; None where it is not in the installed versions."""
    ...

  def apply(self) -> Callable[[], None]:
    """Applies the remedy and returns what undoes it; where it is applied already, neither does anything."""
    ...


class InitFieldPatch:
  """`is_init_field` says of fields set at run time that they are no init fields, and `replace` keeps them."""

  name = "vllm.config.utils.is_init_field"

  def __init__(self, utils: ModuleType, config: type):
    """Takes `vllm.config.utils` and the `VllmConfig` that gets the fields."""
    self._utils = utils
    self._config = config

  def fault(self) -> str | None:
    """As `Patch`."""
    is_init_field = _original(self._utils.is_init_field)
    failing = []
    for field in RUNTIME_FIELDS:
      try:
        is_init_field(self._config, field)
      except ValueError:
        failing.append(field)
    return f"raises on {', '.join(failing)}, which tpu-inference sets at run time" if failing else None

  def apply(self) -> Callable[[], None]:
    """As `Patch`."""
    if _is_patch(self._utils.is_init_field):
      return _nothing
    is_init_field, replace = self._utils.is_init_field, self._utils.replace

    @functools.wraps(is_init_field)
    def tolerant(cls: type, name: str) -> bool:
      try:
        return is_init_field(cls, name)
      except ValueError:
        if name not in RUNTIME_FIELDS:
          raise
        return False

    @functools.wraps(replace)
    def keeping(instance: Any, /, **changes: Any) -> Any:
      undeclared = _undeclared(type(instance))
      kept = {name: value for name, value in vars(instance).items() if name in undeclared}
      kept |= {name: changes.pop(name) for name in undeclared if name in changes}
      rebuilt = replace(instance, **changes)
      for name, value in kept.items():
        # What the rebuilding itself set, by the platform's checks, is newer.
        if name not in vars(rebuilt):
          setattr(rebuilt, name, value)
      return rebuilt

    pairs = [(is_init_field, _marked(tolerant, is_init_field)), (replace, _marked(keeping, replace))]
    for old, new in pairs:
      _put_everywhere(old, new)

    def undo() -> None:
      for old, new in pairs:
        _put_everywhere(new, old)

    return undo


class DataParallelPatch:
  """`with_hf_config` sees the data parallelism that there was before tpu-inference set it to 1."""

  name = "vllm.config.VllmConfig.with_hf_config"

  def __init__(self, config: Any, model_config: type, manager: Any):
    """Takes vLLM's `VllmConfig` and `ModelConfig`, and tpu-inference's `ShardingConfigManager` or None."""
    self._config = config
    self._model_config = model_config
    self._manager = manager

  def fault(self) -> str | None:
    """As `Patch`: found by calling tpu-inference's own code twice on a stand-in for a configuration."""
    if self._manager is None or "is_submodel_config" in argument_names(self._model_config):
      return None
    config = _stand_in()
    self._manager.from_vllm_config(config)
    if config.parallel_config.data_parallel_size != 1:
      return None
    try:
      self._manager.from_vllm_config(config)
    except AssertionError:
      return "runs the platform's checks again, which find data_parallel_size already set to 1"
    return None

  def apply(self) -> Callable[[], None]:
    """As `Patch`."""
    with_hf_config = self._config.with_hf_config
    if _is_patch(with_hf_config):
      return _nothing

    @functools.wraps(with_hf_config)
    def restoring(config: Any, *args: Any, **kwargs: Any) -> Any:
      with _data_parallelism(config):
        return with_hf_config(config, *args, **kwargs)

    self._config.with_hf_config = _marked(restoring, with_hf_config)

    def undo() -> None:
      self._config.with_hf_config = with_hf_config

    return undo


def known_patches() -> list[Patch]:
  """The patches that the installed packages could need; none without vLLM, or without tpu-inference beside it."""
  if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("tpu_inference") is None:
    return []
  config = importlib.import_module("vllm.config")
  return [
    InitFieldPatch(importlib.import_module("vllm.config.utils"), config.VllmConfig),
    DataParallelPatch(config.VllmConfig, config.ModelConfig, _sharding_config_manager()),
  ]


@contextlib.contextmanager
def patched(patches: Sequence[Patch]) -> Iterator[list[str]]:
  """Applies those whose fault is there, for the block; yields their names."""
  with contextlib.ExitStack() as stack:
    applied = []
    for patch in patches:
      if patch.fault() is not None:
        stack.callback(patch.apply())
        applied.append(patch.name)
    yield applied


def original_data_parallelism(config: Any) -> int | None:
  """The data parallelism of a `VllmConfig` as it was before tpu-inference set it to 1.

  It is read where it can still be seen: in the configuration's own `sharding_config`, or, where it is not 1, in its
  parallel configuration. Else it is what is left of the devices that were named: `device_indexes` over the tensor axis
  and the other parallelisms. Decode context parallelism divides the tensor axis, so it is in there already; prefill
  context parallelism multiplies devices. (tpu-inference 0.32, `ShardingConfigManager.from_vllm_config`.)

  Returns:
    None where nothing tells: no devices are named, or the strategy is malformed (vLLM says so itself).

  Raises:
    GenerationError: the devices do not come out; with the arithmetic.
  """
  parallel = config.parallel_config
  if parallel.data_parallel_size > 1:
    return parallel.data_parallel_size
  seen = getattr(getattr(config, "sharding_config", None), "sharding_strategy", None)
  if seen is not None:
    return int(seen.data_parallelism)
  strategy: Any = getattr(config, "additional_config", None)
  for key in ("sharding", "sharding_strategy"):
    strategy = strategy.get(key) if isinstance(strategy, Mapping) else None
  devices = strategy.get("device_indexes") if isinstance(strategy, Mapping) else None
  if strategy is None or not isinstance(devices, Sequence) or not devices:
    return None
  parts = {"tensor": strategy.get("tensor_parallelism") or parallel.tensor_parallel_size}
  parts |= {name.removesuffix("_parallelism"): strategy.get(name) or 1 for name in _MULTIPLYING}
  parts["prefill_context"] = getattr(parallel, "prefill_context_parallel_size", None) or 1
  decode = getattr(parallel, "decode_context_parallel_size", None) or 1
  product = math.prod(parts.values())
  written = " x ".join(f"{name} {size}" for name, size in parts.items())
  if parts["tensor"] % decode:
    raise GenerationError(
      f"vLLM's device_indexes: tensor parallelism {parts['tensor']} is not a multiple of decode context parallelism"
      f" {decode}, which divides it; change one of them"
    )
  if product < 1 or len(devices) % product:
    within = f" (decode context {decode} lies within tensor)" if decode > 1 else ""
    raise GenerationError(
      f"vLLM's device_indexes: {len(devices)} devices / ({written}) = {len(devices)} / {product} leaves no whole number"
      f" of replicas{within}; name more or fewer devices, or change a parallelism"
    )
  return len(devices) // product


@contextlib.contextmanager
def _data_parallelism(config: Any) -> Iterator[None]:
  """Puts the original data parallelism back for the block; what was found is there again afterwards."""
  parallel = config.parallel_config
  found, original = parallel.data_parallel_size, original_data_parallelism(config)
  if original is None or original == found:
    yield
    return
  parallel.data_parallel_size = original
  try:
    yield
  finally:
    parallel.data_parallel_size = found


def _sharding_config_manager() -> Any:
  for name in ("tpu_inference.layers.common.sharding", "tpu_inference.layers.jax.sharding"):
    with contextlib.suppress(ImportError, AttributeError):
      return importlib.import_module(name).ShardingConfigManager
  return None


def _stand_in() -> SimpleNamespace:
  """What `from_vllm_config` reads of a configuration, with two devices and a data parallelism of two."""
  parallel = SimpleNamespace(
    tensor_parallel_size=1,
    data_parallel_size=2,
    data_parallel_rank=0,
    data_parallel_size_local=2,
    decode_context_parallel_size=1,
    prefill_context_parallel_size=1,
  )
  strategy = {"device_indexes": [0, 1], "tensor_parallelism": 1}
  additional = {"sharding": {"sharding_strategy": strategy}}
  return SimpleNamespace(parallel_config=parallel, additional_config=additional, lora_config=None)


def _undeclared(cls: type) -> frozenset[str]:
  """The run-time fields that a configuration class does not declare."""
  return frozenset(RUNTIME_FIELDS) - argument_names(cls)


def _original(function: Any) -> Any:
  return getattr(function, _PATCHED, function)


def _is_patch(function: Any) -> bool:
  return hasattr(function, _PATCHED)


def _marked(new: Any, old: Any) -> Any:
  setattr(new, _PATCHED, old)
  return new


def _put_everywhere(old: Any, new: Any) -> None:
  """Puts `new` in the place of `old` in every module that has it under any name."""
  for module in list(sys.modules.values()):
    for name, value in list(getattr(module, "__dict__", {}).items()):
      if value is old:
        setattr(module, name, new)


def _nothing() -> None:
  """Undoes what was not done here."""
