"""`posttrain sft`: supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence

from maxtext_posttrain.commands.train import TrainerMain, run_trainer


def run(arguments: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  return run_trainer("sft", arguments, _load)


def _load() -> TrainerMain:
  from maxtext_posttrain.trainers import sft

  return sft.main
