"""Runs work in a process of its own while this one imports: data are read and tokenised while MaxText is loading."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from maxtext_posttrain.errors import DataError

T = TypeVar("T")


def run_ahead[T](work: Callable[[], T]) -> Callable[[], T]:
  """Starts `work` at once where that is safe; what is returned waits for its result, or raises what it raised.

  The process is forked, so nothing has to be imported or sent to it, and it sends its result through a pipe. Where this
  process already has threads, as once JAX is imported, a fork could hang: there, as on other systems than Linux, the
  work is done by whoever asks for the result.
  """
  if not sys.platform.startswith("linux") or threading.active_count() > 1 or "jaxlib" in sys.modules:
    return work
  context = multiprocessing.get_context("fork")
  receiver, sender = context.Pipe(duplex=False)
  process = context.Process(target=_serve, args=(work, sender), name="data", daemon=True)
  process.start()
  sender.close()

  def collect() -> T:
    try:
      succeeded, result = receiver.recv()
    except EOFError:
      process.join()
      raise DataError(
        f"the process that reads the data ended without a result (exit code {process.exitcode}): is memory short?"
      ) from None
    finally:
      receiver.close()
    process.join()
    if not succeeded:
      raise result
    return result

  return collect


def _serve(work: Callable[[], Any], sender: Connection) -> None:
  # An interrupt reaches the whole group; the one who waits for the result says so.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    outcome = (True, work())
  except Exception as error:
    error.add_note(traceback.format_exc())
    error.__cause__ = error.__context__ = None
    outcome = (False, error)
  with contextlib.suppress(BrokenPipeError):
    sender.send(outcome)
