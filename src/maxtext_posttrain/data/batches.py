"""Rows of packed examples, and synthetic ones, as the arrays that MaxText trains on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from maxtext_posttrain.data.examples import Example, Examples
from maxtext_posttrain.data.packing import PackedRows

Batch = dict[str, np.ndarray]

PADDING_ROW = -1
BATCH_KEYS = (
  "inputs",
  "inputs_position",
  "inputs_segmentation",
  "targets",
  "targets_position",
  "targets_segmentation",
)


class RowSource(Protocol):
  """Sequences that can be assembled by number, in any order."""

  def __len__(self) -> int: ...

  def assemble(self, rows: Sequence[int]) -> Batch:
    """The sequences of `rows` as int32 arrays [len(rows), length]; PADDING_ROW gives one that is all padding."""
    ...

  def fingerprint(self) -> str:
    """A digest of everything that `assemble` returns."""
    ...


def empty_batch(rows: int, length: int, pad_id: int) -> Batch:
  """A batch that is all padding: pad ids, positions 0, segments 0."""
  return {key: np.full((rows, length), pad_id if key in ("inputs", "targets") else 0, np.int32) for key in BATCH_KEYS}


def fill_example(batch: Batch, row: int, start: int, segment: int, example: Example) -> None:
  """Writes an example of n tokens into `row` of a batch [rows, length], n - 1 positions from `start` on."""
  tokens, trained = example
  span = (row, slice(start, start + len(tokens) - 1))
  positions = np.arange(len(tokens) - 1, dtype=np.int32)
  batch["inputs"][span] = tokens[:-1]
  batch["inputs_position"][span] = positions
  batch["inputs_segmentation"][span] = segment
  batch["targets"][span] = tokens[1:]
  batch["targets_position"][span] = positions
  batch["targets_segmentation"][span] = np.where(trained[1:], segment, 0)


class PackedExamples:
  """Examples and the rows they share; a layout says how a row holds them.

  Attributes:
    layout: tells layouts apart in the fingerprint.
  """

  layout = ""

  def __init__(self, examples: Examples, packed: PackedRows, length: int, pad_id: int):
    """Takes the examples, which of them share a row, the positions of a row and the id that fills it."""
    self._examples = examples
    self._packed = packed
    self._length = length
    self._pad_id = pad_id

  def __len__(self) -> int:
    return len(self._packed)

  def fingerprint(self) -> str:
    """A digest of the examples, their rows and the pad id."""
    digest = hashlib.blake2b(self._examples.fingerprint().encode(), digest_size=16)
    digest.update(self._packed.examples.data)
    digest.update(self._packed.offsets.data)
    digest.update(f"{self.layout}{self._length} {self._pad_id}".encode())
    return digest.hexdigest()


class ExampleRows(PackedExamples):
  """Tokenised examples in packed (or single) rows.

  An example of n tokens takes n - 1 positions: it reads tokens 0 to n-2 and predicts tokens 1 to n-1. Examples of a
  row are numbered from 1 in `inputs_segmentation`, positions restart at 0 with each, and `targets_segmentation` has
  the same number where the predicted token is trained and 0 elsewhere. What is trained goes by position, never by
  token id.
  """

  def assemble(self, rows: Sequence[int]) -> Batch:
    """The sequences of `rows`, int32 [len(rows), length] under each of BATCH_KEYS."""
    batch = empty_batch(len(rows), self._length, self._pad_id)
    for place, row in enumerate(rows):
      if row != PADDING_ROW:
        self._fill(batch, place, self._packed[row])
    return batch

  def _fill(self, batch: Batch, place: int, members: npt.NDArray[np.int32]) -> None:
    start = 0
    for segment, member in enumerate(members.tolist(), start=1):
      example = self._examples[member]
      fill_example(batch, place, start, segment, example)
      start += len(example.tokens) - 1


class SyntheticRows:
  """Seeded random tokens, all of them trained; the same row number always gives the same tokens."""

  def __init__(self, count: int, length: int, vocab_size: int, seed: int):
    """Takes the number of rows, their positions, the ids' upper bound and the seed."""
    self._count = count
    self._length = length
    self._vocab_size = vocab_size
    self._seed = seed

  def __len__(self) -> int:
    return self._count

  def assemble(self, rows: Sequence[int]) -> Batch:
    """The sequences of `rows`, int32 [len(rows), length] under each of BATCH_KEYS."""
    batch = empty_batch(len(rows), self._length, pad_id=0)
    positions = np.arange(self._length, dtype=np.int32)
    for place, row in enumerate(rows):
      if row == PADDING_ROW:
        continue
      tokens = np.random.default_rng([self._seed, row]).integers(self._vocab_size, size=self._length + 1)
      batch["inputs"][place] = tokens[:-1]
      batch["targets"][place] = tokens[1:]
      batch["inputs_position"][place] = batch["targets_position"][place] = positions
      batch["inputs_segmentation"][place] = batch["targets_segmentation"][place] = 1
    return batch

  def fingerprint(self) -> str:
    """A digest of what the tokens are drawn from."""
    return f"synthetic-{self._count}-{self._length}-{self._vocab_size}-{self._seed}"
