"""MaxText's switch of each trainer, which its command turns on and the others refuse."""

from __future__ import annotations

from collections.abc import Mapping

SWITCHES: Mapping[str, str] = {"sft": "use_sft", "dpo": "use_dpo", "grpo": "use_grpo"}
"""MaxText's key by the trainer it stands for."""

TITLES: Mapping[str, str] = {"sft": "SFT", "dpo": "DPO", "grpo": "GRPO", "distill": "distillation"}
"""What the trainers are called in messages."""


def title(trainer: str) -> str:
  """A trainer's name in messages; one that is not ours is called as its command is."""
  return TITLES.get(trainer, trainer)
