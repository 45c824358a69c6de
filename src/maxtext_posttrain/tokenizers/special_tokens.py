"""Finding special tokens in text, and keeping supplied text from forming them.

A rendered conversation mixes text that the template wrote with text that a user or a file supplied. Only the first may
contain special tokens. So before rendering, every place in supplied text where a special token is spelled out (or
where a spelling begins at the very end of a string, to be completed by whatever the template puts next) gets a marker
character behind its first character; after rendering the markers come out again, and their positions say which
spellings are plain text. Markers are Unicode noncharacters that occur in neither the conversation nor the template.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Markers:
  """Three characters that no text of one rendering contains.

  Attributes:
    content: stands behind a supplied character at which a special token's spelling begins.
    start: stands where a `{% generation %}` block begins.
    end: stands where it ends.
  """

  content: str
  start: str
  end: str

  def occur_in(self, text: str) -> bool:
    """Says whether `text` contains one of the three."""
    return not text.isascii() and (self.content in text or self.start in text or self.end in text)


def marker_choices() -> Iterator[Markers]:
  """Yields disjoint triples of noncharacters, then of private-use characters: over 20,000 of them."""
  for codes in (range(0xFDD0, 0xFDF0), range(0x100000, 0x10FFFE)):
    for first in codes[:-2:3]:
      yield Markers(chr(first), chr(first + 1), chr(first + 2))


@dataclass(frozen=True)
class RenderedText:
  """What a template made of a conversation.

  Attributes:
    text: the rendered text, free of markers.
    content_marks: ascending positions p such that `text[p - 1]` came from supplied text and begins there the spelling
      of a special token: no special token may contain that character.
    spans: half-open character ranges of `text` that `{% generation %}` blocks produced.
  """

  text: str
  content_marks: tuple[int, ...] = ()
  spans: tuple[tuple[int, int], ...] = ()


class Segment(NamedTuple):
  """A stretch of text: a special token, or (token_id None) the plain text between two of them."""

  start: int
  end: int
  token_id: int | None


class MarkerClashError(Exception):
  """A string of the conversation contains a marker; render again with other markers."""


class SpecialTokenMatcher:
  """Knows the spellings of a vocabulary's special tokens.

  Attributes:
    tokens: spelling to id.
  """

  def __init__(self, tokens: Mapping[str, int]):
    self.tokens = {spelling: index for spelling, index in tokens.items() if spelling}
    self._first = tuple(sorted({spelling[0] for spelling in self.tokens}))
    pattern = _trie_pattern(self.tokens) if self.tokens else r"(?!)"
    self._pattern = re.compile(pattern)
    self._overlapping = re.compile(f"(?={pattern})")
    self._prefixes = frozenset(spelling[:end] for spelling in self.tokens for end in range(1, len(spelling)))
    self._longest = max((len(spelling) for spelling in self.tokens), default=0)

  def starts(self, text: str) -> list[int]:
    """Positions in `text` at which a special token's spelling begins, overlapping ones included."""
    # The second search is slow, and the first rules most texts out.
    if not self._may_occur(text) or not self._pattern.search(text):
      return []
    return [match.start() for match in self._overlapping.finditer(text)]

  def split(self, rendered: RenderedText) -> list[Segment]:
    """Splits text at its special tokens: leftmost first, the longest where several begin, supplied text never."""
    segments: list[Segment] = []
    text, marks = rendered.text, rendered.content_marks
    position = scan = 0
    while match := self._pattern.search(text, scan):
      start, end = match.span()
      if marks and _any_within(marks, start, end):
        scan = start + 1
        continue
      if position < start:
        segments.append(Segment(position, start, None))
      segments.append(Segment(start, end, self.tokens[match[0]]))
      position = scan = end
    if position < len(text):
      segments.append(Segment(position, len(text), None))
    return segments

  def mark(self, value: Any, markers: Markers, *, protect: bool) -> Any:
    """Copies JSON-like `value` with its strings marked; whatever needs no mark is returned as it is.

    Args:
      value: a string, number, None, mapping or sequence, nested at will. Keys of mappings are marked too.
      markers: the markers of this rendering.
      protect: false only looks for clashes.

    Raises:
      MarkerClashError: a string contains a marker.
    """
    if isinstance(value, str):
      return self._mark_text(value, markers, protect)
    if value is None or isinstance(value, (int, float)):
      return value
    if isinstance(value, Mapping):
      marked = {}
      changed = type(value) is not dict
      for key, item in value.items():
        new_key, new_item = (
          self.mark(key, markers, protect=protect),
          self.mark(item, markers, protect=protect),
        )
        changed = changed or new_key is not key or new_item is not item
        marked[new_key] = new_item
      return marked if changed else value
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, range)):
      items = [self.mark(item, markers, protect=protect) for item in value]
      if type(value) in (list, tuple) and all(new is old for new, old in zip(items, value, strict=True)):
        return value
      return tuple(items) if isinstance(value, tuple) else items
    return value

  def _mark_text(self, text: str, markers: Markers, protect: bool) -> str:
    if markers.occur_in(text):
      raise MarkerClashError
    if not protect or not self._may_occur(text):
      return text
    positions = {*self.starts(text), *self._unfinished(text)}
    if not positions:
      return text
    pieces, last = [], 0
    for position in sorted(positions):
      pieces += (text[last : position + 1], markers.content)
      last = position + 1
    pieces.append(text[last:])
    return "".join(pieces)

  def _unfinished(self, text: str) -> Iterator[int]:
    """Positions from which the rest of the text, trimmed or not, is the beginning of a special token."""
    trimmed = text.rstrip()
    for ending in {text, trimmed}:
      for position in range(max(0, len(ending) - self._longest), len(ending)):
        if ending[position] in self._first and ending[position:] in self._prefixes:
          yield position

  def _may_occur(self, text: str) -> bool:
    for first in self._first:  # noqa: SIM110 - a generator would take three times as long
      if first in text:
        return True
    return False


