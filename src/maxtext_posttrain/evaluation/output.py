"""Where an evaluation is written, and whether it can be: known before the work."""

from __future__ import annotations

import json
import os
from pathlib import Path

from maxtext_posttrain.checkpointing.names import ACTOR, CHECKPOINTS
from maxtext_posttrain.errors import ConfigError
from maxtext_posttrain.models.source import ModelSource

FORMAT = "maxtext-posttrain evaluation"


def default_output(source: ModelSource) -> Path:
  """`eval-<step>.json` in the run's folder, or in that of an import.

  Raises:
    ConfigError: the model does not lie on this machine's disk.
  """
  if "://" in str(source.items):
    raise ConfigError(f"{source.items} is not on this machine: name the figures' file with --output FILE")
  step = Path(str(source.items)).absolute().parent
  folder = step.parent if step.name.isdigit() else step
  while folder.name in (CHECKPOINTS, ACTOR):
    folder = folder.parent
  return folder / f"eval-{source.step}.json"


def check_output(path: Path) -> None:
  """Finds out before the work whether its figures can be written to `path` later; an earlier evaluation is replaced.

  Raises:
    ConfigError: they can't, or another file is there.
  """
  if path.is_dir():
    raise ConfigError(f"{path}: is a folder; name a file for the figures with --output")
  if not path.parent.is_dir():
    raise ConfigError(f"{path}: there is no folder {path.parent}; make it, or name another file with --output")
  if not os.access(path.parent, os.W_OK):
    raise ConfigError(f"{path}: its folder can't be written to; name another file with --output")
  if path.exists() and not _is_evaluation(path):
    raise ConfigError(f"{path}: exists and is no evaluation; name another file with --output, or move it away")


def _is_evaluation(path: Path) -> bool:
  try:
    content = json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError, RecursionError):
    return False
  return isinstance(content, dict) and content.get("format") == FORMAT


def answers_path(path: Path) -> Path:
  """Where the answers lie: `eval-4-answers.jsonl` beside `eval-4.json`."""
  return path.with_name(f"{path.stem}-answers.jsonl")
