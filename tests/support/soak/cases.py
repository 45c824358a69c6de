"""What a case is, what comes of it, and what a part of the soak is made of."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


class FaultFoundError(Exception):
  """A case came out as it must not: one line on how."""


class NotPermittedError(Exception):
  """This machine does not let the case be made: a mount, say."""


@dataclass(frozen=True)
class Outcome:
  """How a case ended that ended well.

  Attributes:
    name: in a word or a few; figures are counted by it.
    counts: what else is added up: kills by signal, conversations.
  """

  name: str
  counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
  """Where a case is made.

  Attributes:
    part: its part's name.
    case: its number, from 0.
    seed: the soak's.
    folder: empty, and the case's own; it is removed after a case that ended well.
    shared: kept as long as the code stays the same: the references.
  """

  part: str
  case: int
  seed: int
  folder: Path
  shared: Path

  def random(self) -> random.Random:
    """The case's own numbers: the same for the same seed, part and number."""
    return random.Random(f"{self.seed}/{self.part}/{self.case}")


@dataclass(frozen=True)
class Part:
  """One kind of cases.

  Attributes:
    name: for `--part`.
    cases: of the whole soak.
    slice: of its ten-minute slice.
    run: makes one case; raises FaultFoundError where something is wrong with the package.
  """

  name: str
  cases: int
  slice: int
  run: Callable[[Bench], Outcome]


def require(condition: bool, message: str) -> None:
  """Raises FaultFoundError unless the condition holds."""
  if not condition:
    raise FaultFoundError(message)
