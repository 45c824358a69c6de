"""Iterators that end when the steps asked for are done, for every trainer and any source of batches."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from maxtext_posttrain.data.batches import Batch
from maxtext_posttrain.errors import DataError


class StepBudgetedIterator[T](Iterator[T]):
  """Yields the batches that are left of a run, and pulls none beyond them.

  The budget is `(steps - completed_steps) * gradient_accumulation_steps` batches. Once it is spent StopIteration is
  raised before the source is asked. Exceptions of the source pass unchanged.

  Attributes:
    budget: batches that may be pulled in all.
    pulled: batches pulled so far.
    wait_seconds: time spent waiting for the source.
    exhausted: the source ended, as it is meant to, before the budget was spent.
    stopped: `stop` ended the iteration.
  """

  def __init__(
    self,
    source: Iterable[T],
    *,
    steps: int,
    gradient_accumulation_steps: int = 1,
    completed_steps: int = 0,
    stop: Callable[[], bool] | None = None,
    finite: bool | None = None,
  ):
    """Sets the budget.

    Args:
      source: batches, micro-batches where gradients are accumulated.
      steps: optimizer updates of the whole run.
      gradient_accumulation_steps: batches of one update.
      completed_steps: updates a resumed run has behind it.
      stop: asked before each update; True ends the iteration there.
      finite: whether the source may end before the budget is spent. None asks the source: it may where it has a
        `total_batches` that isn't None.
    """
    if gradient_accumulation_steps < 1 or steps < 0 or completed_steps < 0:
      raise ValueError(f"{steps=}, {gradient_accumulation_steps=}, {completed_steps=}")
    self.budget = max(0, steps - completed_steps) * gradient_accumulation_steps
    self.pulled = 0
    self.wait_seconds = 0.0
    self.exhausted = False
    self.stopped = False
    self._source = iter(source)
    self._per_update = gradient_accumulation_steps
    self._stop = stop
    self._finite = getattr(source, "total_batches", None) is not None if finite is None else finite

  def allow_more(self, batches: int) -> None:
    """Extends the budget by batches that must be replaced, for example those of an update that was skipped."""
    if batches < 0:
      raise ValueError(f"{batches=}")
    self.budget += batches

  def __next__(self) -> T:
    if self.exhausted or self.stopped or self.pulled >= self.budget:
      raise StopIteration
    if self._stop is not None and self.pulled % self._per_update == 0 and self._stop():
      self.stopped = True
      raise StopIteration
    started = time.perf_counter()
    try:
      batch = next(self._source)
    except StopIteration:
      if not self._finite:
        raise DataError(f"the data ended after {self.pulled} of the {self.budget} batches this run needs") from None
      self.exhausted = True
      raise
    finally:
      self.wait_seconds += time.perf_counter() - started
    self.pulled += 1
    return batch


def group_batches(source: Iterable[Batch], size: int) -> Iterator[Batch]:
  """Stacks `size` consecutive micro-batches of [batch, sequence] into one of [size, batch, sequence].

  Micro-batches are pulled only when a group is asked for. Where the source ends inside a group, the rest of it is
  filled with zeros, which are padding under segment 0, so that no micro-batch is lost.
  """
  if size < 1:
    raise ValueError(f"{size=}")
  return _GroupedBatches(iter(source), size)


class _GroupedBatches(Iterator[Batch]):
  """An iterator rather than a generator: it goes on when a budget that was spent is extended."""

  def __init__(self, source: Iterator[Batch], size: int):
    self._source = source
    self._size = size

  def __next__(self) -> Batch:
    group = list(itertools.islice(self._source, self._size))
    if not group:
      raise StopIteration
    padding = {key: np.zeros_like(values) for key, values in group[0].items()}
    group.extend([padding] * (self._size - len(group)))
    return {key: np.stack([batch[key] for batch in group]) for key in padding}
