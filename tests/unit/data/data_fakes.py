"""A tokenizer small enough to work out by hand, and a configuration for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from maxtext_posttrain.errors import ChatTemplateError

BOS, END, USER, ASSISTANT = 1, 2, 3, 4
VOCAB_SIZE = 128


class Rendered(NamedTuple):
  input_ids: list[int]
  assistant_mask: list[bool]


class CharTokenizer:
  """Bos, then for each turn a marker, its characters by ASCII code, and an end token.

  The assistant's characters and its end token are the assistant's. A system turn is refused.
  """

  eos_id = END
  vocab_size = VOCAB_SIZE

  def __init__(self, pad_id: int = 0, fingerprint: str = "chars"):
    self.pad_id = pad_id
    self.fingerprint = fingerprint
    self.rendered: list[tuple[list[dict[str, Any]], Any, Any]] = []

  def render_conversation(self, messages, tools=None, documents=None) -> Rendered:
    self.rendered.append((messages, tools, documents))
    ids, mask = [BOS], [False]
    for message in messages:
      if message["role"] == "system":
        raise ChatTemplateError("this template has no place for a system turn")
      said = [*(message["content"] or "").encode("utf-8"), END]
      assistant = message["role"] == "assistant"
      ids += [ASSISTANT if assistant else USER, *said]
      mask += [False, *[assistant] * len(said)]
    return Rendered(ids, mask)

  def apply_chat_template(self, messages, add_generation_prompt=False, tools=None, documents=None) -> list[int]:
    ids = self.render_conversation(messages, tools, documents).input_ids
    return [*ids, ASSISTANT] if add_generation_prompt else ids

  def decode(self, ids) -> str:
    return "".join(map(chr, ids))


def make_config(**changes: Any) -> SimpleNamespace:
  """A configuration with MaxText's names; unshuffled, unpacked, one epoch without changes."""
  values: dict[str, Any] = {
    "dataset_type": "hf",
    "hf_path": "",
    "hf_train_files": "",
    "hf_eval_files": "",
    "hf_eval_split": "",
    "train_split": "train",
    "train_data_columns": ["question", "answer"],
    "eval_data_columns": ["question", "answer"],
    "sft_train_on_completion_only": True,
    "packing": False,
    "max_target_length": 12,
    "num_epoch": 1,
    "data_shuffle_seed": 0,
    "enable_data_shuffling": False,
    "max_bad_rows": 0.01,
    "vocab_size": VOCAB_SIZE,
    "max_segments_per_seq": -1,
    "dpo": SimpleNamespace(algo="dpo", loss_type="sigmoid", reference="frozen", max_prompt_length=None),
  }
  return SimpleNamespace(**(values | changes))


def write_jsonl(path: Path, rows: Sequence[Any]) -> str:
  path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
  return str(path)


def question_rows(count: int) -> list[dict[str, str]]:
  """Rows of different lengths, each with an answer of its own."""
  return [{"question": "q" * (1 + index % 4), "answer": f"{index:03d}"[: 1 + index % 3]} for index in range(count)]
