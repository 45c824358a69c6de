"""Compares two checkpoints leaf by leaf; no more than a few arrays of each are in memory at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from maxtext_posttrain.checkpointing import streaming
from maxtext_posttrain.checkpointing.metadata import KeyPath, StoredArray, StoredCheckpoint, flatten_tree
from maxtext_posttrain.errors import CheckpointError

Kind = Literal["only in A", "only in B", "container", "shape", "dtype", "values"]

_CHUNK = 1 << 20
"""Elements that are compared at a time, in double precision."""


@dataclasses.dataclass(frozen=True)
class ArrayDifference:
  """How far two arrays of one shape are apart.

  Attributes:
    count: elements that differ by more than the tolerance.
    max_abs: largest `|a - b|`; infinite where only one is a NaN or the two are not both finite.
    max_rel: largest `|a - b| / max(|a|, |b|)`.
  """

  count: int
  max_abs: float
  max_rel: float


@dataclasses.dataclass(frozen=True)
class LeafDifference:
  """A leaf in which two checkpoints differ.

  Attributes:
    path: the item and the path in it.
    kind: in what; a leaf of another dtype is compared by value too.
    detail: both sides in words.
    size: its elements.
    values: how far apart, where that can be said.
  """

  path: str
  kind: Kind
  detail: str
  size: int = 0
  values: ArrayDifference | None = None


@dataclasses.dataclass(frozen=True)
class Comparison:
  """What a comparison found.

  Attributes:
    leaves: paths that were compared, those on one side only included.
    differences: structure first, then values by how far apart they are, the farthest first.
  """

  leaves: int
  differences: tuple[LeafDifference, ...]


def compare_arrays(a: np.ndarray, b: np.ndarray, tolerance: float = 0.0) -> ArrayDifference:
  """Compares two arrays of one shape by value; two NaNs are equal.

  Args:
    a: any shape and numeric dtype.
    b: the same shape.
    tolerance: the largest absolute difference that counts as none.
  """
  flat_a, flat_b = a.reshape(-1), b.reshape(-1)
  count, max_abs, max_rel = 0, 0.0, 0.0
  for start in range(0, flat_a.size, _CHUNK):
    left = flat_a[start : start + _CHUNK].astype(np.float64)
    right = flat_b[start : start + _CHUNK].astype(np.float64)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    if same.all():
      continue
    left, right = left[~same], right[~same]
    with np.errstate(invalid="ignore", over="ignore"):
      apart = np.abs(left - right)
      relative = apart / np.maximum(np.abs(left), np.abs(right))
    apart = np.where(np.isnan(apart), np.inf, apart)
    relative = np.where(np.isnan(relative), np.inf, relative)
    count += int(np.count_nonzero(apart > tolerance))
    max_abs = max(max_abs, float(apart.max()))
    max_rel = max(max_rel, float(relative.max()))
  return ArrayDifference(count, max_abs, max_rel)


def compare_checkpoints(a: StoredCheckpoint, b: StoredCheckpoint, tolerance: float = 0.0) -> Comparison:
  """Compares all arrays of two steps.

  Args:
    a: from `metadata.describe_checkpoint`.
    b: likewise, of the same layout.
    tolerance: see `compare_arrays`.

  Raises:
    CheckpointError: the two are in different layouts.
    DamagedCheckpointError: an array can't be read.
  """
  if a.layout != b.layout:
    raise CheckpointError(
      f"{a.root} is in {_LAYOUT_NAMES[a.layout]} layout and {b.root} in {_LAYOUT_NAMES[b.layout]}: their trees have"
      " nothing in common; convert one (posttrain convert)"
    )
  structure: list[LeafDifference] = []
  values: list[LeafDifference] = []
  leaves = 0
  for item in sorted(set(a.trees) | set(b.trees)):
    left, right = _by_text(a, item), _by_text(b, item)
    leaves += len(left.keys() | right.keys())
    structure += _structure(item, a.trees.get(item), b.trees.get(item), left, right)
    common = {key: left[key] for key in left if key in right and left[key][1].shape == right[key][1].shape}
    values += _values(item, a, b, common, right, tolerance)
  values.sort(key=lambda each: (-each.values.max_abs if each.values else 0.0, each.path))
  return Comparison(leaves, (*structure, *values))


_LAYOUT_NAMES: Mapping[str, str] = {"maxtext": "MaxText's", "tunix": "Tunix's"}

_Located = tuple[KeyPath, StoredArray]


def _by_text(stored: StoredCheckpoint, item: str) -> dict[str, _Located]:
  """An item's arrays by their path as text: a list's positions and a dict's digits are the same."""
  tree = stored.trees.get(item)
  return {"/".join(map(str, path)): (path, array) for path, array in flatten_tree(tree).items()}


def _structure(
  item: str, tree_a: Any, tree_b: Any, left: Mapping[str, _Located], right: Mapping[str, _Located]
) -> Iterator[LeafDifference]:
  containers_a, containers_b = dict(_containers(tree_a)), dict(_containers(tree_b))
  for path in sorted(containers_a.keys() & containers_b.keys()):
    if containers_a[path] != containers_b[path]:
      detail = f"{containers_a[path]} in A, {containers_b[path]} in B"
      yield LeafDifference(f"{item}/{path}".rstrip("/"), "container", detail)
  for key in sorted(left.keys() | right.keys()):
    name = f"{item}/{key}"
    if key not in right:
      yield LeafDifference(name, "only in A", _described(left[key][1]))
    elif key not in left:
      yield LeafDifference(name, "only in B", _described(right[key][1]))
    elif left[key][1].shape != right[key][1].shape:
      yield LeafDifference(name, "shape", f"{left[key][1].shape} in A, {right[key][1].shape} in B")


def _containers(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
  """Lists by path with their length, and dicts that could be lists."""
  if isinstance(tree, Mapping):
    if tree and all(str(key).isdigit() for key in tree):
      yield path, "a dict"
    children = tree.items()
  elif isinstance(tree, (list, tuple)):
    yield path, f"a list of {len(tree)}"
    children = enumerate(tree)
  else:
    return
  for key, child in children:
    yield from _containers(child, f"{path}/{key}" if path else str(key))


def _values(
  item: str,
  a: StoredCheckpoint,
  b: StoredCheckpoint,
  common: Mapping[str, _Located],
  right: Mapping[str, _Located],
  tolerance: float,
) -> Iterator[LeafDifference]:
  names = {path: key for key, (path, _) in common.items()}
  for group in streaming.groups(dict(common.values())):
    paths_b = {names[path]: right[names[path]][0] for path in group}
    read_a = streaming.read_arrays(a, item, group)
    read_b = streaming.read_arrays(b, item, paths_b.values())
    for path in group:
      one, other = read_a.pop(path), read_b.pop(paths_b[names[path]])
      found = compare_arrays(one, other, tolerance)
      if one.dtype != other.dtype:
        detail = f"{one.dtype} in A, {other.dtype} in B"
        yield LeafDifference(f"{item}/{names[path]}", "dtype", detail, one.size, found)
      elif found.count:
        yield LeafDifference(f"{item}/{names[path]}", "values", _described(common[names[path]][1]), one.size, found)


def _described(array: StoredArray) -> str:
  return f"{array.shape} {array.dtype}"
