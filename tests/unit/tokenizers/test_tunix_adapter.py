"""Tunix's own TokenizerAdapter over our tokenizers, unpatched."""

from __future__ import annotations

import pytest

MESSAGES = [{"role": "user", "content": "What is 2+2?"}]


@pytest.fixture(scope="module")
def adapter_class():
  from tunix.generate.tokenizer_adapter import TokenizerAdapter

  return TokenizerAdapter


@pytest.fixture(params=["llama2", "llama3", "gemma", "qwen"])
def tokenizer(request):
  return request.getfixturevalue(request.param)


def test_the_adapter_takes_each_kind(adapter_class, tokenizer):
  adapter = adapter_class(tokenizer)
  for name in ("bos_id", "eos_id", "pad_id"):
    assert getattr(adapter, name)() == getattr(tokenizer, name)
  ids = adapter.encode("hello there")
  assert ids == tokenizer.encode("hello there")
  assert adapter.decode(ids) == "hello there"
  assert adapter.decode([*ids, tokenizer.eos_id], skip_special_tokens=True) == "hello there"
  assert adapter.vocab_size == tokenizer.vocab_size
  assert adapter.fingerprint == tokenizer.fingerprint


def test_the_adapter_uses_our_template(adapter_class, tokenizer):
  adapter = adapter_class(tokenizer)
  text = adapter.apply_chat_template(MESSAGES)
  assert text == tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
  expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
  assert adapter.apply_chat_template(MESSAGES, tokenize=True) == expected


def test_rendered_text_encodes_to_the_conversations_ids(adapter_class, tokenizer):
  """As Tunix's samplers do it: text first, then ids, with bos in front if there is one, less a second bos."""
  adapter = adapter_class(tokenizer.parsing_special_tokens())
  text = adapter.apply_chat_template(MESSAGES)
  ids = adapter.encode(text)
  expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
  assert ids == expected
  bos = [adapter.bos_id()] if adapter.bos_id() else []
  assert adapter.dedup_bos_ids(bos + ids) == expected
