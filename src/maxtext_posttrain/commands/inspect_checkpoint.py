"""`posttrain inspect`: what a checkpoint is, and whether pre-training can go on from it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from maxtext_posttrain.commands.arguments import ArgumentParser
from maxtext_posttrain.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
  from maxtext_posttrain.checkpointing.inspection import Inspection

_DESCRIPTION = """\
Says what a checkpoint is: its layout, step, tree, size, optimizer and metadata, whether MaxText's pre-training can go
on from it and if not why, and the commands that lead on. Reads metadata and the numbers that count steps, no weights.
Exits with 0; with 1 where the checkpoint is damaged or of no known layout. With --require the requirements alone
decide: 0 where all are met, 1 with a line for each that is not."""

REQUIRABLE = {
  "layout": "maxtext, weights, adapter, tunix, damaged, unknown",
  "step": "the step inside",
  "folder": "the number that names the step's folder",
  "resumable": "true where pre-training goes on with step, weights and optimizer",
  "run_name": "yes, partly or no: whether pre-training goes on by the run's name",
  "load_full_state_path": "yes, partly or no",
  "load_parameters_path": "yes, partly or no",
  "optimizer": "adamw, adam_pax, sgd, muon, unknown, none",
  "scan_layers": "true or false",
  "data_position": "true where a data position is saved",
  "parameters": "how many numbers the weights have",
}
_MAX_ROWS = 40


def run(arguments: Sequence[str]) -> int:
  """Runs the command; returns the exit code.

  Raises:
    CheckpointError: the path means no checkpoint.
    ConfigError: the command line is wrong.
  """
  parser = ArgumentParser("inspect", _DESCRIPTION)
  parser.add_argument("path", metavar="PATH", help="a run's folder, its checkpoints, a step's folder, or its items")
  parser.add_argument("--step", type=int, metavar="N", help="which step of a run (default: the newest)")
  parser.add_argument("--leaves", action="store_true", help="list every array instead of groups")
  parser.add_argument("--json", action="store_true", help="print JSON")
  known = "; ".join(f"{key}: {what}" for key, what in REQUIRABLE.items())
  parser.add_argument(
    "--require", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=f"exit with 1 unless so. {known}"
  )
  options = parser.parse_args(arguments)
  required = [_parse_requirement(text) for text in options.require]
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  inspection = inspect(options.path, options.step)
  facts = _facts(inspection)
  if options.json:
    print(json.dumps(_document(inspection, facts, leaves=options.leaves), indent=2, default=str))
  else:
    print("\n".join(describe(inspection, leaves=options.leaves)))
  unmet = [
    f"{inspection.location.root}: {key} is {facts[key]}, {value} is required"
    for key, value in required
    if facts[key] != value
  ]
  if unmet:
    raise CheckpointError("\n".join(unmet))
  if inspection.problem is not None and not required:
    raise CheckpointError(inspection.problem)
  return 0


def _parse_requirement(text: str) -> tuple[str, str]:
  key, separator, value = text.partition("=")
  if not separator or not value:
    raise ConfigError(f"--require {text}: requirements are given as KEY=VALUE, for example resumable=true")
  if key not in REQUIRABLE:
    raise ConfigError(f"--require {text}: no such key; there are {', '.join(REQUIRABLE)}")
  return key, value


def inspect(path: str, step: int | None) -> Inspection:
  """Examines the step that a path means, the newest one unless `step` says which.

  Raises:
    CheckpointError: the path means no step.
  """
  from maxtext_posttrain.checkpointing.inspection import inspect_step
  from maxtext_posttrain.logs import quiet_logs

  quiet_logs(show=False)
  return inspect_step(path, step=step)


def _facts(inspection: Inspection) -> dict[str, str]:
  """What can be required, each as text."""
  from maxtext_posttrain.checkpointing import diagnosis

  verdict = inspection.diagnosis
  optimizer = verdict.optimizer if verdict is not None else None
  answers = {way: verdict.verdict(way).answer if verdict is not None else "no" for way in diagnosis.WAYS}
  return {
    "layout": inspection.layout,
    "step": _text(inspection.step),
    "folder": _text(inspection.location.folder_step),
    "resumable": _text(verdict is not None and verdict.resumable),
    **answers,
    "optimizer": optimizer.name if optimizer is not None else "none",
    "scan_layers": _text(inspection.scan_layers),
    "data_position": _text(bool(inspection.data_positions)),
    "parameters": _text(diagnosis.count_parameters(inspection.weights)),
  }


def _text(value: Any) -> str:
  if value is None:
    return "none"
  return str(value).lower() if isinstance(value, bool) else str(value)


def _document(inspection: Inspection, facts: Mapping[str, str], *, leaves: bool) -> dict[str, Any]:
  from maxtext_posttrain.checkpointing import diagnosis, tree_view
  from maxtext_posttrain.commands.next_commands import next_commands

  verdict = inspection.diagnosis
  optimizer = verdict.optimizer if verdict is not None else None
  rows = tree_view.leaf_rows if leaves else tree_view.grouped_rows
  return {
    "path": str(inspection.location.root),
    "layout": inspection.layout,
    "problem": inspection.problem,
    "step": inspection.step,
    "folder": inspection.location.folder_step,
    "steps": list(inspection.location.steps),
    "unfinished": list(inspection.location.unfinished),
    "parameters": diagnosis.count_parameters(inspection.weights),
    "optimizer": {"name": optimizer.name, "wrappers": list(optimizer.wrappers)} if optimizer is not None else None,
    "scan_layers": inspection.scan_layers,
    "custom_metadata": dict(inspection.stored.custom_metadata) if inspection.stored is not None else None,
    "data_position": dict(inspection.data_positions) or None,
    "bytes_on_disk": inspection.bytes_on_disk,
    "bytes_of_state": inspection.state_bytes,
    "resumable": facts["resumable"] == "true",
    "ways": {
      way: {"answer": verdict.verdict(way).answer, "reasons": list(verdict.verdict(way).reasons)}
      for way in diagnosis.WAYS
      if verdict is not None
    },
    "findings": [
      {"code": finding.code, "effect": finding.effect, "message": finding.message, "ways": list(finding.ways)}
      for finding in (verdict.findings if verdict is not None else ())
    ],
    "next": [{"name": name, "command": command} for name, command in next_commands(inspection)],
    "tree": {
      item: [{"name": row.name, "arrays": row.arrays, "shape": row.shape, "dtypes": row.dtypes} for row in rows(tree)]
      for item, tree in inspection.trees.items()
    },
  }


def describe(inspection: Inspection, *, leaves: bool) -> Iterator[str]:
  """What the command prints, line by line; with `leaves` every array instead of groups."""
  from maxtext_posttrain.checkpointing import diagnosis
  from maxtext_posttrain.checkpointing.inspection import LAYOUTS
  from maxtext_posttrain.commands.next_commands import next_commands

  yield str(inspection.location.root)
  yield _line("layout", f"{inspection.layout}: {LAYOUTS[inspection.layout]}")
  yield from _steps(inspection)
  verdict = inspection.diagnosis
  if inspection.stored is None or verdict is None:
    return
  yield _line("parameters", f"{diagnosis.count_parameters(inspection.weights):,}{_dtypes(inspection.weights)}")
  if verdict.optimizer is not None:
    around = "".join(f", inside {wrapper}" for wrapper in reversed(verdict.optimizer.wrappers))
    yield _line("optimizer", f"{verdict.optimizer.name}{around}")
  else:
    yield _line("optimizer", "none")
  yield _line("metadata", json.dumps(dict(inspection.stored.custom_metadata), default=str))
  yield _line("data", _data(inspection))
  state = inspection.state_bytes
  share = f", {inspection.bytes_on_disk / state:.3f} of it" if state else ""
  yield _line("size", f"{_size(state)} of arrays; {_size(inspection.bytes_on_disk)} on disk{share}")
  for item, tree in inspection.trees.items():
    yield ""
    yield from _tree(item, tree, leaves=leaves)
  yield ""
  yield "pre-training goes on from it"
  yield from (_line(f"by {way}", verdict.verdict(way).answer, width=26) for way in diagnosis.WAYS)
  for finding in verdict.findings:
    only = f" (by {finding.ways[0]})" if len(finding.ways) == 1 else ""
    yield _line(finding.effect, f"{finding.message}{only}")
  commands = next_commands(inspection)
  if commands:
    yield ""
    yield "next"
    for name, command in commands:
      yield f"  {name}"
      yield f"    {command}"


def _line(name: str, value: str, width: int = 12) -> str:
  return f"  {name:<{width}} {value}"


def _steps(inspection: Inspection) -> Iterator[str]:
  location = inspection.location
  inside = "unknown" if inspection.step is None else str(inspection.step)
  yield _line("step", inside + (f" (folder {location.folder_step})" if location.folder_step is not None else ""))
  if len(location.steps) > 1:
    yield _line("steps here", ", ".join(map(str, location.steps)))
  if location.unfinished:
    yield _line("unfinished", ", ".join(location.unfinished))


def _dtypes(weights: Any) -> str:
  from maxtext_posttrain.checkpointing.metadata import flatten_tree

  leaves = flatten_tree(weights).values()
  names = ", ".join(sorted({str(leaf.dtype) for leaf in leaves}))
  return f" in {len(leaves)} arrays, {names}" if names else ""


def _data(inspection: Inspection) -> str:
  if not inspection.data_positions:
    return "no position saved"
  shown = []
  for name, position in inspection.data_positions.items():
    if position is None:
      shown.append(f"{name} can't be read")
    elif "position" in position:
      rows = f" of {position['total_rows']} rows" if position.get("total_rows") is not None else ""
      shown.append(f"position {position['position']}{rows} ({name})")
    else:
      shown.append(name)
  return f"post_train_iter: {', '.join(shown)}"


def _tree(item: str, tree: Any, *, leaves: bool) -> Iterator[str]:
  from maxtext_posttrain.checkpointing import tree_view

  rows = tree_view.leaf_rows(tree) if leaves else tree_view.grouped_rows(tree)
  shown = rows if leaves else rows[:_MAX_ROWS]
  yield item
  width = min(max((len(row.name) for row in shown), default=0), 70)
  for row in shown:
    if row.arrays == 1:
      what = f"{_shape(row.shape)} {row.dtypes[0]}"
    else:
      each = f" of {_shape(row.shape)}" if row.shape is not None else ""
      what = f"{row.arrays} arrays{each}, {', '.join(row.dtypes)}, {_size(row.nbytes)}"
    yield f"  {row.name:<{width}}  {what}"
  if len(shown) < len(rows):
    yield f"  and {len(rows) - len(shown)} more (--leaves lists all)"


def _shape(shape: tuple[int, ...] | None) -> str:
  return "scalar" if shape == () else f"({', '.join(map(str, shape or ()))})"


def _size(nbytes: int) -> str:
  size = float(nbytes)
  for unit in ("B", "KiB", "MiB", "GiB"):
    if size < 1024:
      return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
    size /= 1024
  return f"{size:.1f} TiB"
