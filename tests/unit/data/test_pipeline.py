from __future__ import annotations

import itertools
import json
import logging
import threading

import numpy as np
import pytest
from data_fakes import ASSISTANT, BOS, END, USER, CharTokenizer, make_config, question_rows, write_jsonl

from maxtext_posttrain.data import BATCH_KEYS, StepBudgetedIterator, prepare_eval_rows, prepare_train_rows
from maxtext_posttrain.errors import DataError


@pytest.fixture
def rows_file(tmp_path):
  return write_jsonl(tmp_path / "rows.jsonl", question_rows(23))


def build(path, tokenizer=None, *, batch_size=2, mine=None, **changes):
  rows = prepare_train_rows(make_config(hf_train_files=str(path), **changes), tokenizer or CharTokenizer())
  return rows.dataset(batch_size=batch_size, mine=mine)


def take(iterator, count=None):
  batches = list(itertools.islice(iterator, count))
  iterator.close()
  return batches


def assert_same(actual, expected):
  assert len(actual) == len(expected)
  for ours, theirs in zip(actual, expected, strict=True):
    for key in BATCH_KEYS:
      np.testing.assert_array_equal(ours[key], theirs[key])


def trained_texts(batches):
  """What each example of the batches trains, as text without the end token, in the order it comes."""
  texts = []
  for batch in batches:
    for targets, segments in zip(batch["targets"], batch["targets_segmentation"], strict=True):
      for segment in range(1, segments.max() + 1):
        texts.append("".join(map(chr, targets[segments == segment][:-1])))
  return texts


TWO_ROWS = [{"question": "a", "answer": "b"}, {"question": "c", "answer": "de"}]
# Tokens: BOS USER a END ASSISTANT b END (7, so 6 positions) and BOS USER c END ASSISTANT d e END (8, so 7).
A, B, C, D, E = (ord(letter) for letter in "abcde")
PAD = 9


def test_the_unpacked_layout_by_hand(tmp_path):
  path = write_jsonl(tmp_path / "rows.jsonl", TWO_ROWS)
  (batch,) = take(build(path, CharTokenizer(pad_id=PAD), max_target_length=8).iterator())
  assert batch["inputs"].tolist() == [
    [BOS, USER, A, END, ASSISTANT, B, PAD, PAD],
    [BOS, USER, C, END, ASSISTANT, D, E, PAD],
  ]
  assert batch["targets"].tolist() == [
    [USER, A, END, ASSISTANT, B, END, PAD, PAD],
    [USER, C, END, ASSISTANT, D, E, END, PAD],
  ]
  assert batch["inputs_position"].tolist() == [[0, 1, 2, 3, 4, 5, 0, 0], [0, 1, 2, 3, 4, 5, 6, 0]]
  assert batch["targets_position"].tolist() == batch["inputs_position"].tolist()
  assert batch["inputs_segmentation"].tolist() == [[1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1, 0]]
  assert batch["targets_segmentation"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1, 0]]
  assert tuple(batch) == BATCH_KEYS
  assert {values.dtype for values in batch.values()} == {np.dtype(np.int32)}


def test_the_packed_layout_by_hand(tmp_path):
  path = write_jsonl(tmp_path / "rows.jsonl", TWO_ROWS)
  dataset = build(path, CharTokenizer(pad_id=PAD), max_target_length=15, packing=True, batch_size=1)
  (batch,) = take(dataset.iterator())
  assert batch["inputs"].tolist() == [[BOS, USER, A, END, ASSISTANT, B, BOS, USER, C, END, ASSISTANT, D, E, PAD, PAD]]
  assert batch["targets"].tolist() == [[USER, A, END, ASSISTANT, B, END, USER, C, END, ASSISTANT, D, E, END, PAD, PAD]]
  assert batch["inputs_position"].tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6, 0, 0]]
  assert batch["inputs_segmentation"].tolist() == [[1] * 6 + [2] * 7 + [0] * 2]
  assert batch["targets_segmentation"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 2, 2, 2, 0, 0]]
  assert dataset.report.padding_share == pytest.approx(2 / 15)
  assert (dataset.rows, dataset.report.rows) == (1, 1)


def test_a_row_may_be_filled_to_its_last_position(tmp_path):
  path = write_jsonl(tmp_path / "rows.jsonl", TWO_ROWS)
  dataset = build(path, max_target_length=13, packing=True, batch_size=1)
  assert dataset.rows == 1
  assert dataset.report.padding_share == 0


