"""What became of a data set's rows, for the log and for a run's report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

_SHOWN_LOCATIONS = 5


@dataclass
class BadRows:
  """The unusable rows of one kind: how many, and the first few with where they stand and what they have."""

  count: int = 0
  first: list[str] = field(default_factory=list)

  def add(self, description: str) -> None:
    """Counts one row; `description` is kept while there are few."""
    self.count += 1
    if len(self.first) < _SHOWN_LOCATIONS:
      self.first.append(description)


@dataclass
class DataReport:
  """Counts of one data set.

  Attributes:
    source: name of the data set, as configured.
    rows_read: rows found, unusable ones included.
    examples: rows that are trained or evaluated on.
    truncated: examples cut to `max_target_length` tokens.
    bad_rows: unusable rows by reason.
    tokens: tokens of all examples.
    trained_tokens: tokens that count in the loss.
    rows: sequences of `sequence_length` positions in one epoch.
    sequence_length: positions of a sequence.
    padding_share: share of those positions that is padding.
    seconds: time it took to read, tokenise and pack.
  """

  source: str
  rows_read: int = 0
  examples: int = 0
  truncated: int = 0
  bad_rows: dict[str, BadRows] = field(default_factory=dict)
  tokens: int = 0
  trained_tokens: int = 0
  rows: int = 0
  sequence_length: int = 0
  padding_share: float = 0.0
  seconds: float = 0.0

  @property
  def bad_row_count(self) -> int:
    """Unusable rows of every kind."""
    return sum(bad.count for bad in self.bad_rows.values())

  def add_bad_row(self, location: object, reason: str, detail: str = "") -> None:
    """Counts one unusable row."""
    self.bad_rows.setdefault(reason, BadRows()).add(f"{location}: {reason}" + (f" ({detail})" if detail else ""))

  def bad_row_summary(self) -> str:
    """Counts by reason, the most frequent first, for example '3 no assistant turn, 1 not valid JSON'."""
    ordered = sorted(self.bad_rows.items(), key=lambda item: (-item[1].count, item[0]))
    return ", ".join(f"{bad.count:,} {reason}" for reason, bad in ordered)

  def first_bad_rows(self, count: int = 3) -> list[str]:
    """The first descriptions, one of each reason before a second of any."""
    queues = [list(bad.first) for bad in self.bad_rows.values()]
    ordered = [queue[turn] for turn in range(_SHOWN_LOCATIONS) for queue in queues if turn < len(queue)]
    return ordered[:count]

  def as_dict(self) -> dict[str, Any]:
    """The counts as values that JSON holds."""
    return asdict(self)

  def lines(self) -> list[str]:
    """The counts as a few lines of text."""
    lines = [
      f"{self.source}: {self.rows_read:,} rows read, {self.examples:,} used"
      + (f", {self.truncated:,} of them cut to {self.sequence_length:,} tokens" if self.truncated else "")
      + f" ({self.seconds:.1f} s)",
      f"{self.tokens:,} tokens, {self.trained_tokens:,} trained, in {self.rows:,} sequences of"
      f" {self.sequence_length:,} ({self.padding_share:.1%} padding)",
    ]
    if self.bad_rows:
      rows = "row" if self.bad_row_count == 1 else "rows"
      lines.append(f"{self.bad_row_count:,} {rows} not used: {self.bad_row_summary()}")
      lines.extend(f"  {row}" for row in self.first_bad_rows(2 * _SHOWN_LOCATIONS))
    return lines
