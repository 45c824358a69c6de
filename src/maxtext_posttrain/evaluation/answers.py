"""The number that a solution ends with, and whether two are the same.

A solution says its final answer after `####` (GSM8K) or in `\\boxed{…}` (MATH); where it marks none, the last number in
it counts. Numbers are exact: 18, 18.00, $18 and 36/2 are one value. Pure, so that rewards can use it too.
"""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction
from typing import Literal

Rule = Literal["####", "boxed", "last number"]

_MOST_DIGITS = 60
_MOST_CHARACTERS = 100_000
_LONGEST_NUMBER = 200

_CURRENCY = "[$€£¥]"
_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(
  # A minus after a word, a number or a bracket subtracts; elsewhere, and close by, it is the number's sign.
  rf"(?P<sign>(?:(?<![\w)\]}}])[-+](?={_CURRENCY}?[.\d]))?)(?:{_CURRENCY}[ \t]?(?P<inner>[-+]?))?"
  # Exponents (cm^2, cm^{{2}}) and the rest of a number are no numbers.
  r"(?<![\d.^])(?<!\^\{)(?:(?P<mixed>\d+)[ \t]+(?=\d+[ \t]?/[ \t]?\d))?"
  rf"(?P<number>{_DECIMAL}(?:[eE][+-]?\d{{1,2}}(?![\w.]))?)(?:[ \t]?/[ \t]?(?P<below>{_DECIMAL}))?",
  re.ASCII,
)
_UNIT = re.compile(
  rf"[ \t]*(?:%|°[CF]?|{_CURRENCY})?(?:[ \t]+[A-Za-z]{{2,}}(?:[ \t/-]+[A-Za-z]+)*(?:\^?[23]|[²³])?)?[ \t]*[.!]?"
)
_NAME = re.compile(r"[A-Za-z]{1,20}[ \t]*=[ \t]*")
_LOOSE_SIGN = re.compile(r"^([-+])[ \t]+")
_MARKER = re.compile(r"(?<!#)####(?!#)[ \t*_`]*")
_HEADING = re.compile(r"\d+[.):]\s+[^\s\d]", re.ASCII)
_BRACES = re.compile(r"\\f?boxed\s*\{|(?<!\\)[{}]")

