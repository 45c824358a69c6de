"""The reference's log-probabilities: computed once for the rows as they are, kept, and never taken for others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data_fakes import CharTokenizer, make_config, write_jsonl

from maxtext_posttrain.checkpointing.identity import weights_identity
from maxtext_posttrain.data import PreparedRows
from maxtext_posttrain.data.options import PAIR_COLUMNS, DataOptions
from maxtext_posttrain.data.pipeline import prepare_pair_rows
from maxtext_posttrain.data.reference_cache import fill_reference
from maxtext_posttrain.data.reference_rows import REFERENCE_KEY, ReferenceRows
from maxtext_posttrain.errors import CheckpointError

PAIRS = [{"prompt": "q" * (1 + index % 3), "chosen": "a" * (1 + index), "rejected": "b"} for index in range(7)]


class Reference:
  """Stands for a model: of a pair it says how many tokens each half trains, and counts its batches."""

  def __init__(self, scale: float = 1.0):
    self.scale = scale
    self.batches: list[int] = []

  def __call__(self):
    return self.compute

  def compute(self, batch):
    segments = batch["targets_segmentation"]
    assert REFERENCE_KEY not in batch
    self.batches.append(len(segments))
    sums = np.stack([(segments == pair).sum(-1) for pair in (1, 2, 3)], axis=-1)
    return (self.scale * sums).astype(np.float32)


@pytest.fixture
def prepare(tmp_path: Path):
  def prepare(pairs=PAIRS, **changes) -> PreparedRows:
    settings = make_config(
      hf_train_files=write_jsonl(tmp_path / "pairs.jsonl", pairs),
      train_data_columns=["prompt", "chosen", "rejected"],
      **({"max_target_length": 40, "packing": True, "max_segments_per_seq": 3} | changes),
    )
    settings.dpo.reference = "precomputed"
    return prepare_pair_rows(DataOptions.from_config(settings, column_rule=PAIR_COLUMNS), CharTokenizer(), settings)

  return prepare


def fill(file: Path, rows: PreparedRows, reference: Reference, *, start=None, model="tiny", resuming=False) -> str:
  source = rows.source
  assert isinstance(source, ReferenceRows)
  return fill_reference(
    {"train": source}, file=file, start=start, model=model, batch_rows=2, resuming=resuming, writes=True, load=reference
  )


def lengths(batch) -> np.ndarray:
  segments = batch["targets_segmentation"]
  return np.stack([(segments == pair).sum(-1) for pair in (1, 2, 3)], axis=-1)


def test_each_row_brings_its_own_sums(prepare, tmp_path: Path):
  rows, reference = prepare(), Reference()
  assert "computed" in fill(tmp_path / "run" / "r.npz", rows, reference)
  count = len(rows.source)
  # Full batches only: the last is filled up with padding rows.
  assert reference.batches == [2] * -(-count // 2)
  batch = rows.source.assemble([count - 1, -1, 0])
  np.testing.assert_array_equal(batch[REFERENCE_KEY], lengths(batch))
  assert not batch[REFERENCE_KEY][1].any()
  assert batch[REFERENCE_KEY].dtype == np.float32


def test_a_second_time_they_are_read(prepare, tmp_path: Path):
  file = tmp_path / "r.npz"
  fill(file, prepare(), Reference())
  rows, unused = prepare(), Reference()
  assert f"read from {file}" in fill(file, rows, unused, resuming=True)
  assert unused.batches == []
  batch = rows.source.assemble([0, 1])
  np.testing.assert_array_equal(batch[REFERENCE_KEY], lengths(batch))
  assert [path.name for path in tmp_path.iterdir() if path.suffix == ".npz" or path.name.startswith(".")] == ["r.npz"]


def test_the_file_is_readable_as_others_of_the_run(prepare, tmp_path: Path):
  (tmp_path / "other").write_text("")
  fill(tmp_path / "r.npz", prepare(), Reference())
  assert (tmp_path / "r.npz").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_folder_that_cannot_be_written_is_named(prepare, tmp_path: Path):
  (tmp_path / "run").write_text("a file")
  with pytest.raises(CheckpointError, match=r"run/r\.npz can't be written: "):
    fill(tmp_path / "run" / "r.npz", prepare(), Reference())
  assert not (tmp_path / "run").is_dir()


def test_a_resumed_run_whose_file_is_gone_computes_them_again(prepare, tmp_path: Path):
  reference = Reference()
  fill(tmp_path / "r.npz", prepare(), reference, resuming=True)
  assert reference.batches


@pytest.mark.parametrize("change", ["data", "length", "model", "weights", "broken", "cut"])
def test_others_are_computed_anew_or_refused_midway(prepare, tmp_path: Path, change: str):
  file, weights = tmp_path / "r.npz", tmp_path / "items"
  weights.mkdir()
  (weights / "manifest").write_text("one")
  given = {"start": str(weights), "model": "tiny"}
  fill(file, prepare(), Reference(), **given)
  pairs, changes = PAIRS, {}
  if change == "data":
    pairs = [*PAIRS[:-1], {**PAIRS[-1], "chosen": "c"}]
  elif change == "length":
    changes = {"max_target_length": 60}
  elif change == "model":
    given["model"] = "tiny in bfloat16"
  elif change == "weights":
    (weights / "manifest").write_text("two")
  elif change == "broken":
    file.write_bytes(b"no archive")
  else:
    file.write_bytes(file.read_bytes()[:200])
  with pytest.raises(CheckpointError, match=r"r\.npz: .*remove the file"):
    fill(file, prepare(pairs, **changes), Reference(), **given, resuming=True)
  rows, again = prepare(pairs, **changes), Reference(scale=2.0)
  fill(file, rows, again, **given)
  assert again.batches
  batch = rows.source.assemble([0])
  np.testing.assert_array_equal(batch[REFERENCE_KEY], 2 * lengths(batch))


def test_rows_without_sums_are_refused(prepare):
  source = prepare().source
  with pytest.raises(ValueError, match="not there yet"):
    source.assemble([0])
  with pytest.raises(ValueError, match="rows of 3 pairs"):
    source.fill(np.zeros((len(source), 2, 4), np.float32))


def test_weights_are_told_apart_by_their_files(tmp_path: Path):
  folder = tmp_path / "items"
  (folder / "d").mkdir(parents=True)
  (folder / "d" / "data").write_bytes(bytes(2 << 20))
  (folder / "manifest").write_text("first write")
  first = weights_identity(str(folder))
  copy = tmp_path / "copy"
  (folder).rename(copy)
  assert weights_identity(str(copy)) == first
  (copy / "manifest").write_text("other write")
  assert weights_identity(str(copy)) != first
  with pytest.raises(OSError, match="gone"):
    weights_identity(str(tmp_path / "gone"))
