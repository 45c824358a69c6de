"""From ranges of text to the tokens that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

Bounds = npt.NDArray[np.int64]


def mask_from_offsets(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
  """Says which tokens hold any of the spans' text.

  Args:
    offsets: half-open range of each token's text, ascending. Text between two tokens counts to the second; a token
      without text (all but the last of a character's bytes, in SentencePiece) to the one behind it.
    spans: half-open ranges in the same units.
  """
  bounds = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2)
  return mask_from_bounds(bounds[:, 0], bounds[:, 1], spans)


def mask_from_bounds(starts: Bounds, ends: Bounds, spans: Iterable[tuple[int, int]]) -> list[bool]:
  """Does what `mask_from_offsets` does, from the tokens' starts and ends, int64 [T] each."""
  count = len(starts)
  merged = merge_spans(spans)
  if not count or not merged:
    return [False] * count
  furthest = np.maximum.accumulate(ends)
  starts = starts.copy()
  starts[0] = min(starts[0], 0)
  np.minimum(starts[1:], furthest[:-1], out=starts[1:])
  holders = np.where(ends > starts, np.arange(count), count)
  holders = np.minimum.accumulate(holders[::-1])[::-1]
  ends = np.append(ends, furthest[-1])[holders]
  edges = np.array(merged, np.int64)
  following = np.searchsorted(edges[:, 1], starts, side="right")
  span_starts = np.append(edges[:, 0], np.iinfo(np.int64).max)
  return (span_starts[following] < ends).tolist()


def merge_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
  """The same ranges in order, without empty ones, those that touch or overlap made one."""
  merged: list[tuple[int, int]] = []
  for start, end in sorted(spans):
    if merged and start <= merged[-1][1]:
      merged[-1] = merged[-1][0], max(merged[-1][1], end)
    elif start < end:
      merged.append((start, end))
  return merged
