"""What `posttrain eval` left in a run's folder, as figures for its page."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILE = re.compile(r"eval-(\d{1,18})\.json", re.ASCII)
_LARGEST_BYTES = 16 << 20


def evaluation_figures(folder: Path) -> dict[str, str]:
  """The figures of the latest step that was evaluated; none where there is no evaluation, or it can't be read."""
  steps = {int(match[1]): path for path in folder.glob("eval-*.json") if (match := _FILE.fullmatch(path.name))}
  for step in sorted(steps, reverse=True):
    figures = dict(_figures(_read(steps[step])))
    if figures:
      return {name: f"{value} at step {step:,}" for name, value in figures.items()}
  return {}


def _read(path: Path) -> Any:
  with contextlib.suppress(OSError, ValueError, RecursionError):
    if path.is_file() and path.stat().st_size <= _LARGEST_BYTES:
      return json.loads(path.read_bytes())
  return None


def _figures(content: Any) -> Iterator[tuple[str, str]]:
  loss = _number(content, "tokens", "loss")
  if loss is not None:
    yield "Evaluated: loss", f"{loss:.4f}"
  accuracy = _number(content, "tokens", "token_accuracy")
  if accuracy is not None:
    yield "Evaluated: token accuracy", f"{accuracy:.2%}"
  for key, name in (("greedy", "exact match, greedy"), ("sampled", "pass@1 of samples")):
    accuracy, questions = _number(content, "answers", key, "accuracy"), _number(content, "answers", key, "questions")
    if accuracy is not None and questions is not None:
      yield f"Evaluated: {name}", f"{accuracy:.2%} of {questions:,.0f} questions"


def _number(content: Any, *keys: str) -> float | None:
  """The finite number that lies below `keys`, or None."""
  for key in keys:
    content = content.get(key) if isinstance(content, dict) else None
  if isinstance(content, bool) or not isinstance(content, int | float):
    return None
  with contextlib.suppress(OverflowError):
    return float(content) if math.isfinite(content) else None
  return None
