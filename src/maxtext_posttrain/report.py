"""What a run tells: `metrics.jsonl`, TensorBoard, a progress bar, and lines for a log."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from maxtext_posttrain.errors import TrainingError

_EVENTS_VERSION = "brain.Event:2"
_FLUSH_SECONDS = 30.0
_SHOWN = ("loss", "learning_rate", "grad_norm", "tokens_per_second")


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
    with _one_line_errors(path):
      path.parent.mkdir(parents=True, exist_ok=True)
      kept = [record for record in read_metrics(path) if record["step"] <= completed_steps] if path.exists() else []
      self._seen = {(record["kind"], record["step"]) for record in kept}
      temporary = path.with_suffix(".jsonl.tmp")
      temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
      temporary.replace(path)
      self._file: TextIO = path.open("a", encoding="utf-8")

  def has(self, kind: str, step: int) -> bool:
    """Whether a record of this kind and step is there."""
    return (kind, step) in self._seen

  def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
    """Appends a record; it is in the file when this returns. Numbers that are not finite are written as null."""
    record = {"kind": kind, "step": step, **{key: _json_number(value) for key, value in values.items()}}
    with _one_line_errors(self.path):
      self._file.write(json.dumps(record) + "\n")
      self._file.flush()
    self._seen.add((kind, step))

  def close(self) -> None:
    """Closes the file."""
    with _one_line_errors(self.path):
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
      except ValueError:
        if not line.endswith("\n"):
          return
        record = None
      if not isinstance(record, dict) or "kind" not in record or not isinstance(record.get("step"), int):
        raise TrainingError(f"{path}, line {number}: is not a record of metrics; move the file away, or mend that line")
      yield record


@contextlib.contextmanager
def _one_line_errors(path: Path | str) -> Iterator[None]:
  """The file system's exceptions as one line."""
  try:
    yield
  except OSError as error:
    raise TrainingError(
      f"{path} can't be written: {error.strerror or error}; make room for it, or change base_output_directory"
    ) from error


def _json_number(value: Any) -> Any:
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


class _TensorBoardFile:
  """Scalars as TensorBoard events, written by the thread that reports them.

  tensorboardX's `SummaryWriter` leaves that to a thread of its own, which a full disk ends; its queue then fills, and
  training waits for ever.
  """

  def __init__(self, directory: str, *, purge_step: int):
    """Opens a new events file; TensorBoard drops what older ones hold from `purge_step` on."""
    # Imported where it is used: protobuf takes a second.
    from tensorboardX import record_writer
    from tensorboardX.proto import event_pb2, summary_pb2

    self._directory = directory
    self._event: Any = vars(event_pb2)["Event"]
    self._summary: Any = vars(summary_pb2)["Summary"]
    start = vars(event_pb2)["SessionLog"](status=vars(event_pb2)["SessionLog"].START)
    with _one_line_errors(directory):
      record_writer.directory_check(directory)
      name = f"events.out.tfevents.{time.time():.3f}.{socket.gethostname()}.{os.getpid()}"
      self._file = record_writer.RecordWriter(f"{directory.rstrip('/')}/{name}")
    self._write(0, file_version=_EVENTS_VERSION)
    self._write(purge_step, session_log=start)
    self._flushed = 0.0

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    """Writes the scalars of a step by their tags; they are in the file within half a minute."""
    values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
    self._write(step, summary=self._summary(value=values))
    if time.monotonic() - self._flushed > _FLUSH_SECONDS:
      with _one_line_errors(self._directory):
        self._file.flush()
      self._flushed = time.monotonic()

  def _write(self, step: int, **content: Any) -> None:
    with _one_line_errors(self._directory):
      self._file.write(self._event(wall_time=time.time(), step=step, **content).SerializeToString())

  def close(self) -> None:
    """Writes what is left and closes the file."""
    with _one_line_errors(self._directory):
      self._file.close()


class Reporter:
  """Takes a run's metrics and shows them: file, TensorBoard, and either one live line or a line every N steps."""

  def __init__(
    self,
    run_directory: Path,
    *,
    total_steps: int,
    completed_steps: int = 0,
    tensorboard_directory: str | None = None,
    log_every: int = 10,
    stream: TextIO | None = None,
  ):
    """Opens the outputs.

    Args:
      run_directory: where `metrics.jsonl` goes.
      total_steps: the step at which the run ends.
      completed_steps: the step it goes on from.
      tensorboard_directory: None writes no TensorBoard events.
      log_every: steps between lines where the stream is not a terminal.
      stream: standard output by default.
    """
    self.metrics = MetricsFile(run_directory / "metrics.jsonl", completed_steps=completed_steps)
    self.last: dict[str, dict[str, Any]] = {}
    self._stream = stream or sys.stdout
    self._log_every = log_every
    self._total_steps = total_steps
    self._bar: tqdm | None = None
    if self._stream.isatty():
      self._bar = tqdm(
        total=total_steps, initial=completed_steps, file=self._stream, dynamic_ncols=True, desc="training", unit="step"
      )
    self._tensorboard: _TensorBoardFile | None = None
    if tensorboard_directory is not None:
      self._tensorboard = _TensorBoardFile(tensorboard_directory, purge_step=completed_steps + 1)

  def line(self, text: str) -> None:
    """Prints a line without breaking the progress bar."""
    if self._bar is not None:
      self._bar.write(text, file=self._stream)
    else:
      print(text, file=self._stream, flush=True)

  def train(self, step: int, values: Mapping[str, Any]) -> None:
    """Reports one update."""
    self._record("train", step, values)
    if self._bar is not None:
      self._bar.set_postfix({key: f"{values[key]:.4g}" for key in _SHOWN if values.get(key) is not None}, refresh=False)
      self._bar.update(step - self._bar.n)
    elif step % self._log_every == 0 or step == self._total_steps or step == 1:
      shown = "  ".join(f"{key} {values[key]:.4g}" for key in _SHOWN if values.get(key) is not None)
      self.line(f"step {step}/{self._total_steps}  {shown}")

  def evaluation(self, step: int, values: Mapping[str, Any]) -> None:
    """Reports one evaluation."""
    self._record("eval", step, values)
    shown = "  ".join(f"{key} {value:.4f}" for key, value in values.items() if isinstance(value, float))
    self.line(f"evaluation at step {step}  {shown}")

  def _record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
    self.last[kind] = {"step": step, **values}
    self.metrics.write(kind, step, values)
    if self._tensorboard is not None:
      scalars = {f"{kind}/{key}": float(value) for key, value in values.items() if isinstance(value, (int, float))}
      self._tensorboard.write(step, scalars)

  def close(self) -> None:
    """Closes every output; a second call does nothing."""
    if self._bar is not None:
      self._bar.close()
    tensorboard, self._tensorboard = self._tensorboard, None
    try:
      self.metrics.close()
    finally:
      if tensorboard is not None:
        tensorboard.close()
