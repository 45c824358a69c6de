"""Prompts with answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxtext_posttrain.data.options import DataOptions
from maxtext_posttrain.data.prompts import PreparedPrompts, PromptReport, PromptRows, load_prompts
from maxtext_posttrain.errors import ConfigError, DataError
from tests.unit.data.data_fakes import CharTokenizer, make_config, write_jsonl


def load(tmp_path: Path, rows: list[Any], *, longest: int = 20, system_prompt: str = "", **changes: Any):
  config = make_config(hf_train_files=write_jsonl(tmp_path / "rows.jsonl", rows), max_bad_rows=10, **changes)
  return load_prompts(DataOptions.from_config(config), CharTokenizer(), longest=longest, system_prompt=system_prompt)


def test_two_columns(tmp_path: Path):
  prompts, report = load(tmp_path, [{"question": "ab", "answer": "c"}, {"question": "d", "answer": 7}])
  assert prompts.tokens == [[1, 3, 97, 98, 2, 4], [1, 3, 100, 2, 4]]
  assert (prompts.texts, prompts.answers) == (["ab", "d"], ["c", "7"])
  assert (report.examples, report.rows, report.tokens) == (2, 2, 11)
  assert report.lines()[1] == "11 tokens in 2 prompts"


def test_messages(tmp_path: Path):
  turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
  rows = [{"messages": [*turns, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}]
  prompts, _ = load(tmp_path, rows, train_data_columns=["messages"])
  assert (prompts.texts, prompts.answers) == (["c"], ["d"])
  assert prompts.tokens == [[1, 3, 97, 2, 4, 98, 2, 3, 99, 2, 4]]


def test_prompts_that_are_too_long_are_counted_whatever_their_number(tmp_path: Path):
  rows = [{"question": "a" * count, "answer": "x"} for count in (3, 30, 31, 32)]
  prompts, report = load(
    tmp_path,
    rows,
    longest=7,
  )
  assert len(prompts) == 1
  assert report.bad_rows["prompt too long"].count == 3
  assert "max_prefill_predict_length=7" in report.bad_rows["prompt too long"].first[0]


def test_a_prompt_as_long_as_allowed_is_kept(tmp_path: Path):
  prompts, _ = load(tmp_path, [{"question": "aaa", "answer": "x"}], longest=7)
  assert len(prompts.tokens[0]) == 7


@pytest.mark.parametrize(
  ("row", "reason"),
  [
    ({"question": "a"}, "missing column"),
    ({"question": None, "answer": "x"}, "wrong type"),
    ({"question": "a", "answer": ""}, "empty"),
    ({"question": "a", "answer": True}, "wrong type"),
    ({"question": "a", "answer": None}, "wrong type"),
    ("{not json", "not valid JSON"),
  ],
)
def test_bad_rows_are_counted(tmp_path: Path, row: Any, reason: str):
  _, report = load(tmp_path, [{"question": "a", "answer": "x"}, row])
  assert list(report.bad_rows) == [reason]


def test_bad_rows_beyond_what_is_allowed_stop_the_run(tmp_path: Path):
  config = make_config(
    hf_train_files=write_jsonl(tmp_path / "r.jsonl", [{"question": "a", "answer": "x"}, {"question": "b"}])
  )
  with pytest.raises(DataError, match="1 of 2 rows cannot be used"):
    load_prompts(DataOptions.from_config(config), CharTokenizer(), longest=20)


def test_all_prompts_too_long(tmp_path: Path):
  with pytest.raises(DataError, match=r"none of 1 rows can be used \(1 prompt too long\)"):
    load(tmp_path, [{"question": "a" * 99, "answer": "x"}])


def test_the_answer_is_no_part_of_the_fingerprint_alone(tmp_path: Path):
  one, _ = load(tmp_path, [{"question": "a", "answer": "x"}])
  other, _ = load(tmp_path, [{"question": "a", "answer": "y"}])
  assert one.fingerprint() != other.fingerprint()


def prepared(**changes: Any) -> PreparedPrompts:
  values: dict[str, Any] = {
    "source": PromptRows([[1]] * 10, ["q"] * 10, ["a"] * 10),
    "report": PromptReport("rows"),
    "num_epoch": 1,
    "shuffle_seed": None,
    "identity": {},
    "prompts": None,
    "generations": 4,
    "iterations": 2,
    "accumulation": 2,
    "length": 8,
  }
  return PreparedPrompts(**(values | changes))


def test_a_rollout_makes_one_update_where_nothing_else_is_said():
  dataset = prepared().dataset(batch_size=6)
  assert (dataset.shape.prompts, dataset.shape.updates, dataset.shape.micro_batches) == (3, 1, 4)
  # Ten prompts in batches of three are four rollouts, of four micro-batches each.
  assert (dataset.total_batches, dataset.rows) == (16, 10)
  assert [batch["row"].tolist() for batch in dataset.iterator()] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, -1, -1]]


def test_a_rollout_of_several_updates():
  shape = prepared(prompts=6, accumulation=1).dataset(batch_size=8).shape
  assert (shape.prompts, shape.updates, shape.micro_batches) == (6, 3, 6)


@pytest.mark.parametrize(
  ("changes", "batch_size", "says"),
  [
    ({}, 3, "are not whole groups"),
    ({"prompts": 1}, 6, "is no multiple of"),
    ({"prompts": 5}, 8, "is no multiple of"),
  ],
)
def test_sizes_that_do_not_come_out_even(changes: dict[str, Any], batch_size: int, says: str):
  with pytest.raises(ConfigError, match=says):
    prepared(**changes).dataset(batch_size=batch_size)


def test_assembles_numbers():
  assert prepared().source.assemble([3, -1])["row"].dtype == np.int32
