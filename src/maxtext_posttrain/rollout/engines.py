"""The engines that `rollout_engine` names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from maxtext_posttrain.rollout.tunix_rollout import MaxTextRollout, NativeRollout
from maxtext_posttrain.rollout.vllm_settings import vllm_settings


def build_rollout(config: Any, *, report: Callable[[str], None] = tqdm.write, **parts: Any) -> MaxTextRollout:
  """The engine that the configuration names; vLLM is imported for the one that needs it.

  Args:
    config: our view of the configuration.
    report: is told what a user should know of the engine, a line each; left out, they are printed around progress bars.
    **parts: `NativeRollout`'s arguments.

  Raises:
    GenerationError: it can't be had here.
    ConfigError: it takes no such arguments.
  """
  if config.rollout_engine == "vllm":
    from maxtext_posttrain.rollout.vllm_rollout import VllmRollout

    return VllmRollout(settings=vllm_settings(config), report=report, **parts)
  return NativeRollout(**parts)
