"""Rows of preference pairs with what a reference model makes of them beside each, computed once before training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from maxtext_posttrain.data.batches import PADDING_ROW, Batch, RowSource

REFERENCE_KEY = "reference_log_probs"


class ReferenceRows:
  """Another source's rows with REFERENCE_KEY, float32 [rows, 2, pairs], in each batch: sums of log-probabilities.

  Attributes:
    source: the rows without it.
    pairs: most pairs of a row.
  """

  def __init__(self, source: RowSource, pairs: int):
    """Takes the rows; `fill` brings the sums, before the first batch is asked for."""
    self.source = source
    self.pairs = pairs
    self._sums: npt.NDArray[np.float32] | None = None

  def __len__(self) -> int:
    return len(self.source)

  def fill(self, sums: npt.NDArray[np.float32]) -> None:
    """Takes the sums of all rows, float32 [len(self), 2, pairs].

    Raises:
      ValueError: they are of other rows.
    """
    if sums.shape != (len(self), 2, self.pairs) or sums.dtype != np.float32:
      raise ValueError(f"{sums.dtype} {sums.shape} for {len(self)} rows of {self.pairs} pairs")
    self._sums = sums

  def assemble(self, rows: Sequence[int]) -> Batch:
    """The source's arrays of `rows`, and their sums; 0 in padding rows."""
    if self._sums is None:
      raise ValueError("the reference's log-probabilities are not there yet")
    batch = self.source.assemble(rows)
    places = np.asarray(rows)
    sums = self._sums[np.maximum(places, 0)]
    sums[places == PADDING_ROW] = 0.0
    return batch | {REFERENCE_KEY: sums}

  def fingerprint(self) -> str:
    """A digest of the rows; the sums follow from them and from the run's start."""
    return f"{self.source.fingerprint()} with reference"
