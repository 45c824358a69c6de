"""Llama 3's tiktoken vocabulary against transformers' conversion of it."""

from __future__ import annotations

import pytest

from maxtext_posttrain.tokenizers import build_tokenizer
from maxtext_posttrain.tokenizers.chat_template import load_template
from tests.support.chat_samples import SPECIAL_TEXTS, TEMPLATES, TEXTS, assert_agrees, conversations, tiktoken_reference


@pytest.fixture(scope="module")
def ours():
  return build_tokenizer(
    "maxtext://tokenizers/tokenizer_llama3.tiktoken", "tiktoken", parse_special_tokens_in_content=True
  )


@pytest.fixture(scope="module")
def reference(ours):
  return tiktoken_reference(dict(ours.special_tokens))


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_masks_agree_with_transformers(reference, ours, name):
  count = 250 if name == "llama3" else 60
  samples = conversations(count, seed=9, texts=TEXTS + SPECIAL_TEXTS)
  assert assert_agrees(reference, ours, load_template(name).text, samples) > 0.7 * count


@pytest.mark.parametrize(
  "text", ["Hello", "", "\n\n\n", "x  y", "日本 😀", "<|eot_id|>x<|begin_of_text|>", "12345 '\u017fx"]
)
def test_encoded_text_agrees_with_transformers(reference, ours, text):
  assert ours.encode(text, parse_special_tokens=True) == reference.encode(text, add_special_tokens=False)