def unmark(raw: str, markers: Markers) -> RenderedText:
  """Takes the markers out of rendered text and notes where they stood.

  Raises:
    ValueError: the marks of a `{% generation %}` block were torn apart, because the template cut the block's text.
  """
  if not markers.occur_in(raw):
    return RenderedText(raw)
  pieces: list[str] = []
  marks: list[int] = []
  spans: list[tuple[int, int]] = []
  opened: list[int] = []
  last = length = 0
  for position in _positions(raw, (markers.content, markers.start, markers.end)):
    pieces.append(raw[last:position])
    length += position - last
    last = position + 1
    marker = raw[position]
    if marker == markers.content:
      if not marks or marks[-1] != length:
        marks.append(length)
    elif marker == markers.start:
      opened.append(length)
    elif not opened:
      raise ValueError("the text of a {% generation %} block was cut")
    else:
      spans.append((opened.pop(), length))
  if opened:
    raise ValueError("the text of a {% generation %} block was cut")
  pieces.append(raw[last:])
  nonempty = tuple(sorted(span for span in spans if span[0] < span[1]))
  return RenderedText("".join(pieces), tuple(marks), nonempty)


def _positions(text: str, characters: Iterable[str]) -> list[int]:
  """Where any of the characters stands, ascending."""
  found: list[int] = []
  for character in characters:
    position = text.find(character)
    while position >= 0:
      found.append(position)
      position = text.find(character, position + 1)
  found.sort()
  return found


def _any_within(marks: tuple[int, ...], start: int, end: int) -> bool:
  """Says whether a marked character (the one before a mark) lies in [start, end)."""
  following = bisect_right(marks, start)
  return following < len(marks) and marks[following] <= end


def _trie_pattern(spellings: Iterable[str]) -> str:
  """A regular expression that matches the longest of `spellings` in time linear in its length."""
  trie: dict[str, Any] = {}
  for spelling in spellings:
    node = trie
    for character in spelling:
      node = node.setdefault(character, {})
    node[""] = {}
  return _branch_pattern(trie)


def _branch_pattern(node: dict[str, Any]) -> str:
  prefix = ""
  while len(node) == 1 and "" not in node:
    character, node = next(iter(node.items()))
    prefix += re.escape(character)
  branches = [re.escape(character) + _branch_pattern(child) for character, child in node.items() if character]
  if not branches:
    return prefix
  return f"{prefix}(?:{'|'.join(branches)})" + ("?" if "" in node else "")
