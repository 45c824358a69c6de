"""What one rendering of a chat template has used, in time and text, and how much that may be."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

_CONTAINERS = (Mapping, Sequence, set, frozenset)


class TemplateLimitError(SecurityError):
  """A rendering used more time or text than it may."""


@dataclass(frozen=True)
class RenderLimits:
  """What one rendering may use.

  Attributes:
    seconds: processor time.
    characters: text and container slots created, intermediate results included.
  """

  seconds: float = 5.0
  characters: int = 50_000_000


class Meter:
  """Counts what one rendering uses."""

  def __init__(self, limits: RenderLimits):
    self.limits = limits
    self._left = limits.characters
    self._ticks = 0
    self._clock_started = time.monotonic()
    self._cpu_started = time.thread_time()
    self._weights: dict[int, tuple[Any, int]] = {}

  def step(self, characters: int = 0) -> None:
    """Counts a step about to create characters; raises TemplateLimitError when too much time or text is used."""
    self._ticks += 1
    # The processor time is what counts, so that a busy machine fails no good template; reading it costs more.
    if (
      not self._ticks % 8
      and time.monotonic() - self._clock_started > self.limits.seconds
      and time.thread_time() - self._cpu_started > self.limits.seconds
    ):
      raise TemplateLimitError(f"rendering took more than {self.limits.seconds:g} s")
    self._left -= characters
    if self._left < 0:
      raise TemplateLimitError(f"rendering creates more than {self.limits.characters:,} characters")

  def charge(self, characters: int) -> None:
    """Counts characters about to be created; raises TemplateLimitError when they are too many."""
    self._left -= characters
    if self._left < 0:
      raise TemplateLimitError(f"rendering creates more than {self.limits.characters:,} characters")

  def weigh(self, value: Any) -> int:
    """Characters that printing `value` takes, at most about; shared parts count each time they are printed.

    Raises:
      SecurityError: a `namespace` is inside: its contents may change after they were weighed.
    """
    if isinstance(value, str):
      return len(value)
    if value is None or value is True or value is False:
      return 8
    if isinstance(value, int):
      return 8 + value.bit_length() // 3
    if isinstance(value, Namespace):
      raise SecurityError("a namespace cannot be printed or put into a list, a dict or a format")
    if not isinstance(value, _CONTAINERS) or isinstance(value, range):
      return 16
    known = self._weights.get(id(value))
    if known is not None:
      return known[1]
    self._weights[id(value)] = (value, 16)
    if isinstance(value, Mapping):
      parts: Iterable[Any] = (part for item in value.items() for part in item)
    else:
      parts = value
    weight = 16
    for part in parts:
      weight += 8 + self.weigh(part)
      if weight > self.limits.characters:
        break
    self._weights[id(value)] = (value, weight)
    return weight
