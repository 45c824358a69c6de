"""Real rows with a real tokenizer: what is trained, read back as text, is the answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from data_fakes import make_config

from maxtext_posttrain.data import prepare_train_rows
from maxtext_posttrain.tokenizers import build_tokenizer

ROWS = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "test.jsonl"
COUNT = 400

pytestmark = pytest.mark.skipif(not ROWS.exists(), reason="the shared GSM8K data are not here")


@pytest.fixture(scope="module")
def tokenizer():
  pytest.importorskip("maxtext")
  return build_tokenizer("maxtext://tokenizers/tokenizer.llama2", "sentencepiece", chat_template="llama2")


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory):
  path = tmp_path_factory.mktemp("gsm8k") / "rows.jsonl"
  path.write_text("".join(ROWS.read_text("utf-8").splitlines(keepends=True)[:COUNT]), "utf-8")
  return str(path)


def build(rows_file, tokenizer, **changes):
  options = {"hf_train_files": rows_file, "vocab_size": 32000, "packing": True, "max_target_length": 1024} | changes
  return prepare_train_rows(make_config(**options), tokenizer).dataset(batch_size=4)


def trained_texts(dataset, tokenizer):
  for batch in dataset.iterator():
    for targets, segments in zip(batch["targets"], batch["targets_segmentation"], strict=True):
      for segment in range(1, segments.max() + 1):
        ids = targets[segments == segment].tolist()
        assert ids.count(tokenizer.eos_id) == 1
        assert ids[-1] == tokenizer.eos_id
        yield tokenizer.decode(ids[:-1]).strip()


def test_what_is_trained_is_the_answers(rows_file, tokenizer):
  dataset = build(rows_file, tokenizer)
  answers = [json.loads(line)["answer"] for line in Path(rows_file).read_text("utf-8").splitlines()]
  assert sorted(trained_texts(dataset, tokenizer)) == sorted(answer.strip() for answer in answers)
  report = dataset.report
  assert (report.rows_read, report.examples, report.truncated, report.bad_rows) == (COUNT, COUNT, 0, {})
  assert report.padding_share < 0.05


def test_packed_and_unpacked_train_the_same_tokens(rows_file, tokenizer):
  counts = []
  for packing in (True, False):
    dataset = build(rows_file, tokenizer, packing=packing)
    trained = sum(int((batch["targets_segmentation"] != 0).sum()) for batch in dataset.iterator())
    assert trained == dataset.report.trained_tokens
    counts.append((trained, dataset.report.tokens))
  assert counts[0] == counts[1]


def test_one_bos_in_each_example_whatever_the_template_and_tokenizer_add(rows_file, tokenizer):
  for batch in build(rows_file, tokenizer).iterator():
    starts = (batch["inputs_position"] == 0) & (batch["inputs_segmentation"] != 0)
    np.testing.assert_array_equal(batch["inputs"] == tokenizer.bos_id, starts)
