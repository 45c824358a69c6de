"""Reads a checkpoint's arrays to the host a few at a time, whatever devices wrote them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from orbax.checkpoint import v1 as ocp

from maxtext_posttrain.checkpointing.metadata import (
  DamagedCheckpointError,
  KeyPath,
  StoredArray,
  StoredCheckpoint,
  reason,
)

GROUP_BYTES = 1 << 26
"""Arrays are read together up to this size, since each read looks up the tree once more."""


def read_arrays(stored: StoredCheckpoint, item: str, paths: Iterable[KeyPath]) -> dict[KeyPath, np.ndarray]:
  """Reads some of an item's arrays to the host.

  Raises:
    DamagedCheckpointError: their files are missing or broken.
  """
  wanted = set(paths)
  if not wanted:
    return {}
  request = _request(stored.trees[item], wanted)
  context = ocp.Context()
  context.pytree.loading.partial_load = True
  try:
    with context:
      tree = ocp.load_checkpointables(stored.root, {item: request})[item]
  except Exception as error:  # Orbax and TensorStore raise many types for a broken file; all of them mean this one.
    raise DamagedCheckpointError(f"checkpoint {stored.root} is damaged: {reason(error)}") from error
  return {path: np.asarray(_at(tree, path)) for path in wanted}


def groups(arrays: Mapping[KeyPath, StoredArray], limit: int = GROUP_BYTES) -> Iterator[list[KeyPath]]:
  """The paths in order, in groups that hold at most `limit` bytes, or one array."""
  group: list[KeyPath] = []
  size = 0
  for path, array in arrays.items():
    nbytes = array_bytes(array)
    if group and size + nbytes > limit:
      yield group
      group, size = [], 0
    group.append(path)
    size += nbytes
  if group:
    yield group


def array_bytes(array: StoredArray) -> int:
  """Its size in memory."""
  return math.prod(array.shape) * array.dtype.itemsize


def read_counts(stored: StoredCheckpoint, item: str) -> dict[KeyPath, int]:
  """The values of the item's integer scalars in `step` and `opt_state`: steps and counts.

  Raises:
    DamagedCheckpointError: see `read_arrays`.
  """
  scalars = [
    path
    for path, array in stored.arrays(item).items()
    if path[0] in ("step", "opt_state") and array.shape == () and np.issubdtype(array.dtype, np.integer)
  ]
  return {path: int(value) for path, value in read_arrays(stored, item, scalars).items()}


def _request(tree: Any, wanted: set[KeyPath], path: KeyPath = ()) -> Any:
  """The stored tree with an abstract host array at each wanted leaf; lists keep their length."""
  if isinstance(tree, Mapping):
    children = {key: _request(child, wanted, (*path, key)) for key, child in tree.items()}
    return {key: child for key, child in children.items() if child is not None} or None
  if isinstance(tree, (list, tuple)):
    children = [_request(child, wanted, (*path, index)) for index, child in enumerate(tree)]
    return children if any(child is not None for child in children) else None
  if path in wanted and isinstance(tree, StoredArray):
    # A host array that is never touched: only its shape and type are looked at.
    return np.broadcast_to(np.zeros((), tree.dtype), tree.shape)
  return None


def _at(tree: Any, path: KeyPath) -> Any:
  for key in path:
    tree = tree[key]
  return tree
