"""Runs that are killed one to four times at random moments, and come to the bits of the run that was not."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import psutil

from tests.support import runs
from tests.support.soak import training
from tests.support.soak.cases import Bench, FaultFoundError, Outcome, Part, require

_MOST_KILLS = 4
_TERMINATED = 0.25
_SECONDS_TO_VANISH = 30.0


def kill_run(bench: Bench) -> Outcome:
  """Kills a run again and again, and looks after each kill and at the end at what is on disk."""
  chance = bench.random()
  trainer = training.TRAINERS[bench.case % len(training.TRAINERS)]
  expected = training.reference(trainer, bench.shared)
  config = training.write_config(bench.folder, trainer, bench.shared)
  asynchronous = chance.choice(("true", "false"))
  argv = training.arguments(config, bench.folder, "run", f"async_checkpointing={asynchronous}")
  run = bench.folder / "run"
  counts: Counter[str] = Counter()
  for attempt in range(chance.randint(1, _MOST_KILLS)):
    before = training.newest(run)
    process = training.start(trainer, argv, bench.folder / f"{attempt}.log")
    _wait_for_moment(process, run, chance, expected.seconds)
    number = signal.SIGTERM if chance.random() < _TERMINATED else signal.SIGKILL
    if not _end(process, number):
      # It was done first: the moment came too late.
      require(training.wait(process) == 0, f"exit code {training.wait(process)}: {process.output()[-500:]}")
      break
    counts[f"{trainer} {number.name}"] += 1
    counts["kills"] += 1
    _require_ended(process, run, number)
    require(training.newest(run) >= before, f"checkpoint {before} is lost: the newest is {training.newest(run)}")
    start = training.started_at(process)
    require(start in (None, before), f"resumed at step {start}, and checkpoint {before} was there")
    training.require_honest(process, run)
    training.require_whole(run, expected)
  training.finish(bench, trainer, argv, run, expected)
  return Outcome("the same bits" if counts else "done before its first kill", counts)


def _wait_for_moment(process: runs.SftProcess, run: Path, chance: random.Random, seconds: float) -> None:
  """A moment anywhere, one a little after a step's metrics, or one while a checkpoint is being written."""
  kind = chance.choice(("anywhere", "step", "step", "save"))
  step = training.newest(run) + chance.randint(1, 3)
  delay = {"anywhere": 1.2 * seconds + 4.0, "step": 0.25, "save": 0.02}[kind] * chance.random()
  while kind != "anywhere" and process.is_alive:
    made = max((record["step"] for record in training.metrics(run) if record["kind"] == "train"), default=0)
    folder = training.checkpoints(run)
    writing = folder.exists() and any(not path.name.isdigit() and path.name != "actor" for path in folder.iterdir())
    if made >= step and (kind == "step" or writing or made > step):
      break
    time.sleep(0.001)
  deadline = time.monotonic() + delay
  while time.monotonic() < deadline and process.is_alive:
    time.sleep(0.001)


def _end(process: runs.SftProcess, number: signal.Signals) -> bool:
  """Sends the signal and waits, also for the processes below; False where the process had ended before."""
  if not process.is_alive:
    return False
  try:
    below = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, number)
  except (ProcessLookupError, psutil.NoSuchProcess):
    return False
  code = training.wait(process)
  _, alive = psutil.wait_procs(below, _SECONDS_TO_VANISH)
  for each in alive:
    each.kill()
  require(not alive, f"processes left behind: {[each.pid for each in alive]}")
  return code not in (0, 1, 2) or number == signal.SIGTERM


def _require_ended(process: runs.SftProcess, run: Path, number: signal.Signals) -> None:
  """A terminated run saves first, once it has begun, and says with its exit code that it was."""
  code = training.wait(process)
  if number == signal.SIGKILL:
    require(code == -number, f"exit code {code} after {number.name}: {process.output()[-500:]}")
  elif code == 0:
    require(training.newest(run) == training.STEPS, "exit code 0, and steps are missing")
  elif code == 128 + number:
    require(" (stopped by a signal)" in process.output(), f"exit code {code} without a word: {process.output()[-500:]}")
  elif code != -number:
    raise FaultFoundError(f"exit code {code} after {number.name}: {process.output()[-500:]}")


# 80 runs with 2.5 kills each: 200 kills.
KILLS = Part("kills", 80, 3, kill_run)
