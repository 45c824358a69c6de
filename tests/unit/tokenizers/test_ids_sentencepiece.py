"""SentencePiece vocabularies against transformers' tokenizers of the same vocabularies."""

from __future__ import annotations

import pytest
import sentencepiece

from maxtext_posttrain.tokenizers import build_tokenizer
from maxtext_posttrain.tokenizers.chat_template import load_template
from maxtext_posttrain.tokenizers.files import vocabulary_file
from tests.support.chat_samples import (
  SPECIAL_TEXTS,
  TEMPLATES,
  TEXTS,
  assert_agrees,
  conversations,
  sentencepiece_reference,
)


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


@pytest.mark.parametrize("vocabulary", ["tokenizer.llama2", "tokenizer.mistral-v3", "tokenizer.gemma"])
@pytest.mark.parametrize(
  "text",
  ["Hello there", " x", "x  y\n\n\n", "日本 😀 a", "\u2581x", "a\u2581 b\u2581\u2581", "e\u0301ﬁ\u00a0\x00", "<0x0A>"],
)
def test_masks_split_where_sentencepiece_has_its_offsets(vocabulary, text):
  tokenizer = build_tokenizer(f"maxtext://tokenizers/{vocabulary}", "sentencepiece")
  file = vocabulary_file(f"maxtext://tokenizers/{vocabulary}", ("*.model",))
  pieces = sentencepiece.SentencePieceProcessor(str(file)).encode("Q" + text, return_type="proto").pieces
  for border in range(2, len(text) + 1):
    position = len(("Q" + text)[:border].encode())
    template = "{{ messages[0].content }}{% generation %}{{ messages[1].content }}{% endgeneration %}"
    halves = ("Q" + text)[:border], ("Q" + text)[border:]
    messages = [{"role": role, "content": half} for role, half in zip(("user", "assistant"), halves, strict=True)]
    rendered = tokenizer.render_conversation(messages, chat_template=template)
    assert rendered.input_ids == [piece.id for piece in pieces]
    # The last byte of a character carries its offsets; those before it have none, and go with it.
    ends = [next(p.end for p in pieces[i:] if p.end > p.begin) for i in range(len(pieces))]
    assert rendered.assistant_mask == [end > position for end in ends]
