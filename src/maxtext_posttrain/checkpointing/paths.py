"""Paths of leaves in MaxText's `TrainStateNNX`, and how what is wrong with them is said.

A path is a tuple: `('model', ...)`, `('optimizer', 'opt_state', ...)` or `('optimizer', 'step')`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from maxtext_posttrain.errors import CheckpointError

Path = tuple[str | int, ...]
FlatState = dict[Path, Any]

STEP: Path = ("optimizer", "step")
OPT_STATE: Path = ("optimizer", "opt_state")
MODEL: Path = ("model",)
ADAPTER_CHILD = "base"


def format_path(path: Path) -> str:
  """`('model', 'layers', 0)` as `model/layers/0`."""
  return "/".join(map(str, path))


def as_path(path: Iterable[Any]) -> Path:
  """NNX's key types are wider than the strings and integers that modules and chains use."""
  return tuple(path)


def raise_problems(title: str, problems: Iterable[str], *, limit: int = 20) -> None:
  """Raises one CheckpointError that lists up to `limit` problems, if there is any."""
  problems = list(problems)
  if problems:
    more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    raise CheckpointError(f"{title}: {'; '.join(problems[:limit])}{more}")
