"""A run's folder as its page needs it: the record, the curves, and the checkpoints that are there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maxtext_posttrain.checkpointing.names import ACTOR, CHECKPOINTS, ITEMS
from maxtext_posttrain.errors import ReportError
from maxtext_posttrain.report.completions import WrittenCompletion, read_completions
from maxtext_posttrain.report.evaluations import evaluation_figures
from maxtext_posttrain.report.metrics_file import read_metrics
from maxtext_posttrain.report.run_file import RunRecord


@dataclass
class Curve:
  """One metric over steps; None stands where it was not finite."""

  steps: list[int] = field(default_factory=list)
  values: list[float | None] = field(default_factory=list)

  @property
  def finite(self) -> list[float]:
    """The values that are numbers."""
    return [value for value in self.values if value is not None]

  @property
  def last(self) -> float | None:
    """The last value that is a number."""
    return next((value for value in reversed(self.values) if value is not None), None)


@dataclass(frozen=True)
class Checkpoint:
  """A step's folder and the bytes of its files."""

  step: int
  bytes: int
  path: Path

  @property
  def items(self) -> Path:
    """What `load_parameters_path` and `load_full_state_path` name."""
    return self.path / ITEMS


@dataclass(frozen=True, repr=False)
class RunFolder:
  """What lies in a run's folder.

  Attributes:
    path: the folder.
    curves: by kind ("train", "eval") and key.
    record: None for a folder without `run.json`.
    checkpoints: in order of steps.
    evaluations: what `posttrain eval` found, by name.
    completions: a few that the model wrote while it was trained, where it was trained on its own.
    checkpoint_role: the folder between `checkpoints` and the steps, with its slash; reinforcement learning has one.
  """

  path: Path
  curves: dict[tuple[str, str], Curve]
  record: RunRecord | None
  checkpoints: list[Checkpoint]
  evaluations: dict[str, str] = field(default_factory=dict)
  completions: list[WrittenCompletion] = field(default_factory=list)
  checkpoint_role: str = ""

  @property
  def name(self) -> str:
    """The run's name."""
    return self.record.name if self.record is not None else self.path.resolve().name

  def curve(self, kind: str, key: str) -> Curve:
    """A metric's curve, empty where it was never reported."""
    return self.curves.get((kind, key), Curve())

  @property
  def last_step(self) -> int:
    """The last update that was reported, 0 without any."""
    return max((curve.steps[-1] for (kind, _), curve in self.curves.items() if kind == "train"), default=0)

  @property
  def newest(self) -> Checkpoint:
    """The checkpoint of the last step that was saved.

    Raises:
      ReportError: none was.
    """
    if not self.checkpoints:
      raise ReportError(f"{self.path}: holds no checkpoint; was it trained with enable_checkpointing=true?")
    return self.checkpoints[-1]

  def __repr__(self) -> str:
    kept = ", ".join(str(checkpoint.step) for checkpoint in self.checkpoints) or "none"
    return f"RunFolder({str(self.path)!r}: step {self.last_step}, checkpoints {kept})"

  @classmethod
  def read(cls, path: Path) -> RunFolder:
    """Reads a run's folder.

    Raises:
      ReportError: it is no folder of a run, or holds a broken record.
      TrainingError: its metrics are broken.
    """
    metrics = path / "metrics.jsonl"
    try:
      if path.is_file():
        raise ReportError(f"{path}: is a file; name the run's folder, which holds metrics.jsonl")
      if not path.is_dir():
        raise ReportError(f"{path}: there is no such folder; name a run's folder, as runs/<run_name>")
      if not metrics.is_file():
        raise ReportError(f"{path}: holds no metrics.jsonl; name a run's folder, as runs/<run_name>")
      record = RunRecord.read(path)
      curves = _curves(metrics)
      completions = read_completions(path)
    except OSError as error:
      raise ReportError(f"{error.filename or path}: can't be read: {error.strerror or error}") from error
    if not curves and record is None:
      raise ReportError(f"{metrics}: holds no metrics, and there is no run.json: there is nothing to show")
    folder = _checkpoint_folder(path, record)
    role = f"{ACTOR}/" if folder.name == ACTOR else ""
    return cls(path, curves, record, list(_checkpoints(folder)), evaluation_figures(path), completions, role)


def run_directory(base_output_directory: str, run_name: str) -> Path:
  """`<base_output_directory>/<run_name>`; for a bucket, `runs/<run_name>` here: metrics are appended by the line."""
  return Path("runs" if "://" in base_output_directory else base_output_directory) / run_name


def _curves(path: Path) -> dict[tuple[str, str], Curve]:
  curves: dict[tuple[str, str], Curve] = {}
  for record in read_metrics(path):
    for key, value in record.items():
      if key not in ("kind", "step"):
        number = _number(value)
        if number is None and value is not None:
          continue
        curve = curves.setdefault((str(record["kind"]), key), Curve())
        curve.steps.append(record["step"])
        curve.values.append(number)
  return curves


def _number(value: Any) -> float | None:
  """A finite number, or None."""
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    return None
  try:
    number = float(value)
  except OverflowError:
    return None
  return number if math.isfinite(number) else None


def _checkpoint_folder(path: Path, record: RunRecord | None) -> Path:
  """The folder beside the metrics; else, where the run's metrics lie apart from its checkpoints, the recorded one."""
  beside = path / CHECKPOINTS
  if (beside / ACTOR).is_dir():
    return beside / ACTOR
  if beside.is_dir() or record is None or record.checkpoints is None or "://" in record.checkpoints:
    return beside
  return Path(record.checkpoints)


def _checkpoints(folder: Path) -> Iterator[Checkpoint]:
  if not folder.is_dir():
    return
  steps = [path for path in folder.iterdir() if path.name.isdecimal() and path.name.isascii() and path.is_dir()]
  for path in sorted(steps, key=lambda path: int(path.name)):
    yield Checkpoint(int(path.name), sum(file.lstat().st_size for file in path.rglob("*") if file.is_file()), path)
