"""Gemma's SentencePiece vocabulary, whose markers are user-defined pieces, against transformers' tokenizer of it."""

from __future__ import annotations

import pytest

from maxtext_posttrain.tokenizers import build_tokenizer
from maxtext_posttrain.tokenizers.chat_template import load_template
from tests.support.chat_samples import (
  SPECIAL_TEXTS,
  TEMPLATES,
  TEXTS,
  assert_agrees,
  conversations,
  sentencepiece_reference,
)


@pytest.fixture(scope="module")
def reference():
  return sentencepiece_reference("tokenizer.gemma", "gemma")


@pytest.fixture(scope="module")
def ours():
  return build_tokenizer("maxtext://tokenizers/tokenizer.gemma", "sentencepiece", parse_special_tokens_in_content=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_masks_agree_with_transformers(reference, ours, name):
  count = 250 if name == "gemma" else 40
  samples = conversations(count, seed=8, texts=TEXTS + SPECIAL_TEXTS)
  assert assert_agrees(reference, ours, load_template(name).text, samples) > 0.7 * count
