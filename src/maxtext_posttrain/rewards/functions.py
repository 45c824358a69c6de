"""The built-in reward functions, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from maxtext_posttrain.evaluation.answers import find_answer, parse_number
from maxtext_posttrain.rewards.sample import RewardFunction, RewardSample, RewardSettings

_MOST_CHARACTERS = 20_000
_LONGEST_EXPRESSION = 400
_MARK = re.compile(r"####[ \t]*\S|\\f?boxed\s*\{")


def exact_answer(sample: RewardSample, settings: RewardSettings) -> float:
  """1 where the completion ends with the answer, else 0.

  The solution is what stands last between the solution's marks, else the whole completion. Numbers are compared exactly
  (`evaluation.answers`); an answer that is no number is compared as mathematics by `math-verify`.
  """
  completion = sample.completion[-_MOST_CHARACTERS:]
  solution = solution_text(completion, settings)
  wanted = find_answer(sample.answer)
  if wanted is not None and (wanted.rule != "last number" or parse_number(sample.answer) is not None):
    found = find_answer(completion if solution is None else solution)
    return float(found is not None and found.value == wanted.value)
  return float(_same_mathematics(sample.answer, completion if solution is None else solution))


def marked_answer(sample: RewardSample, settings: RewardSettings) -> float:
  """1 where the completion says which its final answer is: by the solution's marks, `####` or a box; else 0."""
  completion = sample.completion[-_MOST_CHARACTERS:]
  return float(solution_text(completion, settings) is not None or _MARK.search(completion) is not None)


def tagged_format(sample: RewardSample, settings: RewardSettings) -> float:
  """1 where the completion is reasoning between its marks and then a solution between its own, each once; else 0."""
  text = sample.completion[:_MOST_CHARACTERS]
  if settings.reasoning_in_prompt:
    text = settings.reasoning[0] + text
  marks = (*settings.reasoning, *settings.solution)
  if any(text.count(mark) != 1 for mark in marks):
    return 0.0
  places = [text.index(mark) for mark in marks]
  between = text[places[1] + len(marks[1]) : places[2]]
  outside = text[: places[0]] + between + text[places[3] + len(marks[3]) :]
  inside = (text[places[0] + len(marks[0]) : places[1]], text[places[2] + len(marks[2]) : places[3]])
  return float(places == sorted(places) and not outside.strip() and all(part.strip() for part in inside))


def finished(sample: RewardSample, settings: RewardSettings) -> float:
  """1 where the completion ended by itself, 0 where it was cut."""
  del settings
  return float(not sample.truncated)


def overlong(sample: RewardSample, settings: RewardSettings) -> float:
  """0 for a completion that leaves `overlong_tokens` of its limit free, down to −1 at the limit.

  DAPO's soft overlong punishment (https://arxiv.org/abs/2503.14476, section 3.4).
  """
  room = settings.overlong_tokens
  excess = sample.tokens - (settings.most_tokens - room)
  if excess <= 0 or room <= 0:
    return 0.0
  return -min(1.0, excess / room)


FUNCTIONS: Mapping[str, RewardFunction] = {
  "exact_answer": exact_answer,
  "marked_answer": marked_answer,
  "tagged_format": tagged_format,
  "finished": finished,
  "overlong": overlong,
}
"""The built-in functions, by the names that `reward_weights` knows them by."""


def solution_text(completion: str, settings: RewardSettings) -> str | None:
  """What stands between the last pair of the solution's marks; None where there is none."""
  begin, end = settings.solution
  start = completion.rfind(begin)
  if not begin or start < 0:
    return None
  inside = completion[start + len(begin) :]
  stop = inside.find(end) if end else -1
  return inside[:stop].strip() if stop >= 0 else None


def _same_mathematics(answer: str, solution: str) -> bool:
  """Whether two texts say the same in mathematics; a time limit is the caller's."""
  answer, solution = answer.strip()[-_LONGEST_EXPRESSION:], solution.strip()[-_MOST_CHARACTERS:]
  if not answer or not solution:
    return False
  if answer == solution:
    return True
  import math_verify

  # Its own timers work by signals; the process this runs in has a time limit from outside.
  untimed: Any = None
  dressed = solution if "$" in solution or "\\" in solution else f"${solution}$"
  wanted = math_verify.parse(f"${answer}$", parsing_timeout=untimed)
  found = math_verify.parse(dressed, parsing_timeout=untimed)
  return bool(wanted) and bool(found) and math_verify.verify(wanted, found, timeout_seconds=untimed)
