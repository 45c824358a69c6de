"""The built-in reward functions."""

from __future__ import annotations

import pytest

from maxtext_posttrain.rewards.functions import FUNCTIONS
from maxtext_posttrain.rewards.sample import RewardSample, RewardSettings

SETTINGS = RewardSettings(most_tokens=100, overlong_tokens=20)


def score(name: str, completion: str, answer: str = "", *, tokens: int = 5, truncated: bool = False) -> float:
  return FUNCTIONS[name](RewardSample("", completion, answer, tokens, truncated), SETTINGS)


@pytest.mark.parametrize(
  ("completion", "answer", "expected"),
  [
    ("7", "7", 1),
    ("The sum is 7.", "7", 1),
    ("7 or 8", "7", 0),
    ("#### 1,000", "so it is\n#### 1000", 1),
    (r"\boxed{\frac{1}{2}}", "0.5", 1),
    ("<reasoning>2 + 5</reasoning><answer>7</answer>", "7", 1),
    ("<answer>8</answer> or <answer>7</answer> as 9 - 2", "7", 1),
    ("<answer>8</answer> 7", "7", 0),
    ("", "7", 0),
    ("no number", "7", 0),
    ("x", "", 0),
    ("the step 3 of Paris", "Paris", 0),
    ("Paris", "Paris", 1),
    (r"$(x+1)^2$", r"x^2 + 2x + 1", 1),
    (r"$(x+1)^2$", r"x^2 + 2x", 0),
    (r"\boxed{(1, 2)}", "(1, 2)", 1),
    ("9" * 30_000, "7", 0),
    ("{" * 30_000, "7", 0),
  ],
)
def test_exact_answer(completion: str, answer: str, expected: float):
  assert score("exact_answer", completion, answer) == expected


@pytest.mark.parametrize(
  ("completion", "expected"),
  [("#### 7", 1), (r"\boxed{7}", 1), ("<answer>7</answer>", 1), ("<answer>7", 0), ("7", 0), ("####", 0)],
)
def test_marked_answer(completion: str, expected: float):
  assert score("marked_answer", completion) == expected


@pytest.mark.parametrize(
  ("completion", "expected"),
  [
    ("<reasoning>a</reasoning><answer>7</answer>", 1),
    ("  <reasoning>a\nb</reasoning>\n <answer>7</answer>\n", 1),
    ("<reasoning></reasoning><answer>7</answer>", 0),
    ("<reasoning>a</reasoning><answer> </answer>", 0),
    ("so: <reasoning>a</reasoning><answer>7</answer>", 0),
    ("<reasoning>a</reasoning> so <answer>7</answer>", 0),
    ("<reasoning>a</reasoning><answer>7</answer>!", 0),
    ("<answer>7</answer><reasoning>a</reasoning>", 0),
    ("<reasoning>a</reasoning><answer>7</answer><answer>7</answer>", 0),
    ("", 0),
  ],
)
def test_tagged_format(completion: str, expected: float):
  assert score("tagged_format", completion) == expected


def test_tagged_format_where_the_prompt_begins_the_reasoning():
  settings = RewardSettings(reasoning_in_prompt=True)
  sample = RewardSample("", "a</reasoning><answer>7</answer>", "", 3, False)
  assert FUNCTIONS["tagged_format"](sample, settings) == 1


@pytest.mark.parametrize(("tokens", "expected"), [(1, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (120, -1)])
def test_overlong(tokens: int, expected: float):
  assert score("overlong", "x", tokens=tokens) == pytest.approx(expected)


def test_finished():
  assert score("finished", "x") == 1
  assert score("finished", "x", truncated=True) == 0