@pytest.mark.parametrize("packing", [False, True])
def test_a_pad_id_equal_to_the_end_token_masks_no_end_token(tmp_path, packing):
  path = write_jsonl(tmp_path / "rows.jsonl", TWO_ROWS)
  (batch,) = take(build(path, CharTokenizer(pad_id=END), max_target_length=16, packing=packing).iterator())
  trained = batch["targets"][batch["targets_segmentation"] != 0].tolist()
  assert trained == [B, END, D, E, END]
  assert (batch["inputs"][batch["inputs_segmentation"] == 0] == END).all()
  assert (batch["targets_segmentation"][batch["inputs_segmentation"] == 0] == 0).all()


def test_packing_changes_no_example(rows_file):
  def examples(packing):
    found = []
    for batch in take(build(rows_file, max_target_length=32, packing=packing).iterator()):
      for place, segments in enumerate(batch["inputs_segmentation"]):
        for segment in range(1, segments.max() + 1):
          here = segments == segment
          trained = batch["targets_segmentation"][place][here]
          assert set(trained.tolist()) <= {0, segment}
          values = [batch[key][place][here].tolist() for key in ("inputs", "targets", "inputs_position")]
          found.append((*map(tuple, values), tuple(trained != 0)))
    return sorted(found)

  unpacked = examples(packing=False)
  assert len(unpacked) == 23
  assert examples(packing=True) == unpacked


def test_max_segments_per_seq(rows_file):
  batches = take(build(rows_file, max_target_length=64, packing=True, max_segments_per_seq=2).iterator())
  assert max(batch["inputs_segmentation"].max() for batch in batches) == 2


def test_an_epoch_trains_each_row_once_and_fills_the_last_batch_with_padding(rows_file):
  dataset = build(rows_file, batch_size=4, num_epoch=2, enable_data_shuffling=True)
  batches = take(dataset.iterator())
  assert (dataset.rows, dataset.batches_per_epoch, dataset.total_batches, len(batches)) == (23, 6, 12, 12)
  assert all(values.shape == (4, 12) for batch in batches for values in batch.values())
  expected = sorted(row["answer"] for row in question_rows(23))
  texts = trained_texts(batches)
  assert sorted(texts[:23]) == expected
  assert sorted(texts[23:]) == expected
  assert (batches[-1]["inputs_segmentation"][-2:] == 0).all()
  assert (batches[-1]["inputs"][-2:] == 0).all()
  assert (batches[-1]["inputs_segmentation"][:-2, 0] == 1).all()


def test_rows_repeat_without_end_when_num_epoch_is_not_given(rows_file):
  dataset = build(rows_file, batch_size=5, num_epoch=None)
  assert dataset.total_batches is None
  texts = trained_texts(take(dataset.iterator(), 23))
  assert texts == [row["answer"] for row in question_rows(23)] * 5


def test_each_epoch_has_an_order_of_its_own_and_a_seed_gives_the_same_again(rows_file):
  def orders(seed):
    dataset = build(rows_file, batch_size=23, num_epoch=3, enable_data_shuffling=True, data_shuffle_seed=seed)
    return [batch["inputs"].tolist() for batch in take(dataset.iterator())]

  first = orders(7)
  assert first == orders(7)
  assert first[0] != first[1] != first[2] != first[0]
  assert orders(8)[0] != first[0]
  assert orders(8)[0] != first[1]
  unshuffled = take(build(rows_file, batch_size=23).iterator())[0]["inputs"].tolist()
  assert unshuffled not in first
  assert sorted(first[0]) == sorted(first[1]) == sorted(unshuffled)


@pytest.mark.parametrize("packing", [False, True])
def test_restored_at_any_position_of_three_epochs_it_goes_on_as_if_uninterrupted(rows_file, packing):
  dataset = build(rows_file, batch_size=2, num_epoch=3, enable_data_shuffling=True, packing=packing)
  whole = take(dataset.iterator())
  assert len(whole) == dataset.total_batches
  running = dataset.iterator()
  states = [running.get_state()]
  for _ in whole:
    next(running)
    states.append(json.loads(json.dumps(running.get_state())))
  running.close()
  for position, state in enumerate(states):
    resumed = dataset.iterator()
    resumed.set_state(state)
    assert resumed.position == position
    assert_same(take(resumed), whole[position:])


