"""SentencePiece vocabularies against transformers' tokenizers of the same vocabularies."""

from __future__ import annotations

import pytest
from chat_samples import SPECIAL_TEXTS, TEMPLATES, TEXTS, assert_agrees, conversations, sentencepiece_reference

from maxtext_posttrain.tokenizers import build_tokenizer
from maxtext_posttrain.tokenizers.chat_template import load_template


@pytest.fixture(scope="module", params=["tokenizer.llama2", "tokenizer.mistral-v3"])
def pair(request):
  ours = build_tokenizer(f"maxtext://tokenizers/{request.param}", "sentencepiece", parse_special_tokens_in_content=True)
  return sentencepiece_reference(request.param, "llama"), ours


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_masks_agree_with_transformers(pair, name):
  count = 250 if name in ("llama2", "mistral", "plain") else 60
  samples = conversations(count, seed=7, texts=TEXTS + SPECIAL_TEXTS)
  assert assert_agrees(*pair, load_template(name).text, samples) > 0.7 * count


@pytest.mark.parametrize("text", ["Hello", "", "\n", "x  y", "日本 😀", "<s>x</s>", "a<unk>b", "</s>"])
def test_encoded_text_agrees_with_transformers(pair, text):
  reference, ours = pair
  assert ours.encode(text, parse_special_tokens=True) == reference.encode(text, add_special_tokens=False)
