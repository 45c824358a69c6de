from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtext_posttrain.data.packing import one_per_row, pack


def members(packed):
  return [row.tolist() for row in packed]


def test_best_fit_decreasing_by_hand():
  # 6 and 5 open rows with 4 and 5 left; 5 (the second) fits the row with 5 exactly; 4 fits the row with 4 exactly;
  # 3 opens a row and 2 joins it.
  assert members(pack([5, 3, 6, 5, 2, 4], 10)) == [[0, 3], [1, 4], [2, 5]]


def test_the_tightest_row_that_fits_is_taken():
  # 3 fits the room of 3 beside the 7 and the room of 5 beside the 5.
  assert members(pack([7, 5, 3], 10)) == [[0, 2], [1]]


def test_a_full_row_takes_no_more():
  assert members(pack([10, 10, 1], 10)) == [[0], [1], [2]]


def test_at_most_max_segments_share_a_row():
  assert members(pack([1] * 5, 10, max_segments=2)) == [[0, 1], [2, 3], [4]]
  assert members(pack([1] * 5, 10)) == [[0, 1, 2, 3, 4]]


def test_no_examples_give_no_rows():
  assert len(pack([], 8)) == 0


@pytest.mark.parametrize("lengths", [[0, 3], [9], [-1]])
def test_lengths_that_fit_no_row_are_refused(lengths):
  with pytest.raises(ValueError, match="between 1 and 8"):
    pack(lengths, 8)


def test_without_packing_each_example_has_its_row():
  assert members(one_per_row(3)) == [[0], [1], [2]]


@given(
  capacity=st.integers(1, 130),
  data=st.data(),
  max_segments=st.one_of(st.none(), st.integers(1, 5)),
)
@settings(max_examples=200, deadline=None)
def test_no_example_is_lost_no_row_overflows_and_the_result_is_the_same_again(capacity, data, max_segments):
  lengths = data.draw(st.lists(st.integers(1, capacity), max_size=80))
  packed = pack(lengths, capacity, max_segments)
  rows = members(packed)
  assert sorted(example for row in rows for example in row) == list(range(len(lengths)))
  assert all(sum(lengths[example] for example in row) <= capacity for row in rows)
  assert all(row == sorted(row) and row for row in rows)
  assert [row[0] for row in rows] == sorted(row[0] for row in rows)
  if max_segments is not None:
    assert all(len(row) <= max_segments for row in rows)
  else:
    # Best fit leaves no two rows that would fit into one.
    fill = sorted(sum(lengths[example] for example in row) for row in rows)
    assert len(fill) < 2 or fill[0] + fill[1] > capacity
  again = pack(np.array(lengths, np.int64), capacity, max_segments)
  assert members(again) == rows


def test_utilisation_of_many_lengths():
  lengths = np.random.default_rng(0).integers(1, 400, 5000)
  packed = pack(lengths, 1024)
  assert lengths.sum() / (len(packed) * 1024) > 0.99
