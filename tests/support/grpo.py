"""GRPO in this process, with a reward that random weights differ in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maxtext_posttrain.config import load_config
from tests.conftest import REPOSITORY

DATA = REPOSITORY / "configs" / "data"
REWARD = """
def even(prompts, completions, answers):
  return [float(len(each) % 3) for each in completions]
"""


def write_run(folder: Path, config: str, /, **places: str) -> Path:
  """Writes grpo.yml of `config`, with `{data}` and `places` filled in, and the reward's mine.py; returns the folder."""
  (folder / "mine.py").write_text(REWARD)
  (folder / "grpo.yml").write_text(config.format(data=DATA, **places))
  return folder


def arguments(folder: Path, name: str, *extra: str) -> list[str]:
  """The command line of a run of the folder's grpo.yml."""
  return [str(folder / "grpo.yml"), f"base_output_directory={folder}", f"run_name={name}", *extra]


def train(argv: list[str]) -> Any:
  """A finished GRPO in this process."""
  from maxtext_posttrain.trainers.base import Session
  from maxtext_posttrain.trainers.grpo import GRPO
  from maxtext_posttrain.trainers.signals import StopRequest

  session = Session(GRPO(), load_config(argv, trainer="grpo"))
  assert session.train(StopRequest()) == 0
  return session
