"""Saved logits of a teacher: written, read back row by row, and refused where they belong to something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxtext_posttrain.data.batches import PADDING_ROW, SyntheticRows
from maxtext_posttrain.data.teacher_logits import (
  METADATA_FILE,
  Metadata,
  Part,
  TeacherRows,
  read_metadata,
  write_metadata,
  write_shard,
)
from maxtext_posttrain.errors import DataError

ROWS, LENGTH, VOCAB, K = 7, 6, 20, 3


class PartlyTrained(SyntheticRows):
  """Random rows of which row r trains its last r positions."""

  def assemble(self, rows: Any) -> Any:
    batch = super().assemble(rows)
    for place, row in enumerate(rows):
      batch["targets_segmentation"][place, : LENGTH - max(row, 0)] = 0
    return batch


def source() -> PartlyTrained:
  return PartlyTrained(ROWS, LENGTH, VOCAB, seed=3)


def saved_row(row: int) -> tuple[np.ndarray, np.ndarray]:
  rng = np.random.default_rng(row)
  positions = min(row, LENGTH)
  p = rng.dirichlet(np.ones(VOCAB), size=positions)
  ids = np.argsort(-p, axis=-1)[:, :K].astype(np.int32)
  top = np.take_along_axis(p, ids, -1)
  rest = 1 - top.sum(-1, keepdims=True)
  return ids, np.log(np.concatenate([top, rest], -1)).astype(np.float32)


def metadata(**changes: Any) -> Metadata:
  values = {
    "version": 1,
    "k": K,
    "vocab_size": VOCAB,
    "tokenizer": None,
    "teacher": "runs/teacher/items",
    "teacher_digest": "ab",
    "parts": {},
  }
  return Metadata(**values | changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
  """Two shards of four and three rows."""
  shards = [
    write_shard(tmp_path, "train", 0, [saved_row(row) for row in range(4)]),
    write_shard(tmp_path, "train", 1, [saved_row(row) for row in range(4, ROWS)]),
  ]
  write_metadata(tmp_path, metadata(parts={"train": Part(data=source().fingerprint(), shards=shards)}))
  return tmp_path


def opened(folder: Path, part: str = "train", vocab_size: int = VOCAB, rows: Any = None) -> TeacherRows:
  return TeacherRows(rows or source(), folder, part, vocab_size=vocab_size)


def test_rows_come_back_in_any_order(folder: Path):
  rows = opened(folder)
  order = [5, 0, PADDING_ROW, 3, 6]
  batch = rows.assemble(order)
  plain = source().assemble(order)
  assert len(rows) == ROWS
  for key, array in plain.items():
    np.testing.assert_array_equal(batch[key], array)
  assert batch["teacher_ids"].shape == (5, LENGTH, K)
  assert batch["teacher_log_probs"].shape == (5, LENGTH, K + 1)
  for place, row in enumerate(order):
    ids, log_probs = saved_row(max(row, 0))
    trained = plain["targets_segmentation"][place] != 0
    np.testing.assert_array_equal(batch["teacher_ids"][place][trained], ids)
    np.testing.assert_array_equal(batch["teacher_log_probs"][place][trained], log_probs)
    assert not np.any(batch["teacher_log_probs"][place][~trained])


def test_another_teacher_has_another_fingerprint(folder: Path, tmp_path: Path):
  first = opened(folder).fingerprint()
  assert first != source().fingerprint()
  raw = json.loads((folder / METADATA_FILE).read_text())
  (folder / METADATA_FILE).write_text(json.dumps(raw | {"teacher_digest": "cd"}))
  assert opened(folder).fingerprint() != first


def edit(folder: Path, **changes: Any) -> None:
  raw = json.loads((folder / METADATA_FILE).read_text())
  (folder / METADATA_FILE).write_text(json.dumps(raw | changes))


def overwrite(folder: Path, array: np.ndarray, name: str) -> None:
  np.save(folder / name, array, allow_pickle=False)


def replaced(folder: Path, name: str, value: float) -> None:
  array = np.load(folder / name)
  array[0, 0] = value
  overwrite(folder, array, name)


DAMAGES: dict[str, tuple[Any, str]] = {
  "no metadata": (lambda f: (f / METADATA_FILE).unlink(), "holds no teacher_logits.json"),
  "metadata that are no JSON": (lambda f: (f / METADATA_FILE).write_text("{"), "can't be read"),
  "metadata nested too deep": (lambda f: (f / METADATA_FILE).write_text("[" * 100_000), "can't be read"),
  "metadata that are a list": (lambda f: (f / METADATA_FILE).write_text("[1]"), "its version is None"),
  "another version": (lambda f: edit(f, version=9), "its version is 9"),
  "a key that is unknown": (lambda f: edit(f, surplus=1), "surplus"),
  "a k that is no number": (lambda f: edit(f, k="3"), "k: "),
  "a k of 0": (lambda f: edit(f, k=0), "k: "),
  "no such part": (lambda f: edit(f, parts={}), "no logits for the train data"),
  "a missing file": (lambda f: (f / "train-00001.ids.npy").unlink(), "is missing"),
  "an empty file": (lambda f: (f / "train-00001.ids.npy").write_bytes(b""), "is damaged"),
  "a file cut short": (
    lambda f: (f / "train-00001.ids.npy").write_bytes((f / "train-00001.ids.npy").read_bytes()[:-5]),
    "is damaged",
  ),
  "a pickle": (
    lambda f: np.save(f / "train-00001.ids.npy", np.array([{}], dtype=object), allow_pickle=True),
    "is damaged",
  ),
  "another dtype": (lambda f: overwrite(f, np.zeros((15, K)), "train-00001.ids.npy"), "float64"),
  "another shape": (lambda f: overwrite(f, np.zeros((3, K), np.int32), "train-00001.ids.npy"), r"\(3, 3\)"),
  "offsets that fall": (lambda f: overwrite(f, np.array([0, 4, 2, 15]), "train-00001.offsets.npy"), "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_named_when_opened(folder: Path, name: str):
  damage, message = DAMAGES[name]
  damage(folder)
  with pytest.raises(DataError, match=message):
    opened(folder)


@pytest.mark.parametrize(
  ("name", "value"),
  [("ids", VOCAB), ("ids", -1), ("log_probs", np.nan), ("log_probs", 5.0), ("log_probs", -50.0)],
)
def test_values_that_no_teacher_gives_are_refused_where_they_are_read(folder: Path, name: str, value: float):
  replaced(folder, f"train-00001.{name}.npy", value)
  rows = opened(folder)
  rows.assemble([0, 1, 2, 3])
  with pytest.raises(DataError, match="row 4 holds no distribution"):
    rows.assemble([4])


def test_what_is_of_something_else_is_refused_by_name(folder: Path):
  with pytest.raises(DataError, match="vocab_size=20, the student 24"):
    opened(folder, vocab_size=24)
  with pytest.raises(DataError, match="no logits for the eval data"):
    opened(folder, "eval")
  with pytest.raises(DataError, match="are of other data"):
    opened(folder, rows=PartlyTrained(ROWS, LENGTH, VOCAB, seed=4))
  with pytest.raises(DataError, match="holds no teacher_logits"):
    read_metadata(folder / "nothing")


def test_no_trained_position_at_all(tmp_path: Path):
  class Untrained(PartlyTrained):
    def assemble(self, rows: Any) -> Any:
      batch = super().assemble(rows)
      batch["targets_segmentation"][:] = 0
      return batch

  rows = Untrained(2, LENGTH, VOCAB, seed=0)
  shard = write_shard(tmp_path, "train", 0, [saved_row(0), saved_row(0)])
  write_metadata(tmp_path, metadata(parts={"train": Part(data=rows.fingerprint(), shards=[shard])}))
  assert not np.any(opened(tmp_path, rows=rows).assemble([1])["teacher_log_probs"])