_CHARACTERS = str.maketrans(
  {
    "\u2212": "-",  # minus sign
    "\u2010": "-",  # hyphen
    "\u2011": "-",  # hyphen that does not break
    "\u2013": "-",  # en dash
    "\u2044": "/",  # fraction slash
    "\u2215": "/",  # division slash
  }
)
_THIN_GROUPS = re.compile("(?<=[0-9])[\u00a0\u2007\u2009\u202f](?=[0-9]{3}(?![0-9]))")
_LATEX_GROUPS = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!;: ])(?=\d{3}(?!\d))", re.ASCII)
_LATEX_FRACTION = re.compile(
  r"(?P<whole>\d*)\\[dtc]?frac\s*(?:\{\s*(-?\d+(?:\.\d+)?)\s*\}|(\d))\s*(?:\{\s*(\d+(?:\.\d+)?)\s*\}|(\d))", re.ASCII
)
_TEXT = r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|operatorname)\s*\{"
_LATEX_UNIT = re.compile(_TEXT + r"[^{}\d]*\}(?:\s*\^\s*(?:\d|\{\d\}))?", re.ASCII)
_LATEX_TEXT = re.compile(_TEXT + r"([^{}]*)\}")
_LATEX_DEGREE = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree")
_LATEX_NOTHING = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[()\[\]]")
_LATEX_SPACE = re.compile(r"\\(?:[,!;: ]|q?quad(?![A-Za-z]))|~")
_LATEX_ESCAPE = re.compile(r"\\([$%&#_])")


@dataclasses.dataclass(frozen=True)
class Answer:
  """A solution's final number.

  Attributes:
    value: the number, exactly.
    text: as it was spelled.
    rule: what told that it is the final one.
  """

  value: Fraction
  text: str
  rule: Rule


def find_answer(solution: str, *, marked_only: bool = False) -> Answer | None:
  """The final number of a solution.

  The last of `#### number` and `\\boxed{…}` decides, also where the box holds no number; without either the last number
  counts. A heading, as `#### 1. First`, is no answer, and a box that is not closed is no box.

  Args:
    solution: any text.
    marked_only: do without the last number, unless the whole solution is one.

  Returns:
    None where the solution ends with no number.
  """
  solution = solution[-_MOST_CHARACTERS:].strip()
  place, answer = max(_after_hashes(solution), _in_box(solution), key=lambda found: found[0])
  if place >= 0:
    return answer
  if marked_only:
    value = parse_number(solution)
    return None if value is None else Answer(value, solution, "last number")
  last = None
  for match in _NUMBER.finditer(_plain(solution)):
    last = match
  return None if last is None else _answer(last, "last number")


def parse_number(text: str) -> Fraction | None:
  """The number that `text` is, with nothing beside it but its dress; None for anything else.

  Read are signs, thousands (1,234), decimals, fractions (3/4, 1 1/2, \\frac{3}{4}), exponents, currency signs, percent
  (dropped: 50% is 50), units of letters, LaTeX's and Markdown's marks, and a name before it (x = 5).
  """
  text = _plain(_LATEX_UNIT.sub("", text[:_MOST_CHARACTERS])).strip(" \t\n*_`")
  if len(text) > 1 and text[0] == text[-1] == "$":
    text = text[1:-1].strip()
  text = _LOOSE_SIGN.sub(r"\1", text.removeprefix(name[0]) if (name := _NAME.match(text)) else text)
  match = _NUMBER.match(text)
  if match is None or not _UNIT.fullmatch(text, match.end()):
    return None
  return _value(match)


def _after_hashes(solution: str) -> tuple[int, Answer | None]:
  """Where the last `####` stands that a number follows on its line, and the number; (-1, None) without one."""
  for marker in reversed(list(_MARKER.finditer(solution))):
    rest = solution[marker.end() : marker.end() + _LONGEST_NUMBER].split("\n", 1)[0]
    line = _LOOSE_SIGN.sub(r"\1", _plain(rest).strip())
    number = _NUMBER.match(line)
    if number is not None and not _HEADING.match(line):
      return marker.start(), _answer(number, "####")
  return -1, None


def _in_box(solution: str) -> tuple[int, Answer | None]:
  """Where the last closed `\\boxed{…}` stands, and its number, None where it holds another thing."""
  last, content = -1, ""
  opened: list[re.Match[str]] = []
  for brace in _BRACES.finditer(solution):
    if brace[0].endswith("{"):
      opened.append(brace)
    elif opened:
      box = opened.pop()
      if len(box[0]) > 1 and box.start() > last:
        last, content = box.start(), solution[box.end() : brace.start()]
  if last < 0:
    return -1, None
  value = parse_number(content)
  return last, None if value is None else Answer(value, content.strip(), "boxed")


def _plain(text: str) -> str:
  """Text with LaTeX's and typography's spellings of numbers made plain."""
  text = _THIN_GROUPS.sub("", text.translate(_CHARACTERS))
  if "\\" in text or "{" in text:
    text = _LATEX_GROUPS.sub("", text)
    text = _LATEX_FRACTION.sub(_plain_fraction, text)
    text = _LATEX_TEXT.sub(r" \1", text)
    text = _LATEX_DEGREE.sub("°", text)
    text = _LATEX_NOTHING.sub("", text)
    text = _LATEX_SPACE.sub(" ", text)
    text = _LATEX_ESCAPE.sub(r"\1", text)
  return text


def _plain_fraction(match: re.Match[str]) -> str:
  above, below = match[2] or match[3], match[4] or match[5]
  return f"{match['whole']} {above}/{below}" if match["whole"] else f"{above}/{below}"


def _answer(match: re.Match[str], rule: Rule) -> Answer | None:
  value = _value(match)
  return None if value is None else Answer(value, match[0].strip(), rule)


def _value(match: re.Match[str]) -> Fraction | None:
  """The value of a match; None for a division by zero, or more digits than an answer has."""
  if len(match["mixed"] or "") + len(match["number"]) + len(match["below"] or "") > _MOST_DIGITS:
    return None
  value = _fraction(match["number"])
  if match["below"]:
    below = _fraction(match["below"])
    if not below:
      return None
    value /= below
  if match["mixed"]:
    value += _fraction(match["mixed"])
  negative = match["sign"].startswith("-") != (match["inner"] == "-")
  return -value if negative else value


def _fraction(text: str) -> Fraction:
  return Fraction(text.replace(",", ""))
