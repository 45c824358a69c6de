"""`metrics.jsonl`: one JSON object a line for each update and each evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from maxtext_posttrain.errors import TrainingError
from maxtext_posttrain.files import write_atomically
from maxtext_posttrain.report.logger import one_line_errors


class MetricsFile:
  """One JSON object a line, in order of steps; what a killed run wrote past its checkpoint is dropped on resume."""

  def __init__(self, path: Path, *, completed_steps: int = 0):
    """Opens `path` for appending, after records of steps above `completed_steps` are removed from it.

    Args:
      path: the file; made with its folder where it is missing.
      completed_steps: the step training goes on from.

    Raises:
      TrainingError: the file can't be written, or holds something else.
    """
    self.path = path
    with one_line_errors(path):
      path.parent.mkdir(parents=True, exist_ok=True)
      kept = [record for record in read_metrics(path) if record["step"] <= completed_steps] if path.exists() else []
      self._seen = {(record["kind"], record["step"]) for record in kept}
      write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
      self._file: TextIO = path.open("a", encoding="utf-8")

  def has(self, kind: str, step: int) -> bool:
    """Whether a record of this kind and step is there."""
    return (kind, step) in self._seen

  def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
    """Appends a record; it is in the file when this returns. Numbers that are not finite are written as null."""
    record = {"kind": kind, "step": step, **{key: _json_number(value) for key, value in values.items()}}
    with one_line_errors(self.path):
      self._file.write(json.dumps(record) + "\n")
      self._file.flush()
    self._seen.add((kind, step))

  def close(self) -> None:
    """Closes the file."""
    with one_line_errors(self.path):
      self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
  """The records of a metrics file; a last line that a kill cut short is left out.

  Raises:
    TrainingError: another line is not a record.
  """
  with path.open(encoding="utf-8", errors="replace") as file:
    for number, line in enumerate(file, start=1):
      try:
        record = json.loads(line)
      except (ValueError, RecursionError):
        if not line.endswith("\n"):
          return
        record = None
      if not isinstance(record, dict) or "kind" not in record or not isinstance(record.get("step"), int):
        raise TrainingError(f"{path}, line {number}: is not a record of metrics; move the file away, or mend that line")
      yield record


def _json_number(value: Any) -> Any:
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value
