from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from maxtext_posttrain.data import StepBudgetedIterator, group_batches
from maxtext_posttrain.errors import DataError


class Counting:
  """An endless source that knows how often it was asked."""

  def __init__(self, total_batches=None):
    self.asked = 0
    self.total_batches = total_batches

  def __iter__(self):
    return self

  def __next__(self):
    if self.total_batches is not None and self.asked == self.total_batches:
      raise StopIteration
    self.asked += 1
    return self.asked - 1


@pytest.mark.parametrize(
  ("steps", "accumulation", "completed", "batches"),
  [
    (5, 1, 0, 5),
    (5, 4, 0, 20),
    (8, 1, 5, 3),
    (8, 4, 5, 12),
    (8, 1, 8, 0),
    (8, 3, 9, 0),
    (0, 2, 0, 0),
    (12, 1, 7, 5),
  ],
)
def test_budget(steps, accumulation, completed, batches):
  source = Counting()
  iterator = StepBudgetedIterator(
    source, steps=steps, gradient_accumulation_steps=accumulation, completed_steps=completed
  )
  assert list(iterator) == list(range(batches))
  assert (source.asked, iterator.pulled, iterator.budget) == (batches, batches, batches)
  with pytest.raises(StopIteration):
    next(iterator)
  assert source.asked == batches
  assert not iterator.exhausted
  assert not iterator.stopped


@pytest.mark.parametrize(
  "changes", [{"steps": -1}, {"steps": 1, "gradient_accumulation_steps": 0}, {"steps": 1, "completed_steps": -1}]
)
def test_impossible_budgets_are_refused(changes):
  with pytest.raises(ValueError, match="steps="):
    StepBudgetedIterator(Counting(), **changes)


def test_skipped_updates_extend_the_budget_also_after_it_was_spent():
  iterator = StepBudgetedIterator(Counting(), steps=2, gradient_accumulation_steps=2)
  assert next(iterator) == 0
  iterator.allow_more(2)
  assert list(iterator) == [1, 2, 3, 4, 5]
  iterator.allow_more(2)
  assert list(iterator) == [6, 7]
  with pytest.raises(ValueError, match="batches=-1"):
    iterator.allow_more(-1)


@pytest.mark.parametrize(("stop_after", "pulled"), [(0, 0), (1, 3), (2, 3), (3, 3), (4, 6), (9, 9)])
def test_stop_ends_at_an_update_boundary(stop_after, pulled):
  source = Counting()
  iterator = StepBudgetedIterator(
    source, steps=3, gradient_accumulation_steps=3, stop=lambda: source.asked >= stop_after
  )
  assert list(iterator) == list(range(pulled))
  assert iterator.stopped == (pulled < 9)
  assert source.asked == pulled


def test_stop_is_final():
  answers = iter([True, False, False])
  iterator = StepBudgetedIterator(Counting(), steps=3, stop=lambda: next(answers))
  assert list(iterator) == []
  iterator.allow_more(1)
  assert list(iterator) == []


def test_a_finite_source_may_end_early():
  iterator = StepBudgetedIterator(Counting(total_batches=3), steps=5)
  assert list(iterator) == [0, 1, 2]
  assert iterator.exhausted
  assert (iterator.pulled, iterator.budget) == (3, 5)


def test_a_finite_source_that_is_enough_is_not_exhausted():
  iterator = StepBudgetedIterator(Counting(total_batches=3), steps=3)
  assert list(iterator) == [0, 1, 2]
  assert not iterator.exhausted


def test_a_source_that_should_not_end_is_an_error_when_it_does():
  iterator = StepBudgetedIterator(iter([0, 1, 2]), steps=5)
  with pytest.raises(DataError, match="the data ended after 3 of the 5 batches"):
    list(iterator)


def test_any_iterator_may_be_declared_finite():
  iterator = StepBudgetedIterator([0, 1], steps=5, finite=True)
  assert list(iterator) == [0, 1]
  assert iterator.exhausted


def test_errors_of_the_source_pass_unchanged():
  error = OSError("the disk is gone")

  def broken():
    yield 0
    raise error

  iterator = StepBudgetedIterator(broken(), steps=5)
  assert next(iterator) == 0
  with pytest.raises(OSError, match="the disk is gone") as caught:
    next(iterator)
  assert caught.value is error
  assert iterator.pulled == 1


def test_waiting_is_measured():
  def slow():
    while True:
      time.sleep(0.02)
      yield 0

  iterator = StepBudgetedIterator(slow(), steps=3)
  for _ in iterator:
    time.sleep(0.05)
  assert 0.06 <= iterator.wait_seconds < 0.14


def batch(value, rows=2, length=3):
  return {
    "inputs": np.full((rows, length), value, np.int32),
    "inputs_segmentation": np.ones((rows, length), np.int32),
    "targets_segmentation": np.ones((rows, length), np.int32),
  }


def test_groups_stack_consecutive_batches():
  groups = list(group_batches([batch(value) for value in range(1, 7)], 3))
  assert [group["inputs"][:, 0, 0].tolist() for group in groups] == [[1, 2, 3], [4, 5, 6]]
  assert groups[0]["inputs"].shape == (3, 2, 3)
  assert groups[0]["inputs"].dtype == np.int32


def test_a_group_the_data_end_in_is_filled_with_padding():
  groups = list(group_batches([batch(value) for value in range(1, 5)], 3))
  assert [group["inputs"][:, 0, 0].tolist() for group in groups] == [[1, 2, 3], [4, 0, 0]]
  assert groups[1]["targets_segmentation"].sum(axis=(1, 2)).tolist() == [6, 0, 0]
  assert groups[1]["inputs_segmentation"].sum(axis=(1, 2)).tolist() == [6, 0, 0]


def test_groups_are_pulled_only_when_asked_for():
  budget = StepBudgetedIterator(
    (batch(value) for value in itertools.count()), steps=3, gradient_accumulation_steps=2, completed_steps=1
  )
  groups = group_batches(budget, 2)
  assert budget.pulled == 0
  next(groups)
  assert budget.pulled == 2
  next(groups)
  with pytest.raises(StopIteration):
    next(groups)
  assert budget.pulled == 4
  budget.allow_more(2)
  assert next(groups)["inputs"][:, 0, 0].tolist() == [4, 5]


def test_groups_of_none_are_refused():
  with pytest.raises(ValueError, match="size=0"):
    group_batches([], 0)
