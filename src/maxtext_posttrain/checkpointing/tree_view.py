"""A described tree as the rows of a listing: every leaf, or layers and moments taken together."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from maxtext_posttrain.checkpointing import optimizer_kind
from maxtext_posttrain.checkpointing.metadata import KeyPath, StoredArray, flatten_tree
from maxtext_posttrain.checkpointing.streaming import array_bytes

_NUMBERED = re.compile(r"(.*(?:layers?|blocks?|experts?)_)(\d+)")


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of a listing.

  Attributes:
    name: a path, with `{0..31}` where numbered siblings are taken together.
    arrays: how many arrays it stands for.
    shape: theirs, or None where they differ.
    dtypes: theirs.
    nbytes: of all of them.
  """

  name: str
  arrays: int
  shape: tuple[int, ...] | None
  dtypes: tuple[str, ...]
  nbytes: int


def leaf_rows(tree: Any) -> list[Row]:
  """A row for each leaf."""
  return [_row(_joined(path), [array]) for path, array in flatten_tree(tree).items()]


def grouped_rows(tree: Any) -> list[Row]:
  """Few rows: numbered layers that are alike together, and one row for each tree of moments and for `nnx_aux`."""
  if not isinstance(tree, Mapping):
    return leaf_rows(tree)
  rows: list[Row] = []
  for section, child in tree.items():
    leaves = flatten_tree({section: child})
    if section == "nnx_aux" and leaves:
      rows.append(_row(section, leaves.values()))
    elif section == "opt_state":
      rows += _optimizer_rows(child, leaves)
    else:
      rows += _numbered_together(leaves)
  return rows


def _optimizer_rows(opt_state: Any, leaves: Mapping[KeyPath, StoredArray]) -> Iterator[Row]:
  names = optimizer_kind.WEIGHT_SHAPED
  moments = [("opt_state", *path) for path, _ in optimizer_kind.moment_trees(opt_state, names)]
  seen: set[KeyPath] = set()
  for path, array in leaves.items():
    # Keys of a dict are text, positions in a list are numbers; the moments' paths have numbers for both.
    above = next((moment for moment in moments if _texts(path)[: len(moment)] == _texts(moment)), None)
    if above is None:
      yield _row(_joined(path), [array])
    elif above not in seen:
      seen.add(above)
      below = [leaf for other, leaf in leaves.items() if _texts(other)[: len(above)] == _texts(above)]
      yield _row(_joined(above), below)


def _numbered_together(leaves: Mapping[KeyPath, StoredArray]) -> Iterator[Row]:
  alike: dict[tuple[Any, ...], list[tuple[KeyPath, StoredArray]]] = {}
  for path, array in leaves.items():
    alike.setdefault((_pattern(path), array.shape, str(array.dtype)), []).append((path, array))
  for members in alike.values():
    yield _row(_range_name([path for path, _ in members]), [array for _, array in members])


def _pattern(path: KeyPath) -> tuple[str, ...]:
  return tuple(match[1] if (match := _NUMBERED.fullmatch(key)) else key for key in _texts(path))


def _range_name(paths: Sequence[KeyPath]) -> str:
  parts = []
  for keys in zip(*map(_texts, paths), strict=True):
    distinct = set(keys)
    match = _NUMBERED.fullmatch(keys[0])
    if len(distinct) == 1 or match is None:
      parts.append(keys[0])
      continue
    numbers = sorted(int(key[len(match[1]) :]) for key in distinct)
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    inner = f"{numbers[0]}..{numbers[-1]}" if whole else ",".join(map(str, numbers))
    parts.append(f"{match[1]}{{{inner}}}")
  return "/".join(parts)


def _row(name: str, arrays: Iterable[StoredArray]) -> Row:
  arrays = list(arrays)
  shapes = {array.shape for array in arrays}
  return Row(
    # Names come from the checkpoint's file: what is not printable is escaped.
    name=name if name.isprintable() else name.encode("unicode_escape").decode("ascii"),
    arrays=len(arrays),
    shape=shapes.pop() if len(shapes) == 1 else None,
    dtypes=tuple(sorted({str(array.dtype) for array in arrays})),
    nbytes=sum(map(array_bytes, arrays)),
  )


def _texts(path: KeyPath) -> tuple[str, ...]:
  return tuple(map(str, path))


def _joined(path: KeyPath) -> str:
  return "/".join(_texts(path))
