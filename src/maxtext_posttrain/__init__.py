"""Post-training for MaxText whose checkpoints pre-training resumes from as they are.

from maxtext_posttrain import SFT, Model
run = SFT("configs/quickstart/sft.yml", steps=40).train()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from maxtext_posttrain.api import DPO, GRPO, SFT, Distillation, Model, inspect_checkpoint
  from maxtext_posttrain.config import Config, load_config
  from maxtext_posttrain.report.run_folder import RunFolder

__version__ = "0.1.0"
__all__ = ["DPO", "GRPO", "SFT", "Config", "Distillation", "Model", "RunFolder", "inspect_checkpoint", "load_config"]


def __getattr__(name: str) -> Any:
  """What this package offers, imported when it is first asked for: the command line's help needs none of it."""
  if name not in __all__:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  module = "report.run_folder" if name == "RunFolder" else "api"
  return getattr(importlib.import_module(f"{__name__}.{module}"), name)
