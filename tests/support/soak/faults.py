"""Disks that fill, files that may grow no further and folders that turn read-only while a run saves."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support import runs
from tests.support.soak import training
from tests.support.soak.cases import Bench, NotPermittedError, Outcome, Part, require

_SMALLEST_DISK = 200 << 10
_SMALLEST_FILE = 16 << 10
_LARGEST_FILE = 1 << 20

Break = Callable[[runs.SftProcess, Path], None]


def break_saves(bench: Bench) -> Outcome:
  """One fault at a random moment of a run: it ends in one line or is not met; lifted, the run goes on to its bits."""
  chance = bench.random()
  trainer = training.TRAINERS[bench.case % len(training.TRAINERS)]
  kind = list(_KINDS)[bench.case % len(_KINDS)]
  expected = training.reference(trainer, bench.shared)
  config = training.write_config(bench.folder, trainer, bench.shared)
  output = bench.folder / "out"
  output.mkdir()
  asynchronous = chance.choice(("true", "false"))
  argv = training.arguments(config, output, "run", f"async_checkpointing={asynchronous}")
  run = output / "run"
  with _KINDS[kind](output, chance, expected) as (break_it, lift):
    process = training.start(trainer, argv, bench.folder / "broken.log")
    try:
      break_it(process, run)
      code = training.wait(process)
    finally:
      lift()
    training.require_honest(process, run)
    training.require_whole(run, expected)
    errors = training.errors(process)
    if code == 0:
      require(not errors, f"exit code 0 and {errors}")
      require(
        training.newest(run) == training.STEPS, f"exit code 0, and checkpoint {training.newest(run)} is the newest"
      )
    else:
      require(code == 1, f"exit code {code}: {process.output()[-500:]}")
      require(len(errors) == 1, f"{len(errors)} error lines: {errors or process.output()[-500:]}")
      require("internal:" not in errors[0], errors[0])
    training.finish(bench, trainer, argv, run, expected)
  return Outcome(f"{kind}: {'not met' if code == 0 else 'one line, then the same bits'}", {f"{trainer} {kind}": 1})


Broken = Iterator[tuple[Break, Callable[[], None]]]


@contextlib.contextmanager
def _full_disk(output: Path, chance: random.Random, expected: training.Reference) -> Broken:
  """A file system of its own, with room for some of the run."""
  size = int(chance.uniform(_SMALLEST_DISK, 5 * expected.size))
  _permitted("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", output)
  try:
    yield (
      lambda process, run: None,
      lambda: _permitted("mount", "-o", f"remount,size={size + 20 * expected.size}", output),
    )
  finally:
    subprocess.run(["umount", output], check=True)


@contextlib.contextmanager
def _small_files(output: Path, chance: random.Random, expected: training.Reference) -> Broken:
  """From a random moment on the process's files may not grow beyond a size; Python makes of the signal an error."""
  size = int(_SMALLEST_FILE * (_LARGEST_FILE / _SMALLEST_FILE) ** chance.random())

  def limit(process: runs.SftProcess, run: Path) -> None:
    _wait(process, run, chance)
    with contextlib.suppress(ProcessLookupError):
      resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, size))

  yield limit, lambda: None


@contextlib.contextmanager
def _read_only(output: Path, chance: random.Random, expected: training.Reference) -> Broken:
  """At a random moment the run's folder, or that of its checkpoints, takes no new files, from root neither."""
  locked: list[Path] = []

  def lock(process: runs.SftProcess, run: Path) -> None:
    _wait(process, run, chance)
    folder = chance.choice((run, training.checkpoints(run)))
    if folder.exists():
      _set_writable(folder, False)
      locked.append(folder)

  def lift() -> None:
    while locked:
      _set_writable(locked.pop(), True)

  try:
    yield lock, lift
  finally:
    lift()


_KINDS = {"full disk": _full_disk, "file size limit": _small_files, "read-only folder": _read_only}


def _wait(process: runs.SftProcess, run: Path, chance: random.Random) -> None:
  """Until a random step is made, and a little longer."""
  step = chance.randint(0, training.STEPS - 1)
  while process.is_alive:
    made = [record["step"] for record in training.metrics(run)] if run.exists() else []
    if (step == 0 and run.exists()) or max(made, default=0) >= max(step, 1):
      break
    time.sleep(0.002)
  time.sleep(0.2 * chance.random())


def _set_writable(folder: Path, writable: bool) -> None:
  if os.geteuid():
    folder.chmod(0o755 if writable else 0o555)
  else:
    # Permissions do not hold root back.
    _permitted("chattr", "-i" if writable else "+i", folder)


def _permitted(*argv: str | Path) -> None:
  """Runs a command that needs permission.

  Raises:
    NotPermittedError: it failed.
  """
  if shutil.which(str(argv[0])) is None:
    raise NotPermittedError(f"{argv[0]} is missing")
  done = subprocess.run(argv, capture_output=True, text=True, check=False)
  if done.returncode:
    raise NotPermittedError(f"{argv[0]}: {done.stderr.strip()}")


FAULTS = Part("faults", 50, 4, break_saves)
