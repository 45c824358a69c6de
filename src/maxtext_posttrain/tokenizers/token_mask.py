"""Which tokens hold the assistant's text: for libraries that say where each token lies, and for those that don't."""

from __future__ import annotations

import abc
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate

from maxtext_posttrain.tokenizers.base import Tokenizer
from maxtext_posttrain.tokenizers.special_tokens import RenderedText, Segment


class SegmentingTokenizer(Tokenizer):
  """A tokenizer whose library knows nothing of special tokens: text is split at them first."""

  def _tokenize(self, rendered: RenderedText, *, with_mask: bool) -> tuple[list[int], list[bool]]:
    ids: list[int] = []
    mask: list[bool] = []
    spans = _merged(rendered.spans) if with_mask else []
    passed = 0
    for segment in self._matcher.split(rendered):
      new = self._encode_segment(rendered, segment) if segment.token_id is None else [segment.token_id]
      ids += new
      if with_mask:
        while passed < len(spans) and spans[passed][1] <= segment.start:
          passed += 1
        mask += self._mask_segment(rendered, segment, new, _clip(spans, passed, segment))
    return ids, mask

  def _mask_segment(
    self, rendered: RenderedText, segment: Segment, ids: list[int], spans: list[tuple[int, int]]
  ) -> list[bool]:
    """The mask of a segment's tokens, where `spans` lie within the segment, in order and apart."""
    if not spans:
      return [False] * len(ids)
    if segment.token_id is not None or spans[0] == (segment.start, segment.end):
      return [True] * len(ids)
    positions = _byte_positions(rendered.text, segment, [position for span in spans for position in span])
    starts, ends = self._token_bounds(rendered, segment, ids)
    return _mask(starts, ends, list(zip(positions[::2], positions[1::2], strict=True)))

  @abc.abstractmethod
  def _encode_segment(self, rendered: RenderedText, segment: Segment) -> list[int]:
    """Encodes a plain segment."""

  @abc.abstractmethod
  def _token_bounds(self, rendered: RenderedText, segment: Segment, ids: list[int]) -> tuple[list[int], list[int]]:
    """Where the text of a segment's tokens starts and ends, ascending, in bytes of the segment's UTF-8."""

  @abc.abstractmethod
  def _byte_length(self, index: int) -> int:
    """How many bytes of text a plain token stands for."""

  def _edges(self, ids: list[int], before: int = 0) -> list[int]:
    """Running sum of the tokens' byte lengths, from 0, where they begin `before` bytes before the text.

    It has one number more than there are tokens.
    """
    known = self._byte_lengths
    try:
      edges = list(accumulate([known[index] for index in ids], initial=-before))
    except KeyError:
      known.update({index: self._byte_length(index) for index in set(ids).difference(known)})
      return self._edges(ids, before)
    edges[0] = 0
    return edges

  @cached_property
  def _byte_lengths(self) -> dict[int, int]:
    return {}


def _clip(spans: Sequence[tuple[int, int]], first: int, segment: Segment) -> list[tuple[int, int]]:
  """What of the spans from number `first` on lies in a segment."""
  inside: list[tuple[int, int]] = []
  for index in range(first, len(spans)):
    start, end = spans[index]
    if start >= segment.end:
      break
    inside.append((max(start, segment.start), min(end, segment.end)))
  return inside


def mask_from_offsets(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
  """Says which tokens hold any of the spans' text.

  Args:
    offsets: half-open range of each token's text, ascending. Text between two tokens counts to the second; a token
      without text (all but the last of a character's bytes, in SentencePiece) to the one behind it.
    spans: half-open ranges in the same units.
  """
  starts = [start for start, _ in offsets]
  ends = [end for _, end in offsets]
  if ends != sorted(ends):
    ends = list(accumulate(ends, max))
  if starts != sorted(starts):
    starts = list(accumulate(reversed(starts), min))[::-1]
  return _mask(starts, ends, _merged(spans))


def _mask(starts: list[int], ends: list[int], spans: Sequence[tuple[int, int]]) -> list[bool]:
  """`mask_from_offsets` with ascending starts and ends, for spans in order and apart."""
  count = len(ends)
  mask = [False] * count
  for span_start, span_end in spans:
    first = bisect_right(ends, span_start)
    if first == count:
      break
    while first and starts[first - 1] >= ends[first - 1] == (ends[first - 2] if first > 1 else 0):
      first -= 1
    last = min(max(bisect_left(starts, span_end), bisect_left(ends, span_end) + 1), count)
    mask[first:last] = [True] * (last - first)
  return mask


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
  """The same ranges in order, without empty ones, those that touch or overlap made one."""
  merged: list[tuple[int, int]] = []
  for start, end in sorted(spans):
    if merged and start <= merged[-1][1]:
      merged[-1] = merged[-1][0], max(merged[-1][1], end)
    elif start < end:
      merged.append((start, end))
  return merged


def _byte_positions(text: str, segment: Segment, positions: Sequence[int]) -> list[int]:
  """Ascending positions in `text` as positions in the UTF-8 of one of its segments."""
  if text.isascii():
    return [position - segment.start for position in positions]
  found: list[int] = []
  last, length = segment.start, 0
  for position in positions:
    length += len(text[last:position].encode())
    found.append(length)
    last = position
  return found
