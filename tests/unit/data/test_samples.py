"""Examples as text with what is trained told apart, for a tokenizer whose tokens are bytes."""

from __future__ import annotations

import numpy as np

from maxtext_posttrain.data.examples import Example
from maxtext_posttrain.data.samples import Span, render_sample


class Bytes:
  """Each id is a byte; bytes that are no whole character yet are shown as U+FFFD."""

  pad_id = 0
  fingerprint = "bytes"

  def decode(self, ids) -> str:
    return bytes(ids).decode("utf-8", errors="replace")

  def render_conversation(self, messages, tools=None, documents=None):
    raise NotImplementedError


def example(*parts: tuple[bytes, bool]) -> Example:
  tokens = np.frombuffer(b"".join(text for text, _ in parts), np.uint8).astype(np.int32)
  return Example(tokens, np.concatenate([np.full(len(text), trained) for text, trained in parts]))


def test_spans_follow_the_mask():
  sample = render_sample(example((b"user: hi\n", False), (b"bot: yes", True), (b"\nbye", False)), Bytes())
  assert sample.spans == [
    Span("user: hi\n", trained=False),
    Span("bot: yes", trained=True),
    Span("\nbye", trained=False),
  ]
  assert (sample.tokens, sample.trained_tokens, sample.shown_tokens) == (21, 8, 21)


def test_a_character_across_spans_is_shown_once():
  euro = "€".encode()
  sample = render_sample(example((b"a" + euro[:1], False), (euro[1:] + b"b", True)), Bytes())
  assert sample.spans == [Span("a", trained=False), Span("€b", trained=True)]


def test_a_long_example_is_cut():
  sample = render_sample(example((b"x" * 5000, True)), Bytes())
  assert (sample.tokens, sample.trained_tokens) == (5000, 5000)
  assert sample.shown_tokens == len(sample.spans[0].text) < 1000
