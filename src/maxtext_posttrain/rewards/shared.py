"""One process's rewards for all processes of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from maxtext_posttrain import hosts
from maxtext_posttrain.rewards.pool import RewardPool, Scores, weighed
from maxtext_posttrain.rewards.sample import RewardSample


class Rewards(Protocol):
  """What scores completions; see `RewardPool`."""

  def score(self, groups: Sequence[Sequence[RewardSample]]) -> Scores:
    """Scores the completions of each prompt by every function."""
    ...

  def close(self) -> None:
    """Ends whatever works for it."""
    ...


class SharedRewards:
  """The first process calls the functions, and every process has its scores, bit for bit.

  A function may draw, ask a server or be cut off by the clock: called everywhere, it could make another advantage of
  the same completion in each process.
  """

  def __init__(self, weights: Mapping[str, float], start: Callable[[], RewardPool]):
    """Starts the pool in the first process.

    Args:
      weights: of the functions.
      start: makes the pool.

    Raises:
      RewardError: see `RewardPool`.
    """
    self._weights = dict(weights)
    self._pool = start() if hosts.is_first() else None

  def score(self, groups: Sequence[Sequence[RewardSample]]) -> Scores:
    """See `RewardPool.score`; every process must ask, with the same completions."""
    names = list(self._weights)
    count = sum(map(len, groups))
    own = None if self._pool is None else self._pool.score(groups)
    scores = np.zeros((len(names), count)) if own is None else np.stack([own.by_function[name] for name in names])
    failures = np.array([0 if own is None else own.failures[name] for name in names], np.int32)
    # As words: what crosses has 32 bits.
    words, failures = hosts.from_first((scores.view(np.uint32), failures))
    scores = np.ascontiguousarray(words, np.uint32).view(np.float64)
    by_function = dict(zip(names, scores, strict=True))
    return Scores(
      by_function,
      weighed(by_function, self._weights),
      {name: int(failed) for name, failed in zip(names, failures, strict=True)},
      dict.fromkeys(names, "") if own is None else own.first_errors,
      0.0 if own is None else own.seconds,
    )

  def close(self) -> None:
    """Ends the first process's pool."""
    if self._pool is not None:
      self._pool.close()
