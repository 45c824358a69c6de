"""What a logger is, and what the loggers share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from maxtext_posttrain.errors import TrainingError


class Logger(Protocol):
  """One place that a run's metrics go to."""

  def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
    """Takes the values of one update (`kind` "train") or one evaluation ("eval"), in order of steps.

    Raises:
      TrainingError: they can't be written.
    """
    ...

  def close(self) -> None:
    """Writes what is left; nothing is written after it."""
    ...


@contextlib.contextmanager
def one_line_errors(path: Path | str) -> Iterator[None]:
  """The file system's exceptions as one line."""
  try:
    yield
  except OSError as error:
    raise TrainingError(
      f"{path} can't be written: {error.strerror or error}; make room for it, or change base_output_directory"
    ) from error
