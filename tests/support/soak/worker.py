"""A process that makes cases one after another, forked from a server with the imports behind it.

What a case does to its process (a crash, a hang) is a failed case and no end of the soak: another process is forked.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import psutil

from tests.support import runs
from tests.support.soak.cases import FaultFoundError

CPU_LIMIT = 120.0
"""Seconds of the processor after which a case hangs."""
WALL_LIMIT = 3600.0
"""Seconds after which it hangs whatever it does: the machine may be busy with something else."""


class WorkerLostError(Exception):
  """The process ended during a case, or had to be ended."""


class WorkerHangsError(WorkerLostError):
  """The process had to be ended."""


class Worker:
  """Calls module-level functions in another process."""

  def __init__(self) -> None:
    self._process: Any = None
    self._connection: Connection | None = None

  def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function(*arguments)` returns.

    Raises:
      FaultFoundError: it raised that, or another exception.
      WorkerLostError: the process ended, or hung.
    """
    if self._connection is None:
      self._start()
    assert self._connection is not None
    self._connection.send((function, arguments))
    process = psutil.Process(self._process.pid)
    started, cpu_before = time.monotonic(), _cpu_seconds(process)
    while not self._connection.poll(0.5):
      if not self._process.is_alive():
        break
      cpu, wall = _cpu_seconds(process) - cpu_before, time.monotonic() - started
      if cpu > CPU_LIMIT or wall > WALL_LIMIT:
        self.close()
        raise WorkerHangsError(f"hangs: no end after {cpu:.0f} s of the processor, {wall:.0f} s in all")
    try:
      ok, result = self._connection.recv()
    except (EOFError, ConnectionResetError):
      self._process.join()
      code = self._process.exitcode
      self.close()
      raise WorkerLostError(f"the process ended with {code}") from None
    if not ok:
      raise FaultFoundError(result)
    return result

  def close(self) -> None:
    """Ends the process."""
    if self._connection is not None:
      self._process.kill()
      self._process.join()
      self._connection.close()
      self._connection = None

  def _start(self) -> None:
    self._connection, theirs = runs.FORKSERVER.Pipe()
    self._process = runs.FORKSERVER.Process(target=_serve, args=(theirs,))
    self._process.start()
    theirs.close()


def _cpu_seconds(process: psutil.Process) -> float:
  try:
    times = process.cpu_times()
  except psutil.Error:
    return 0.0
  return times.user + times.system


def _serve(connection: Connection) -> None:
  while True:
    try:
      function, arguments = connection.recv()
    except EOFError:
      return
    try:
      answer = (True, function(*arguments))
    except FaultFoundError as error:
      answer = (False, str(error))
    except BaseException:
      answer = (False, traceback.format_exc())
    connection.send(answer)
