from __future__ import annotations

import pytest

from maxtext_posttrain.tokenizers import build_tokenizer

ASSETS = "maxtext://tokenizers/"


@pytest.fixture(scope="session")
def llama2():
  return build_tokenizer(ASSETS + "tokenizer.llama2", "sentencepiece", chat_template="llama2")


@pytest.fixture(scope="session")
def llama3():
  return build_tokenizer(ASSETS + "tokenizer_llama3.tiktoken", "tiktoken", chat_template="llama3")


@pytest.fixture(scope="session")
def gemma():
  return build_tokenizer(ASSETS + "tokenizer.gemma", "sentencepiece", chat_template="gemma")


@pytest.fixture(scope="session")
def qwen():
  return build_tokenizer(ASSETS + "qwen3-tokenizer", "huggingface")
