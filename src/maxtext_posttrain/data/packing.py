"""Which examples share a sequence: a pure function of their lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class PackedRows:
  """Groups of examples, one group a sequence.

  Attributes:
    examples: int32 [n], each example's index once, row after row.
    offsets: int64 [rows + 1], where each row starts in `examples`.
  """

  examples: npt.NDArray[np.int32]
  offsets: npt.NDArray[np.int64]

  def __len__(self) -> int:
    return len(self.offsets) - 1

  def __getitem__(self, row: int) -> npt.NDArray[np.int32]:
    """The examples of one row, in file order."""
    return self.examples[self.offsets[row] : self.offsets[row + 1]]

  def __iter__(self) -> Iterator[npt.NDArray[np.int32]]:
    return (self[row] for row in range(len(self)))


def one_per_row(count: int) -> PackedRows:
  """The arrangement without packing: example i alone in row i."""
  return PackedRows(np.arange(count, dtype=np.int32), np.arange(count + 1, dtype=np.int64))


def pack(lengths: npt.ArrayLike, capacity: int, max_segments: int | None = None) -> PackedRows:
  """Packs whole examples into as few rows as best-fit decreasing finds.

  Examples are placed from the longest to the shortest (equal lengths in order), each into the row that it leaves
  the least room in. A row's examples are then put in ascending order, and rows in the order of their first example.
  The result depends on the arguments alone. The cost is about n * capacity / 64 word operations.

  Args:
    lengths: int [n], positions each example takes; 1 to `capacity`.
    capacity: positions of a row.
    max_segments: most examples of a row, or None.

  Raises:
    ValueError: for a length outside 1 to `capacity`.
  """
  sizes = np.asarray(lengths, dtype=np.int64)
  if sizes.size and (sizes.min() < 1 or sizes.max() > capacity):
    raise ValueError(f"lengths must lie between 1 and {capacity}, found {sizes.min()} to {sizes.max()}")
  limit = max_segments or capacity
  rows: list[list[int]] = []
  # with_room[r]: rows with r free positions. open_rooms has bit r set where that list isn't empty, so that the
  # smallest room that fits is the lowest bit at or above the length.
  with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
  open_rooms = 0
  for example in np.argsort(-sizes, kind="stable").tolist():
    size = int(sizes[example])
    fitting = open_rooms >> size
    if fitting:
      room = size + (fitting & -fitting).bit_length() - 1
      row = with_room[room].pop()
      if not with_room[room]:
        open_rooms ^= 1 << room
      rows[row].append(example)
    else:
      room, row = capacity, len(rows)
      rows.append([example])
    left = room - size
    if left and len(rows[row]) < limit:
      with_room[left].append(row)
      open_rooms |= 1 << left
  for members in rows:
    members.sort()
  rows.sort()
  offsets = np.zeros(len(rows) + 1, np.int64)
  np.cumsum([len(members) for members in rows], out=offsets[1:])
  return PackedRows(np.array([example for members in rows for example in members], np.int32), offsets)
