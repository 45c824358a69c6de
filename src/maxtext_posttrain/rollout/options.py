"""What is asked of a generation engine, and what it answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from maxtext_posttrain.errors import GenerationError

_INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
  """How tokens are chosen. Filters apply in this order: temperature, top-k, then top-p on what top-k left.

  Attributes:
    max_new_tokens: at most this many tokens a completion, the stop token included.
    temperature: logits are divided by it; 0 takes the most probable token (the lowest id among equals).
    top_k: only the k most probable tokens, and those as probable as the k-th; 0 is all.
    top_p: only the most probable tokens that together reach this probability (nucleus sampling,
      https://arxiv.org/abs/1904.09751), and those as probable as the last of them; 1 is all.
    seed: of the random draws, from 0 to 2**64 - 1. Sample j of prompt i draws by (seed, i, j, token) alone, whatever
      else is generated beside it.
    stop_token_ids: a completion ends with the first of these.
    stop_sequences: a completion ends when its last tokens are one of these, each of one token or more.
    n: completions of each prompt.
    tempered_log_probs: log-probabilities are those at `temperature`, before top-k and top-p; else at temperature 1.

  Raises:
    GenerationError: a value is out of its range.
  """

  max_new_tokens: int = 128
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0
  stop_token_ids: Sequence[int] = ()
  stop_sequences: Sequence[Sequence[int]] = ()
  n: int = 1
  tempered_log_probs: bool = False

  def __post_init__(self) -> None:
    _integer("max_new_tokens", self.max_new_tokens, 1, _INT32_MAX)
    _integer("top_k", self.top_k, 0, _INT32_MAX)
    _integer("seed", self.seed, 0, 2**64 - 1)
    _integer("n", self.n, 1, _INT32_MAX)
    if not math.isfinite(self.temperature) or self.temperature < 0:
      raise GenerationError(f"temperature is {self.temperature}: it must be 0 (greedy) or a positive number")
    if not 0 < self.top_p <= 1:
      raise GenerationError(f"top_p is {self.top_p}: it must be above 0 and at most 1 (which keeps every token)")
    for sequence in self.stops:
      if not sequence:
        raise GenerationError("a stop sequence is empty: it needs at least one token")
      for token in sequence:
        _integer("a stop token", token, 0, _INT32_MAX)

  @property
  def stops(self) -> list[tuple[int, ...]]:
    """All that ends a completion: stop tokens and stop sequences."""
    return [*((token,) for token in self.stop_token_ids), *map(tuple, self.stop_sequences)]


def _integer(name: str, value: int, low: int, high: int) -> None:
  if isinstance(value, bool) or not isinstance(value, int):
    raise GenerationError(f"{name} is {value!r}: it must be a whole number")
  if not low <= value <= high:
    raise GenerationError(f"{name} is {value}: it must be from {low} to {high}")


FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Completion:
  """One completion of one prompt.

  Attributes:
    token_ids: the tokens chosen, the stop token or sequence included where one came.
    log_probs: of each token, over the whole vocabulary: under the model's own distribution, temperature 1, unless
      `tempered_log_probs` was asked for.
    finish_reason: `stop` after a stop token or sequence; `length` at `max_new_tokens` or at the end of the model's
      context.
  """

  token_ids: list[int]
  log_probs: list[float]
  finish_reason: FinishReason
