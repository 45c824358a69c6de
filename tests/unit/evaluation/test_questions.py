"""Rows as questions: what is asked, what is left out, and which references say their final answer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from maxtext_posttrain.data import DataOptions
from maxtext_posttrain.errors import ChatTemplateError
from maxtext_posttrain.evaluation.questions import Questions, read_questions


class WordTokenizer:
  """A token for each word of the conversation, and one that asks for an answer."""

  def apply_chat_template(
    self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, tools: Any, documents: Any
  ) -> list[int]:
    assert add_generation_prompt
    assert documents is None
    if messages[0]["role"] == "tool":
      raise ChatTemplateError("no place for tools")
    return [len(word) for message in messages for word in str(message["content"]).split()] + [0] + [9] * bool(tools)


def questions(path: Path, rows: Sequence[Any], *columns: str, marked_only: bool = False, limit: int | None = None):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  config = SimpleNamespace(
    dataset_type="hf", hf_eval_files=str(path), eval_data_columns=list(columns), max_target_length=8, vocab_size=100
  )
  options = dataclasses.replace(DataOptions.from_config(config, "eval"), limit=limit)
  return read_questions(options, WordTokenizer(), longest_prompt=7, marked_only=marked_only)


def counts(found: Questions) -> dict[str, int]:
  return {reason: bad.count for reason, bad in found.left_out.items()}


ROWS = [
  {"question": "what is it", "answer": "#### 4"},
  {"question": "and this", "answer": "it is 4 or 5"},
  {"question": "who", "answer": "nobody"},
  {"question": "a b c d e f g", "answer": "1"},
  {"question": "only"},
  {"question": "empty", "answer": ""},
  {"question": 3, "answer": "3"},
  5,
]


def test_two_columns(tmp_path: Path):
  found = questions(tmp_path / "a.jsonl", ROWS, "question", "answer")
  assert [(each.text, each.reference, each.answer.value, each.prompt) for each in found.asked] == [
    ("what is it", "#### 4", 4, [4, 2, 2, 0]),
    ("and this", "it is 4 or 5", 5, [3, 4, 0]),
  ]
  assert [each.location for each in found.asked] == [f"{tmp_path}/a.jsonl line 1", f"{tmp_path}/a.jsonl line 2"]
  assert (found.rows, found.with_number) == (8, 3)
  assert counts(found) == {
    "the reference ends with no number": 1,
    "prompt too long": 1,
    "missing column": 1,
    "empty": 1,
    "wrong type": 2,
  }
  assert "a.jsonl line 4: prompt too long: 8 tokens, at most 7" in found.left_out["prompt too long"].first[0]


def test_only_marked_references(tmp_path: Path):
  found = questions(tmp_path / "a.jsonl", ROWS[:4], "question", "answer", marked_only=True)
  assert [each.text for each in found.asked] == ["what is it"]
  assert counts(found) == {"the reference marks no final number": 2, "prompt too long": 1}
  assert found.with_number == 2  # The long question's whole answer is a number.


def test_messages(tmp_path: Path):
  def turns(*pairs: str) -> list[dict[str, str]]:
    return [dict(zip(("role", "content"), pair.split(": "), strict=True)) for pair in pairs]

  rows = [
    {"messages": turns("user: one", "assistant: 1", "user: and two", "assistant: 2"), "tools": [{"name": "t"}]},
    {"messages": turns("assistant: 7")},
    {"messages": turns("user: hello")},
    {"messages": turns("tool: x", "assistant: 7")},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "parts"}]}, *turns("assistant: 7")]},
  ]
  found = questions(tmp_path / "a.jsonl", rows, "messages")
  # The last answer is the reference; what was said before it stays.
  assert [(each.text, each.reference) for each in found.asked] == [("and two", "2"), ("parts", "7")]
  assert found.asked[0].prompt == [3, 1, 3, 3, 0, 9]
  assert counts(found) == {
    "nothing is said before the answer": 1,
    "no assistant turn": 1,
    "refused by the chat template": 1,
  }


def test_the_first_rows_and_their_fingerprint(tmp_path: Path):
  whole = questions(tmp_path / "a.jsonl", ROWS, "question", "answer")
  first = questions(tmp_path / "a.jsonl", ROWS, "question", "answer", limit=2)
  assert (first.rows, len(first.asked)) == (2, 2)
  same = questions(tmp_path / "b.jsonl", ROWS[:2], "question", "answer")
  assert first.fingerprint == same.fingerprint != whole.fingerprint
  assert questions(tmp_path / "b.jsonl", ROWS[1::-1], "question", "answer").fingerprint != same.fingerprint


@pytest.mark.parametrize("limit", [1, 3])
def test_training_data_are_limited_likewise(tmp_path: Path, limit: int):
  from maxtext_posttrain.data.records import read_rows

  path = tmp_path / "a.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
  config = SimpleNamespace(
    dataset_type="hf", hf_eval_files=str(path), eval_data_columns=["question"], max_target_length=8, vocab_size=9
  )
  options = DataOptions.from_config(config, "eval")
  assert len(list(read_rows(options))) == len(ROWS)
  assert len(list(read_rows(dataclasses.replace(options, limit=limit)))) == limit