def test_restored_in_a_data_set_built_anew_and_after_going_ahead(rows_file):
  def built():
    return build(rows_file, batch_size=3, num_epoch=None, enable_data_shuffling=True)

  whole = take(built().iterator(), 30)
  first = built().iterator()
  take_seven = [next(first) for _ in range(7)]
  state = first.get_state()
  first.close()
  second = built().iterator()
  for _ in range(12):
    next(second)
  second.set_state(state)
  assert_same(take_seven + take(second, 23), whole)


def test_going_far_ahead_costs_nothing(rows_file):
  iterator = build(rows_file, num_epoch=None, enable_data_shuffling=True).iterator()
  iterator.set_state(iterator.get_state() | {"position": 10**12})
  assert next(iterator)["inputs"].shape == (2, 12)
  assert iterator.position == 10**12 + 1
  iterator.close()


@pytest.mark.parametrize("num_epoch", [2, None])
@pytest.mark.parametrize("shares", [[range(4), range(4, 8)], [[0, 1, 4, 5], [2, 3], [6, 7]]])
def test_processes_share_each_batch_without_overlap(rows_file, shares, num_epoch):
  options = {"num_epoch": num_epoch, "enable_data_shuffling": True}
  alone = take(build(rows_file, batch_size=8, **options).iterator(), 20)
  parts = [take(build(rows_file, batch_size=8, mine=share, **options).iterator(), 20) for share in shares]
  order = np.argsort(np.concatenate(shares))
  together = [
    {key: np.concatenate([batch[key] for batch in batches])[order] for key in BATCH_KEYS}
    for batches in zip(*parts, strict=True)
  ]
  assert {len(part) for part in parts} == {len(alone)}
  assert_same(together, alone)


def test_a_position_can_be_restored_with_another_number_of_processes(rows_file):
  options = {"num_epoch": 2, "enable_data_shuffling": True}
  alone = build(rows_file, batch_size=4, **options).iterator()
  for _ in range(3):
    next(alone)
  half = build(rows_file, batch_size=4, mine=(2, 3), **options).iterator()
  half.set_state(alone.get_state())
  np.testing.assert_array_equal(next(half)["inputs"], next(alone)["inputs"][2:])


@pytest.mark.parametrize(
  ("changes", "named"),
  [
    ({"max_target_length": 13}, "max_target_length was 12, is 13"),
    ({"packing": True}, "packing was False, is True"),
    ({"sft_train_on_completion_only": False}, "sft_train_on_completion_only was True, is False"),
    ({"batch_size": 3}, "global batch size was 2, is 3"),
    ({"data_shuffle_seed": 5}, "data_shuffle_seed was 0, is 5"),
    ({"enable_data_shuffling": False}, "data_shuffle_seed was 0, is None"),
    ({"tokenizer": CharTokenizer(fingerprint="other")}, "tokenizer was chars, is other"),
    ({"tokenizer": CharTokenizer(pad_id=5)}, "data was "),
  ],
)
def test_a_position_in_other_data_or_options_is_refused(rows_file, changes, named):
  state = build(rows_file, enable_data_shuffling=True).iterator().get_state()
  changed = build(rows_file, **({"enable_data_shuffling": True} | changes)).iterator()
  with pytest.raises(DataError, match=named):
    changed.set_state(state)


def test_a_position_in_other_rows_is_refused(rows_file, tmp_path):
  state = build(rows_file).iterator().get_state()
  other = write_jsonl(tmp_path / "other.jsonl", [*question_rows(22), {"question": "q", "answer": "z"}])
  with pytest.raises(DataError, match="data was "):
    build(other).iterator().set_state(state)


@pytest.mark.parametrize("state", [{}, {"next_index": 3}, {"version": 99, "position": 1, "identity": {}}])
def test_a_foreign_state_is_refused(rows_file, state):
  with pytest.raises(DataError, match="not written by this version"):
    build(rows_file).iterator().set_state(state)


def test_more_or_fewer_epochs_may_be_asked_for_when_resuming(rows_file, caplog):
  one, two = (build(rows_file, batch_size=4, num_epoch=count) for count in (1, 2))
  iterator = one.iterator()
  take(iterator, 4)
  longer = two.iterator()
  longer.set_state(iterator.get_state())
  assert_same(take(longer), take(two.iterator())[4:])
  assert not caplog.records

  at_end = one.iterator()
  list(at_end)
  with caplog.at_level(logging.WARNING):
    longer = two.iterator()
    longer.set_state(at_end.get_state())
  assert "the first 1 rows of the next epoch are left out" in caplog.text
  assert len(take(longer)) == 12 - 6

  list(longer := two.iterator())
  shorter = one.iterator()
  shorter.set_state(longer.get_state())
  assert take(shorter) == []


