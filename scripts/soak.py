"""The soak: kills, faults of the disk, mutated input and random conversations, for hours.

  python -m scripts.soak                              all of it, going on where the last call ended
  python -m scripts.soak --minutes 10 --slice ci      a slice of it
  python -m scripts.soak --part kills --case 17       one case alone, whose files are kept

What was done is kept in runs/soak/cases.jsonl. A case is made of the seed, its part and its number. The exit code is 1
when a case of this seed and this state of the code failed, now or before.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from tests.support.soak.cases import Part
  from tests.support.soak.ledger import Ledger, Record

REPOSITORY = Path(__file__).resolve().parents[1]


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the soak; returns the exit code."""
  arguments = _arguments(argv)
  # What is below imports JAX; a process that the soak forks comes through this file again.
  from tests.support.soak import ledger, parts

  code = ledger.code_digest([REPOSITORY / "src", REPOSITORY / "configs", REPOSITORY / "tests" / "support"])
  book = ledger.Ledger(arguments.folder / "cases.jsonl", seed=arguments.seed, code=code)
  soak = Soak(arguments.folder, book, seed=arguments.seed, code=code)
  with parts.all_parts() as known:
    chosen = {name: known[name] for name in arguments.part or known}
    if arguments.case is not None:
      (part,) = chosen.values()
      return int(soak.make(part, arguments.case, keep=True).failed)
    totals = {name: part.slice if arguments.slice else part.cases for name, part in chosen.items()}
    ended = soak.run(chosen, totals, seconds=60 * arguments.minutes)
  print("\n".join(ledger.figures(book, totals)))
  if not ended:
    print("the time is up; the same command goes on from here")
  return int(any(record.failed for name in totals for record in book.records(name)))


class Soak:
  """Makes cases and notes them."""

  def __init__(self, folder: Path, book: Ledger, *, seed: int, code: str):
    self._folder = folder.absolute()
    self._book = book
    self._seed = seed
    self._code = code

  def run(self, parts: Mapping[str, Part], totals: Mapping[str, int], *, seconds: float) -> bool:
    """Makes what is missing, the part that is furthest behind first; whether nothing is missing at the end."""
    deadline = time.monotonic() + seconds
    missing = {name: sorted(set(range(total)) - self._book.done(name)) for name, total in totals.items()}
    while any(missing.values()):
      if time.monotonic() > deadline:
        return False
      name = max(missing, key=lambda name: len(missing[name]) / max(totals[name], 1))
      self.make(parts[name], missing[name].pop(0))
    return True

  def make(self, part: Part, case: int, *, keep: bool = False) -> Record:
    """Makes one case, says how it ended, and notes it."""
    from tests.support.soak.cases import Bench, FaultFoundError, NotPermittedError
    from tests.support.soak.ledger import Record

    bench = Bench(part.name, case, self._seed, self._folder / "cases" / f"{part.name}-{case}", self._shared())
    shutil.rmtree(bench.folder, ignore_errors=True)
    bench.folder.mkdir(parents=True)
    started = time.monotonic()
    name, detail, counts, failed = "FAILED", "", {}, False
    try:
      outcome = part.run(bench)
      name, counts = outcome.name, dict(outcome.counts)
    except NotPermittedError as error:
      name = f"not permitted here: {error}"
    except Exception as error:
      # Also what looking at the files raised: a checkpoint that can't be read, metrics that are none.
      told = str(error) if isinstance(error, FaultFoundError) else f"{type(error).__name__}: {error}"
      failed, detail = True, " ".join(told.split())[-1000:]
    seconds = time.monotonic() - started
    record = Record(part.name, case, self._seed, self._code, name, failed, round(seconds, 1), detail, counts)
    self._book.add(record)
    print(f"{part.name} {case}: {name}{f': {detail}' if detail else ''} ({seconds:.0f} s)", flush=True)
    if keep or failed:
      print(f"  {record.command}\n  its files: {bench.folder}", flush=True)
    else:
      shutil.rmtree(bench.folder, ignore_errors=True)
    return record

  def _shared(self) -> Path:
    folder = self._folder / "references" / self._code
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="soak", description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("--minutes", type=float, default=600.0, help="begin no case after so long (default: %(default)g)")
  parser.add_argument("--slice", choices=["ci"], help="the cases of ten minutes instead of all")
  parser.add_argument("--part", action="append", choices=PARTS, help="this part alone; may be repeated")
  parser.add_argument("--case", type=int, help="this case of the one --part alone; its files are kept")
  parser.add_argument("--seed", type=int, default=0, help="decides the cases (default: %(default)s)")
  parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "soak", help="where it keeps what it did")
  arguments = parser.parse_args(argv)
  if arguments.case is not None and len(arguments.part or []) != 1:
    parser.error("--case needs its --part")
  return arguments


PARTS = ("kills", "faults", "mutations", "conversations")

if __name__ == "__main__":
  sys.exit(main())
