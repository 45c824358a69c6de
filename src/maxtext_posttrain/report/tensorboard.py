"""TensorBoard events."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from maxtext_posttrain.report.logger import one_line_errors

_EVENTS_VERSION = "brain.Event:2"
_FLUSH_SECONDS = 30.0


class TensorBoardFile:
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
    with one_line_errors(directory):
      record_writer.directory_check(directory)
      name = f"events.out.tfevents.{time.time():.3f}.{socket.gethostname()}.{os.getpid()}"
      self._file = record_writer.RecordWriter(f"{directory.rstrip('/')}/{name}")
    self._write(0, file_version=_EVENTS_VERSION)
    self._write(purge_step, session_log=start)
    self._flushed = 0.0

  def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
    """Writes the numbers of a step as `kind/key`; they are in the file within half a minute."""
    scalars = [
      self._summary.Value(tag=f"{kind}/{key}", simple_value=float(value))
      for key, value in values.items()
      if isinstance(value, (int, float))
    ]
    self._write(step, summary=self._summary(value=scalars))
    if time.monotonic() - self._flushed > _FLUSH_SECONDS:
      with one_line_errors(self._directory):
        self._file.flush()
      self._flushed = time.monotonic()

  def _write(self, step: int, **content: Any) -> None:
    with one_line_errors(self._directory):
      self._file.write(self._event(wall_time=time.time(), step=step, **content).SerializeToString())

  def close(self) -> None:
    """Writes what is left and closes the file."""
    with one_line_errors(self._directory):
      self._file.close()
