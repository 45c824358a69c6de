"""What was done is kept in a file of one line a case, so that a second call goes on where the first one ended."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
  """A case that was made.

  Attributes:
    part: its part.
    case: its number.
    seed: of the soak.
    code: `code_digest` of the code it was made with.
    outcome: in a few words.
    failed: whether a fault of the package was found.
    detail: of a failed case, what was wrong.
    seconds: it took.
    counts: what else is added up.
  """

  part: str
  case: int
  seed: int
  code: str
  outcome: str
  failed: bool
  seconds: float
  detail: str = ""
  counts: Mapping[str, int] = field(default_factory=dict)

  @property
  def command(self) -> str:
    """Makes the case again, alone."""
    return f"python -m scripts.soak --seed {self.seed} --part {self.part} --case {self.case}"


class Ledger:
  """The records of one seed and one state of the code; of a case made twice the later one counts."""

  def __init__(self, path: Path, *, seed: int, code: str):
    self._path = path
    self._cases: dict[tuple[str, int], Record] = {}
    for record in _read(path):
      if (record.seed, record.code) == (seed, code):
        self._cases[record.part, record.case] = record

  def add(self, record: Record) -> None:
    """Notes a case, on disk before anything else happens."""
    self._path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(asdict(record)) + "\n"
    with self._path.open("a+b") as file:
      # A kill may have cut the last line short.
      if file.tell() and self._path.read_bytes()[-1:] != b"\n":
        line = "\n" + line
      file.write(line.encode())
    self._cases[record.part, record.case] = record

  def done(self, part: str) -> set[int]:
    """The numbers of the cases that were made."""
    return {case for name, case in self._cases if name == part}

  def records(self, part: str | None = None) -> list[Record]:
    """What was made, in the order of the numbers."""
    return sorted(
      (record for record in self._cases.values() if part in (None, record.part)),
      key=lambda record: (record.part, record.case),
    )


def _read(path: Path) -> Iterator[Record]:
  if not path.exists():
    return
  for line in path.read_text(encoding="utf-8").splitlines():
    try:
      fields: dict[str, Any] = json.loads(line)
    except ValueError:
      continue
    yield Record(**fields)


def figures(ledger: Ledger, totals: Mapping[str, int]) -> list[str]:
  """The table at the end: each part's cases by outcome, and each failure with its command."""
  lines = []
  for part, total in totals.items():
    records = ledger.records(part)
    outcomes = Counter(record.outcome for record in records)
    counts: Counter[str] = Counter()
    for record in records:
      counts.update(record.counts)
    seconds = sum(record.seconds for record in records)
    lines.append(f"{part}: {len(records)} of {total} cases in {seconds / 60:.1f} min")
    lines += [f"  {count:>6}  {name}" for name, count in sorted(outcomes.items(), key=lambda item: -item[1])]
    if counts:
      lines.append("  " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
  failures = [record for record in ledger.records() if record.failed and record.part in totals]
  lines.append(f"{len(failures)} failed" if failures else "none failed")
  for record in failures:
    lines += [f"  {record.part} {record.case}: {record.detail}", f"    {record.command}"]
  return lines


def code_digest(folders: Sequence[Path]) -> str:
  """Sixteen hexadecimal digits of the files below the folders: other code, another soak."""
  digest = hashlib.sha256()
  for folder in folders:
    for path in sorted(folder.rglob("*")):
      if path.suffix in (".py", ".yml", ".jsonl", ".jinja", ".json") and path.is_file():
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
  return digest.hexdigest()[:16]
