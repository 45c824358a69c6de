"""A few examples as text, with what is trained told from what is not: the loss mask made visible."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from maxtext_posttrain.data.examples import ConversationTokenizer, Example, Examples

_SHOWN_TOKENS = 400


@dataclass(frozen=True)
class Span:
  """A stretch of an example's text whose tokens are all trained, or all not."""

  text: str
  trained: bool


@dataclass(frozen=True)
class Sample:
  """One example as it is trained on.

  Attributes:
    spans: its text from the first token on.
    tokens: tokens of the example.
    trained_tokens: those that count in the loss.
    shown_tokens: tokens that the spans hold; the rest is left out.
  """

  spans: list[Span]
  tokens: int
  trained_tokens: int
  shown_tokens: int


def render_samples(examples: Examples, tokenizer: ConversationTokenizer, count: int) -> list[Sample]:
  """The first `count` examples as text."""
  return [render_sample(examples[index], tokenizer) for index in range(min(count, len(examples)))]


def render_sample(example: Example, tokenizer: ConversationTokenizer) -> Sample:
  """An example as text.

  A tokenizer's text depends on what stands before it, so each span is what its tokens add to the text so far. A
  character whose bytes fall into two spans is shown in the second.
  """
  ids = example.tokens[:_SHOWN_TOKENS].tolist()
  marks = example.trained[:_SHOWN_TOKENS].tolist()
  spans: list[Span] = []
  before, end = "", 0
  for trained, group in itertools.groupby(marks):
    end += len(list(group))
    text = tokenizer.decode(ids[:end])
    shared = _shared_length(before, text)
    if shared < len(before):
      spans[-1] = Span(spans[-1].text[: shared - len(before)], spans[-1].trained)
    spans.append(Span(text[shared:], trained))
    before = text
  return Sample(spans, len(example.tokens), int(example.trained.sum()), len(ids))


def _shared_length(left: str, right: str) -> int:
  """Characters that both texts begin with."""
  return next(
    (index for index, (one, other) in enumerate(zip(left, right, strict=False)) if one != other),
    min(len(left), len(right)),
  )
