"""Saving and restoring here against Orbax alone, and against MaxText pre-training's own save: time, disk, memory.

  python benchmarks/checkpoint.py --rounds 3

Each side saves and restores the same train state (AdamW, scanned layers, float32) in a process of its own; sides
alternate, and which begins alternates too; none is timed before it has saved and restored once. Orbax alone has its own
default options, the other two have MaxText's. A save is timed from the call until it is on disk; it blocks until the
call returns and the trainer could go on. A restore here also checks the checkpoint against the model, puts it there and
frees what was there before; the other two return arrays. Printed are medians with smallest and largest value, and the
ratios of each round: times depend on the machine, ratios much less.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import Spread

_SIDES = ("ours", "orbax", "maxtext")
_TITLES: Mapping[str, str] = {"ours": "ours", "orbax": "Orbax alone", "maxtext": "MaxText"}
_PACKAGES = ("maxtext", "orbax-checkpoint", "tensorstore", "jax")
_LOG_TAIL = 30
_MIB = 2**20

Run = Mapping[str, Any]


@dataclass(frozen=True)
class Measure:
  """A line of the table.

  Attributes:
    goal: for the ratio to Orbax alone, or for our value where `of_value` is set.
  """

  label: str
  value: Callable[[Run], float]
  decimals: int
  goal: str = ""
  of_value: bool = False


_MEASURES = (
  Measure("save, s", lambda run: statistics.median(run["save_seconds"]), 2, "<= 1.05"),
  Measure("blocked by a save, ms", lambda run: 1e3 * statistics.median(run["blocked_seconds"]), 0),
  Measure("blocked / save", lambda run: _blocked_share(run), 3, "<= 0.05", of_value=True),
  Measure("restore, s", lambda run: statistics.median(run["restore_seconds"]), 2, "<= 1.05"),
  Measure("first save, s", lambda run: run["first_save_seconds"], 2),
  Measure("first restore, s", lambda run: run["first_restore_seconds"], 2),
  Measure("disk / state", lambda run: run["disk_bytes"] / run["state_bytes"], 3, "<= 1.02", of_value=True),
  Measure("memory added by a save, MiB", lambda run: run["save_memory_bytes"] / _MIB, 0),
  Measure("memory added by a restore, MiB", lambda run: run["restore_memory_bytes"] / _MIB, 0),
)


def _blocked_share(run: Run) -> float:
  return statistics.median(run["blocked_seconds"]) / statistics.median(run["save_seconds"])


def main(arguments: Sequence[str] | None = None) -> None:
  options = _parse(arguments)
  _print_machine()
  rounds: list[dict[str, Run]] = []
  with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.folder) as folder:
    for number in range(1, options.rounds + 1):
      shift = (number - 1) % len(_SIDES)
      order = (*_SIDES[shift:], *_SIDES[:shift])
      runs = {}
      for side in order:
        runs[side] = _measure(side, options, Path(folder) / f"{number}-{side}")
        save, restore = (statistics.median(runs[side][f"{what}_seconds"]) for what in ("save", "restore"))
        text = f"save {save:.2f} s, restore {restore:.2f} s"
        print(f"round {number} of {options.rounds}: {_TITLES[side]:<12} {text}", flush=True)
      rounds.append(runs)
  for line in report(rounds):
    print(line)
  if options.output:
    options.output.write_text(json.dumps(rounds, indent=1), encoding="utf-8")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description="Checkpoints here against Orbax alone and MaxText's own, alternating.")
  parser.add_argument("--rounds", type=int, default=3, help="processes of each side (default 3)")
  parser.add_argument("--times", type=int, default=3, help="saves and restores of a process that count (default 3)")
  parser.add_argument("--megabytes", type=float, default=500, help="size of the train state, about (default 500)")
  parser.add_argument("--folder", type=Path, help="where to write the checkpoints (default: a temporary folder)")
  parser.add_argument("--output", type=Path, help="also write all measurements to this file as JSON")
  options = parser.parse_args(arguments)
  if min(options.rounds, options.times) < 1:
    parser.error("--rounds and --times must be at least 1")
  if options.megabytes <= 0:
    parser.error("--megabytes must be above 0")
  return options


def _print_machine() -> None:
  versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in _PACKAGES)
  print(f"machine   {os.cpu_count()} CPUs, {platform.machine()}, load before the first run {os.getloadavg()[0]:.1f}")
  print(f"versions  {versions}", flush=True)


def _measure(side: str, options: argparse.Namespace, folder: Path) -> Run:
  """One process of `side`.

  Raises:
    SystemExit: it failed.
  """
  folder.mkdir()
  probe = Path(__file__).with_name("_checkpoint_probe.py")
  result, log = folder / "result.json", folder / "log"
  command = [sys.executable, str(probe), side, str(options.megabytes), str(options.times)]
  with log.open("wb") as output:
    code = subprocess.run(
      [*command, str(folder / "checkpoints"), str(result)], stdout=output, stderr=output, check=False
    ).returncode
  if code:
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL:])
    sys.exit(f"{tail}\n{_TITLES[side]}: exit code {code}")
  measured = json.loads(result.read_text(encoding="utf-8"))
  shutil.rmtree(folder / "checkpoints")
  return measured


def report(rounds: Sequence[Mapping[str, Run]]) -> Iterator[str]:
  """The table over all rounds.

  Raises:
    SystemExit: the sides did not save the same state.
  """
  sizes = {run["state_bytes"] for runs in rounds for run in runs.values()}
  if len(sizes) != 1:
    sys.exit(f"not the same work: states of {sorted(sizes)} bytes")
  yield ""
  yield f"a state of {sizes.pop() / 1e6:,.0f} MB; median [least .. most] of {len(rounds)} rounds"
  columns = "{:<30} {:>24} {:>24} {:>24} {:>20} {:>20}  {}"
  names = [_TITLES[side] for side in _SIDES]
  yield columns.format("", *names, "ours/Orbax", "ours/MaxText", "goal").rstrip()
  for measure in _MEASURES:
    values = {side: [measure.value(runs[side]) for runs in rounds] for side in _SIDES}
    cells = [Spread.of(values[side]).text(measure.decimals) for side in _SIDES]
    for other in _SIDES[1:]:
      ratios = [a / b for a, b in zip(values["ours"], values[other], strict=True) if b]
      cells.append(Spread.of(ratios).text(2) if ratios else "")
    goal = f"{measure.goal} (ours)" if measure.of_value else measure.goal
    yield columns.format(measure.label, *cells, goal).rstrip()


if __name__ == "__main__":
  main()
