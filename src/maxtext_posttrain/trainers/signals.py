"""SIGTERM and SIGINT end a run at its next update instead of in the middle of one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopRequest:
  """Whether a signal asked the run to stop, and which.

  The first signal is noted; the run saves at its next update and leaves with 128 + its number. A second one ends the
  process at once.
  """

  def __init__(self) -> None:
    self.signal_number: int | None = None

  def __call__(self) -> bool:
    """Whether a stop was asked for."""
    return self.signal_number is not None

  @property
  def exit_code(self) -> int:
    """143 for SIGTERM, 130 for SIGINT, 0 without a signal."""
    return 0 if self.signal_number is None else 128 + self.signal_number

  @contextlib.contextmanager
  def listening(self) -> Iterator[StopRequest]:
    """Takes SIGTERM and SIGINT inside the block; what handled them before does so again after it.

    Python hands signals to the main thread alone: in another one they stay with whoever has them.
    """
    if threading.current_thread() is not threading.main_thread():
      yield self
      return

    def note(number: int, frame: FrameType | None) -> None:
      del frame
      if self.signal_number is not None:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
      self.signal_number = number

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
      yield self
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)
