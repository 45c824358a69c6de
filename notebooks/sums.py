"""Sums of one-digit numbers in 40 words: what some of the notebooks train on, small enough to be learned in seconds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

_SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")
_WORDS = ("What", "is", "+", "?", "The", "sum", ".", *map(str, range(28)))
_TEMPLATE = (
  "{% for message in messages %}{% if message['role'] == 'assistant' %}"
  "{% generation %} {{ message['content'] }}<eos>{% endgeneration %}"
  "{% else %}<bos>{{ message['content'] }}{% endif %}{% endfor %}"
)


def question(numbers: Iterable[int]) -> str:
  """`What is 3 + 4 ?`"""
  return f"What is {' + '.join(map(str, numbers))} ?"


def write_rows(path: Path, rows: Iterable[Mapping[str, str]]) -> Path:
  """Writes one JSON object a line; returns the path."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
  return path


def write_tokenizer(folder: Path) -> Path:
  """Writes a HuggingFace tokenizer in which each word and each number is one token; returns its folder.

  Its chat template is the question, and after a space the answer with its end.
  """
  from tokenizers import Tokenizer, models, pre_tokenizers

  from maxtext_posttrain.tokenizers.own import write_tokenizer_folder

  vocabulary = {word: index for index, word in enumerate((*_SPECIAL, *_WORDS))}
  tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
  tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
  tokenizer.add_special_tokens(list(_SPECIAL))
  names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"}
  return write_tokenizer_folder(tokenizer, folder, {**names, "chat_template": _TEMPLATE})
