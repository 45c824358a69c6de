"""`posttrain diff`: in which leaves two checkpoints differ, and by how much."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from maxtext_posttrain.commands.arguments import ArgumentParser
from maxtext_posttrain.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
  from maxtext_posttrain.checkpointing.comparison import Comparison
  from maxtext_posttrain.checkpointing.metadata import StoredCheckpoint

_DESCRIPTION = """\
Compares two checkpoints leaf by leaf: weights, optimizer, step and rng state. Lists the leaves that only one has, or
that differ in container, shape, dtype or value, the farthest apart first. Two NaNs are equal. Reads a few arrays at a
time; needs no accelerator. Exits with 0 where the two are equal, with 1 where they differ (or one can't be read: then
a line begins with "error:")."""

EXIT_DIFFERENT = 1
_MAX_ROWS = 50


def run(arguments: Sequence[str]) -> int:
  """Runs the command; returns 0 where the two are equal, 1 where they differ.

  Raises:
    CheckpointError: a path means no checkpoint, or one can't be read.
    ConfigError: the command line is wrong.
  """
  parser = ArgumentParser("diff", _DESCRIPTION)
  parser.add_argument("a", metavar="A", help="a run's folder (its newest step), a step's folder, or its items")
  parser.add_argument("b", metavar="B", help="likewise")
  parser.add_argument(
    "--tolerance", type=float, default=0.0, metavar="T", help="largest absolute difference that counts as none"
  )
  parser.add_argument("--json", action="store_true", help="print JSON")
  parser.add_argument("--all", action="store_true", help=f"list every leaf that differs, not the first {_MAX_ROWS}")
  options = parser.parse_args(arguments)
  if not math.isfinite(options.tolerance) or options.tolerance < 0:
    raise ConfigError(f"--tolerance {options.tolerance}: give a number from 0 on")
  a, b, comparison = _compare(options.a, options.b, options.tolerance)
  if options.json:
    print(json.dumps(_document(a, b, comparison), indent=2))
  else:
    print("\n".join(_report(a, b, comparison, every=options.all)))
  return EXIT_DIFFERENT if comparison.differences else 0


def _compare(path_a: str, path_b: str, tolerance: float) -> tuple[StoredCheckpoint, StoredCheckpoint, Comparison]:
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  from maxtext_posttrain.checkpointing.comparison import compare_checkpoints
  from maxtext_posttrain.checkpointing.locations import find_step
  from maxtext_posttrain.checkpointing.metadata import describe_checkpoint
  from maxtext_posttrain.logs import quiet_logs

  quiet_logs(show=False)
  a, b = (describe_checkpoint(find_step(path).root) for path in (path_a, path_b))
  if a.root == b.root:
    raise CheckpointError(f"both paths mean {a.root}: there is nothing to compare")
  return a, b, compare_checkpoints(a, b, tolerance)


def _report(a: StoredCheckpoint, b: StoredCheckpoint, comparison: Comparison, *, every: bool) -> Iterator[str]:
  differences = comparison.differences
  yield f"A  {a.root}"
  yield f"B  {b.root}"
  if dict(a.custom_metadata) != dict(b.custom_metadata):
    yield f"metadata (not compared): {dict(a.custom_metadata)} in A, {dict(b.custom_metadata)} in B"
  if not differences:
    yield f"equal: {comparison.leaves} leaves"
    return
  shown = differences if every else differences[:_MAX_ROWS]
  yield f"different: {len(differences)} differences in {comparison.leaves} leaves"
  yield f"{'max abs':>10} {'max rel':>10} {'differ':>12} {'of':>12}  leaf"
  for each in shown:
    values = each.values
    numbers = (
      f"{values.max_abs:>10.3g} {values.max_rel:>10.3g} {values.count:>12,} {each.size:>12,}" if values else " " * 47
    )
    yield f"{numbers}  {each.path}" + ("" if each.kind == "values" else f": {each.kind}, {each.detail}")
  if len(shown) < len(differences):
    yield f"and {len(differences) - len(shown)} more (--all lists them)"


def _document(a: StoredCheckpoint, b: StoredCheckpoint, comparison: Comparison) -> dict[str, Any]:
  return {
    "a": str(a.root),
    "b": str(b.root),
    "equal": not comparison.differences,
    "leaves": comparison.leaves,
    "differences": [
      {
        "path": each.path,
        "kind": each.kind,
        "detail": each.detail,
        "size": each.size,
        "count": each.values.count if each.values else None,
        "max_abs": _number(each.values.max_abs) if each.values else None,
        "max_rel": _number(each.values.max_rel) if each.values else None,
      }
      for each in comparison.differences
    ],
  }


def _number(value: float) -> float | str:
  """JSON has no infinity."""
  return value if math.isfinite(value) else str(value)
