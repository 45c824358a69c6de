"""A HuggingFace folder against transformers' own reading of it."""

from __future__ import annotations

import pytest

from maxtext_posttrain.tokenizers import build_tokenizer
from maxtext_posttrain.tokenizers.chat_template import load_template
from tests.support.chat_samples import (
  SPECIAL_TEXTS,
  TEMPLATES,
  TEXTS,
  assert_agrees,
  asset,
  conversations,
  text_parts_joined,
)


@pytest.fixture(scope="module")
def ours():
  return build_tokenizer("maxtext://tokenizers/qwen3-tokenizer", "huggingface", parse_special_tokens_in_content=True)


@pytest.fixture(scope="module")
def reference():
  from transformers import AutoTokenizer

  return AutoTokenizer.from_pretrained(asset("qwen3-tokenizer"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_masks_agree_with_transformers(reference, ours, name):
  count = 250 if name == "chatml" else 60
  samples = conversations(count, seed=10, texts=TEXTS + SPECIAL_TEXTS)
  assert assert_agrees(reference, ours, load_template(name).text, samples) > 0.7 * count


def test_ids_agree_for_the_tokenizers_own_template(reference, ours):
  # Qwen's template drops content given as a list of parts. Here such content is joined first, so it is joined for
  # transformers too.
  for sample in conversations(250, seed=11, texts=TEXTS + SPECIAL_TEXTS):
    expected = reference.apply_chat_template(
      text_parts_joined(sample["messages"]),
      tools=sample["tools"],
      add_generation_prompt=sample["add_generation_prompt"],
    )["input_ids"]
    assert ours.apply_chat_template(**sample) == expected


@pytest.mark.parametrize("option", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_variables_for_the_template_are_passed_on(reference, ours, option):
  messages = [{"role": "user", "content": "hi"}]
  expected = reference.apply_chat_template(messages, add_generation_prompt=True, **option)["input_ids"]
  assert ours.apply_chat_template(messages, add_generation_prompt=True, **option) == expected


def test_functions_as_tools_and_documents(reference, ours):
  def weather(city: str, days: int = 1) -> str:
    """Tells the weather.

    Args:
      city: where
      days: how many
    """
    return f"{city} {days}"

  source = "{{ tools | tojson }}{% for d in documents %}{{ d.title }}: {{ d.text }}{% endfor %}"
  options = {"tools": [weather], "documents": [{"title": "T", "text": "x\u00e9"}], "chat_template": source}
  messages = [{"role": "user", "content": "hi"}]
  expected = reference.apply_chat_template(messages, tokenize=False, **options)
  assert ours.apply_chat_template(messages, tokenize=False, **options) == expected
  assert "Tells the weather" in expected
