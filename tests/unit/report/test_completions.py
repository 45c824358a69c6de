"""Completions of a run on its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from maxtext_posttrain.errors import TrainingError
from maxtext_posttrain.report.completions import SAMPLES, read_completions
from maxtext_posttrain.report.page import render
from maxtext_posttrain.report.run_folder import RunFolder


def sample(step: int, **changes: Any) -> dict[str, Any]:
  return {
    "kind": "sample", "step": step, "prompt": f"<b>prompt {step}</b>", "answer": "7", "completion": f"said {step}",
    "reward": 0.5, "rewards": {"exact_answer": 0.0, "finished": 1.0}, "advantage": 1.0, "tokens": 3, "truncated": False,
  } | changes  # fmt: skip


def write(folder: Path, records: list[Any]) -> Path:
  (folder / SAMPLES).write_text("".join(json.dumps(record) + "\n" for record in records))
  (folder / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "reward": 0.25}\n')
  return folder


def test_the_first_and_the_last(tmp_path: Path):
  write(tmp_path, [sample(step) for step in range(1, 20)])
  assert [each.step for each in read_completions(tmp_path)] == [1, 2, 16, 17, 18, 19]


def test_without_the_file_there_are_none(tmp_path: Path):
  assert read_completions(tmp_path) == []


def test_records_that_are_no_completions_are_left_out(tmp_path: Path):
  write(tmp_path, [sample(1), sample(2, rewards="none"), {"kind": "sample", "step": 3}])
  assert [each.step for each in read_completions(tmp_path)] == [1]


def test_a_file_of_something_else_is_an_error(tmp_path: Path):
  (tmp_path / SAMPLES).write_text("hello\nthere\n")
  with pytest.raises(TrainingError, match="is not a record"):
    read_completions(tmp_path)


def test_the_page_shows_them_as_text(tmp_path: Path):
  page = render([RunFolder.read(write(tmp_path, [sample(1), sample(2, truncated=True)]))], {})
  assert "&lt;b&gt;prompt 1&lt;/b&gt;" in page
  assert "<b>prompt" not in page
  assert "said 2" in page
  assert "cut; answer: 7" in page
