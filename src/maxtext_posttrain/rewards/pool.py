"""Calls reward functions in processes that may be lost: a call that raises, hangs or dies costs scores, not the run.

A call is one function over the completions of one prompt, so what a failed call scores is the same for a whole group
and moves no advantage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from maxtext_posttrain.errors import RewardError
from maxtext_posttrain.rewards.sample import RewardSample, RewardSettings
from maxtext_posttrain.rewards.worker import call_message, settings_message

_STARTUP_SECONDS = 120.0
_LONGEST_ANSWER = 64 << 20


@dataclasses.dataclass(frozen=True)
class Scores:
  """What a batch of completions scored.

  Attributes:
    by_function: each function's scores, [completions] float64, in the order of the completions.
    rewards: their weighted sum, [completions] float64.
    failures: calls of each function that gave no scores.
    first_errors: what the first failed call of each function said.
    seconds: it took.
  """

  by_function: Mapping[str, npt.NDArray[np.float64]]
  rewards: npt.NDArray[np.float64]
  failures: Mapping[str, int]
  first_errors: Mapping[str, str]
  seconds: float


def weighed(scores: Mapping[str, npt.NDArray[np.float64]], weights: Mapping[str, float]) -> npt.NDArray[np.float64]:
  """The sum of the functions' scores [completions], each times its weight."""
  return sum((weight * scores[name] for name, weight in weights.items()), np.zeros_like(next(iter(scores.values()))))


class RewardPool:
  """Worker processes that each know all of a run's reward functions."""

  def __init__(
    self,
    weights: Mapping[str, float],
    settings: RewardSettings,
    *,
    workers: int = 2,
    time_limit: float = 30.0,
    failure_score: float = 0.0,
  ):
    """Starts the processes, and sees that each function can be had.

    Args:
      weights: of the functions, by a built-in's name or `file.py:function`.
      settings: for the built-in functions.
      workers: processes.
      time_limit: seconds that one call may take.
      failure_score: what the completions of a failed call score.

    Raises:
      RewardError: a function can't be had, or no process can be started.
    """
    self._weights = dict(weights)
    self._start_line = settings_message(list(weights), settings).encode()
    self._time_limit = time_limit
    self._failure_score = failure_score
    self._workers: list[_Worker] = []
    try:
      self._workers.extend(_Worker(self._start_line) for _ in range(workers))
      for worker in self._workers:
        worker.wait_until_ready()
    except BaseException:
      self.close()
      raise

  def score(self, groups: Sequence[Sequence[RewardSample]]) -> Scores:
    """Scores the completions of each prompt by every function.

    Raises:
      RewardError: a lost process can't be replaced.
    """
    started = time.perf_counter()
    count = sum(map(len, groups))
    scores = {name: np.full(count, self._failure_score) for name in self._weights}
    failures = dict.fromkeys(self._weights, 0)
    first_errors: dict[str, str] = {}
    offsets = np.cumsum([0, *map(len, groups)])
    calls = deque((name, number) for number, group in enumerate(groups) if group for name in self._weights)
    running: dict[_Worker, tuple[str, int]] = {}
    with selectors.DefaultSelector() as selector:
      while calls or running:
        for worker in self._workers:
          if worker not in running and calls:
            name, number = calls.popleft()
            running[worker] = (name, number)
            worker.send(call_message(name, groups[number]).encode(), self._time_limit)
            selector.register(worker.descriptor, selectors.EVENT_READ, worker)
        wait = max(0.0, min(worker.deadline for worker in running) - time.monotonic())
        selector.select(wait)
        for worker, (name, number) in list(running.items()):
          # Every one is asked: while one was started again, others may have answered in time.
          answer = worker.receive()
          if answer is None and time.monotonic() >= worker.deadline:
            answer = {"error": f"it took longer than {self._time_limit:g} s", "dead": True}
          if answer is None:
            continue
          selector.unregister(worker.descriptor)
          del running[worker]
          if "scores" in answer:
            scores[name][offsets[number] : offsets[number + 1]] = answer["scores"]
          else:
            failures[name] += 1
            first_errors.setdefault(name, answer["error"])
          if answer.get("dead"):
            worker.restart()
    return Scores(scores, weighed(scores, self._weights), failures, first_errors, time.perf_counter() - started)

  def close(self) -> None:
    """Ends the processes."""
    for worker in self._workers:
      worker.kill()


class _Worker:
  """One process, restarted in place."""

  def __init__(self, start_line: bytes):
    self._start_line = start_line
    self.deadline = 0.0
    self._start()

  def _start(self) -> None:
    try:
      self._process = subprocess.Popen(
        [sys.executable, "-m", "maxtext_posttrain.rewards.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
      )
    except OSError as error:
      raise RewardError(f"no process for rewards can be started: {error}") from error
    assert self._process.stdin is not None
    assert self._process.stdout is not None
    self._input = self._process.stdin
    self.descriptor = self._process.stdout.fileno()
    os.set_blocking(self.descriptor, False)
    self._received = b""
    self._is_ready = False
    self.send(self._start_line, _STARTUP_SECONDS)

  def wait_until_ready(self) -> None:
    """Waits for a started process.

    Raises:
      RewardError: a function can't be had, or the process is lost.
    """
    while not self._is_ready:
      with selectors.DefaultSelector() as selector:
        selector.register(self.descriptor, selectors.EVENT_READ)
        selector.select(max(0.0, self.deadline - time.monotonic()))
      answer = self.receive()
      if answer is None and time.monotonic() < self.deadline:
        continue
      if answer is None or "ready" not in answer:
        self.kill()
        what = "it did not start in time" if answer is None else answer["error"]
        raise RewardError(f"reward_weights: {what}")
      self._is_ready = True

  def send(self, line: bytes, seconds: float) -> None:
    """Sends a line; the answer is due in `seconds`. A process that is gone is noticed when the answer is read."""
    self.deadline = time.monotonic() + seconds
    with contextlib.suppress(BrokenPipeError):
      self._input.write(line)
      self._input.flush()

  def receive(self) -> dict[str, Any] | None:
    """The answer, if it is there; a process that is gone, or answers nonsense, says so with `dead`."""
    while b"\n" not in self._received:
      try:
        part = os.read(self.descriptor, 1 << 16)
      except BlockingIOError:
        return None
      if not part:
        code = self._process.wait()
        return {"error": f"its process ended ({_exit(code)})", "dead": True}
      self._received += part
      if len(self._received) > _LONGEST_ANSWER:
        return {"error": "its answer is too long", "dead": True}
    line, _, self._received = self._received.partition(b"\n")
    try:
      answer = json.loads(line)
    except ValueError:
      return {"error": "its process answered nonsense", "dead": True}
    return answer

  def restart(self) -> None:
    """Ends the process and starts another.

    Raises:
      RewardError: the other one does not start.
    """
    self.kill()
    self._start()
    self.wait_until_ready()

  def kill(self) -> None:
    """Ends the process, whatever it does."""
    self._process.kill()
    self._process.wait()
    for stream in (self._process.stdin, self._process.stdout):
      with contextlib.suppress(OSError):
        if stream is not None:
          stream.close()


def _exit(code: int) -> str:
  return f"signal {-code}" if code < 0 else f"exit code {code}"
