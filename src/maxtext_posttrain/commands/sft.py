"""`posttrain sft`: supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from maxtext_posttrain.commands.train import TrainerCommand, run_trainer

if TYPE_CHECKING:
  from maxtext_posttrain.config import Config
  from maxtext_posttrain.data import PreparedData


def run(arguments: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  return run_trainer("sft", arguments, TrainerCommand(_prepare_data, _load_main))


def _prepare_data(config: Config) -> PreparedData:
  from maxtext_posttrain.data import prepare_chats

  return prepare_chats(config)


def _load_main() -> Callable[..., int]:
  from maxtext_posttrain.trainers import sft

  return sft.main
