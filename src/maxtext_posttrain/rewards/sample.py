"""What a reward function is told of a completion, and what all of them share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class RewardSample:
  """One completion.

  Attributes:
    prompt: the text the model was given.
    completion: what it wrote, without special tokens.
    answer: the row's own answer, as it stands in the data.
    tokens: of the completion, the one that ends it included.
    truncated: the completion reached its limit before its end.
  """

  prompt: str
  completion: str
  answer: str
  tokens: int
  truncated: bool


@dataclasses.dataclass(frozen=True)
class RewardSettings:
  """What the configuration says to the built-in functions.

  Attributes:
    reasoning: the texts that begin and end the reasoning.
    solution: the texts that begin and end the solution.
    reasoning_in_prompt: the prompt ends with the first of `reasoning` already.
    most_tokens: tokens that a completion may have.
    overlong_tokens: how many of the last of these are one too many, for `overlong`.
  """

  reasoning: tuple[str, str] = ("<reasoning>", "</reasoning>")
  solution: tuple[str, str] = ("<answer>", "</answer>")
  reasoning_in_prompt: bool = False
  most_tokens: int = 1
  overlong_tokens: int = 0


RewardFunction = Callable[[RewardSample, RewardSettings], float]
BatchFunction = Callable[[Sequence[str], Sequence[str], Sequence[str]], Sequence[float]]
