"""What an engine is asked to complete: prompts and stops, checked before anything is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from maxtext_posttrain.errors import GenerationError
from maxtext_posttrain.rollout.options import SamplingOptions


@dataclasses.dataclass(frozen=True)
class Request:
  """One sequence to generate: its place in the answer, the numbers its draws depend on, its prompt and its budget."""

  number: int
  prompt: int
  sample: int
  tokens: np.ndarray
  budget: int


def make_requests(
  prompts: Sequence[Sequence[int]], options: SamplingOptions, *, vocab_size: int, max_context: int
) -> list[Request]:
  """The sequences of a call, `options.n` of each prompt.

  Args:
    prompts: token ids, at least one each.
    options: how tokens are chosen.
    vocab_size: of the model.
    max_context: tokens of a prompt and its completion together, at most.

  Raises:
    GenerationError: a prompt is empty, too long, or has a token out of the vocabulary; so is a stop token.
  """
  for token in (token for sequence in options.stops for token in sequence):
    if token >= vocab_size:
      raise GenerationError(f"stop token {token} is not in the vocabulary of {vocab_size} tokens")
  requests = []
  for number, prompt in enumerate(prompts):
    tokens = np.asarray(prompt)
    if tokens.size == 0:
      raise GenerationError(f"prompt {number} is empty: it needs at least one token")
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
      raise GenerationError(f"prompt {number} is not a list of token ids")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
      wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
      raise GenerationError(f"prompt {number}: token {wrong} is not in the vocabulary of {vocab_size} tokens")
    if tokens.size >= max_context:
      raise GenerationError(
        f"prompt {number} has {tokens.size} tokens, which leaves no room in a context of {max_context};"
        " shorten it or raise max_target_length"
      )
    budget = min(options.max_new_tokens, max_context - tokens.size)
    for sample in range(options.n):
      requests.append(Request(len(requests), number, sample, tokens.astype(np.int32), budget))
  return requests