def test_prefetched_batches_do_not_count_and_a_closed_iterator_leaves_no_thread(rows_file):
  before = set(threading.enumerate())
  iterator = build(rows_file).iterator()
  next(iterator)
  started = set(threading.enumerate()) - before
  assert started
  assert iterator.position == 1
  iterator.close()
  iterator.close()
  with pytest.raises(StopIteration):
    next(iterator)
  for thread in started:
    thread.join(timeout=5)
    assert not thread.is_alive()


def test_iterators_of_one_data_set_are_independent(rows_file):
  dataset = build(rows_file)
  first, second = dataset.iterator(), dataset.iterator()
  next(first)
  np.testing.assert_array_equal(next(second)["inputs"], take(dataset.iterator(), 1)[0]["inputs"])


def test_budget_over_a_finite_and_an_endless_data_set(rows_file):
  finite = StepBudgetedIterator(build(rows_file, num_epoch=1).iterator(), steps=50)
  assert len(list(finite)) == 12
  assert finite.exhausted
  endless = StepBudgetedIterator(build(rows_file, num_epoch=None).iterator(), steps=50)
  assert len(list(endless)) == 50
  assert not endless.exhausted


def test_grain_reads_the_same_files(rows_file):
  config = make_config(dataset_type="grain", grain_train_files=rows_file)
  dataset = prepare_train_rows(config, CharTokenizer()).dataset(batch_size=2)
  assert_same(take(dataset.iterator()), take(build(rows_file).iterator()))


def test_evaluation_is_one_pass_in_order_or_none(rows_file):
  config = make_config(hf_eval_files=rows_file, num_epoch=None, enable_data_shuffling=True, packing=True)
  rows = prepare_eval_rows(config, CharTokenizer())
  assert rows is not None
  dataset = rows.dataset(batch_size=5)
  assert dataset.total_batches == dataset.batches_per_epoch
  assert sorted(trained_texts(take(dataset.iterator()))) == sorted(row["answer"] for row in question_rows(23))
  assert prepare_eval_rows(make_config(), CharTokenizer()) is None
  assert prepare_eval_rows(make_config(dataset_type="synthetic"), None) is None


def test_synthetic_data():
  config = make_config(dataset_type="synthetic", num_epoch=1, enable_data_shuffling=True, packing=True)
  dataset = prepare_train_rows(config, None).dataset(batch_size=2)
  assert dataset.total_batches is None
  iterator = dataset.iterator()
  batches = [next(iterator) for _ in range(3)]
  state = iterator.get_state()
  following = take(iterator, 2)
  resumed = dataset.iterator()
  resumed.set_state(state)
  assert_same(take(resumed, 2), following)
  batch = batches[0]
  assert all(values.shape == (2, 12) and values.dtype == np.int32 for values in batch.values())
  assert (batch["inputs"][:, 1:] == batch["targets"][:, :-1]).all()
  assert (batch["targets_segmentation"] == 1).all()
  assert batch["inputs_position"].tolist() == [list(range(12))] * 2
  seen = np.concatenate([batch["inputs"] for batch in batches])
  assert len(np.unique(seen, axis=0)) == 6
  assert 0 <= seen.min() <= seen.max() < 128
  config.data_shuffle_seed = 1
  other = take(prepare_train_rows(config, None).dataset(batch_size=2).iterator(), 1)[0]
  assert not (other["inputs"] == batch["inputs"]).all()


def test_the_first_examples_are_kept_as_text(rows_file):
  rows = prepare_train_rows(make_config(hf_train_files=str(rows_file)), CharTokenizer())
  trained = ["".join(span.text for span in sample.spans if span.trained) for sample in rows.samples]
  assert trained == [row["answer"] + chr(END) for row in question_rows(3)]
  assert rows.dataset(batch_size=1).samples is rows.samples


def test_real_data_need_a_tokenizer(rows_file):
  with pytest.raises(ValueError, match="needs a tokenizer"):
    prepare_train_rows(make_config(hf_train_files=rows_file), None)


def test_a_pad_id_outside_the_vocabulary_is_refused(rows_file):
  with pytest.raises(DataError, match="pad id -1 does not exist"):
    build(rows_file, CharTokenizer(pad_id=-1))


@pytest.mark.parametrize("changes", [{"batch_size": 0}, {"mine": [2]}])
def test_impossible_sharding_is_refused(rows_file, changes):
  with pytest.raises(ValueError, match="batch_size="):
    build(rows_file, **changes)
