"""Tells which optimizer a tree on disk belongs to, and what stands around it, by structure alone.

Optax's types are not stored. A node is told by the fields it has: `count`, `mu` and `nu` make an Adam, `count` alone a
schedule, `mini_step` and `gradient_step` an `optax.MultiSteps`, and so on. A list is a chain; a dict whose keys are
all digits is one too, as Tunix files it and as it lies inside a wrapper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from maxtext_posttrain.checkpointing.metadata import KeyPath

LinkKind = Literal[
  "empty", "adam", "schedule", "momentum", "muon", "chain", "skip_step", "partition", "multi_steps", "inject", "unknown"
]

MOMENTS = frozenset({"mu", "nu", "trace"})
WEIGHT_SHAPED = MOMENTS | {"acc_grads"}
"""Fields with an entry for each weight; `acc_grads` are gradients that `MultiSteps` adds up."""

MULTI_STEPS = "MultiSteps"
INJECT = "inject_hyperparams"
SKIP_STEP = "skip_step_on_spikes"
TRAINABLE_MASK = "trainable_parameters_mask"
CLIP = "a link before it (a clip)"


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """What a tree says of its optimizer.

  Attributes:
    name: MaxText's `opt_type` (`adamw`, `adam_pax`, `sgd`, `muon`), or `unknown`.
    wrappers: what stands around it, outermost first.
    path: where its own state begins, below `opt_state`.
    schedule: where the schedule's count is, below `opt_state`; None where there is none.
  """

  name: str
  wrappers: tuple[str, ...]
  path: KeyPath
  schedule: KeyPath | None


def links(node: Any) -> dict[int, Any]:
  """A chain's links by position; empty where the node is no chain."""
  if isinstance(node, (list, tuple)):
    return dict(enumerate(node))
  if isinstance(node, Mapping) and node and all(str(key).isdigit() for key in node):
    return {int(key): child for key, child in sorted(node.items(), key=lambda item: int(item[0]))}
  return {}


def link_kind(node: Any) -> LinkKind:
  """What a node of an optimizer state is."""
  if node is None or (isinstance(node, (Mapping, list, tuple)) and not node):
    return "empty"
  if links(node):
    return "chain"
  if not isinstance(node, Mapping):
    return "unknown"
  fields = set(node)
  if {"mini_step", "gradient_step"} <= fields:
    return "multi_steps"
  if {"hyperparams", "inner_state"} <= fields:
    return "inject"
  if {"losses", "grad_norms", "inner_state"} <= fields:
    return "skip_step"
  if "inner_states" in fields:
    return "partition"
  if "ns_coeffs" in fields:
    return "muon"
  if "mu" in fields or "nu" in fields:
    return "adam"
  if "trace" in fields:
    return "momentum"
  return "schedule" if fields == {"count"} else "unknown"


def stateful_links(node: Any) -> dict[int, Any]:
  """A chain's links that hold a state."""
  return {index: child for index, child in links(node).items() if link_kind(child) != "empty"}


def recognise(opt_state: Any) -> Optimizer:
  """Tells the optimizer of an `opt_state` tree, in MaxText's layout or, unboxed, in Tunix's."""
  return _recognise(opt_state, (), ())


def _recognise(node: Any, path: KeyPath, wrappers: tuple[str, ...]) -> Optimizer:
  kind = link_kind(node)
  if kind == "multi_steps":
    return _recognise(node.get("inner_opt_state"), (*path, "inner_opt_state"), (*wrappers, MULTI_STEPS))
  if kind == "inject":
    return _recognise(node["inner_state"], (*path, "inner_state"), (*wrappers, INJECT))
  if kind == "skip_step":
    return _recognise(node["inner_state"], (*path, "inner_state"), (*wrappers, SKIP_STEP))
  if kind == "partition":
    return _partition(node["inner_states"], (*path, "inner_states"), wrappers)
  if kind == "adam":
    return Optimizer("adam_pax", wrappers, path, None)
  if kind != "chain":
    return Optimizer("unknown", wrappers, path, None)
  return _chain(node, path, wrappers)


def _partition(parts: Any, path: KeyPath, wrappers: tuple[str, ...]) -> Optimizer:
  names = set(parts) if isinstance(parts, Mapping) else set()
  if "trainable" in names:
    inner = (*path, "trainable", "inner_state")
    return _recognise(_at(parts, ("trainable", "inner_state")), inner, (*wrappers, TRAINABLE_MASK))
  if "muon" in names:
    chain = stateful_links(_at(parts, ("muon", "inner_state")))
    index = next((index for index, child in chain.items() if link_kind(child) == "schedule"), None)
    schedule = None if index is None else (*path, "muon", "inner_state", index, "count")
    return Optimizer("muon", wrappers, path, schedule)
  return Optimizer("unknown", wrappers, path, None)


def _chain(node: Any, path: KeyPath, wrappers: tuple[str, ...]) -> Optimizer:
  stateful = stateful_links(node)
  kinds = {index: link_kind(child) for index, child in stateful.items()}
  first = next(iter(stateful), None)
  # MaxText's own chains hold states, not chains or wrappers.
  inner = next(
    (index for index, kind in kinds.items() if kind not in ("adam", "schedule", "momentum", "unknown")), None
  )
  if inner is not None:
    around = (*wrappers, CLIP) if inner > 0 else wrappers
    return _recognise(stateful[inner], (*path, inner), around)
  schedule = next((index for index, kind in kinds.items() if kind == "schedule"), None)
  schedule_path = None if schedule is None else (*path, schedule, "count")
  if "adam" in kinds.values():
    return Optimizer("adamw", (*wrappers, CLIP) if kinds.get(0) != "adam" else wrappers, path, schedule_path)
  if set(kinds.values()) == {"schedule"}:
    return Optimizer("sgd", (*wrappers, CLIP) if first != 1 else wrappers, path, schedule_path)
  return Optimizer("unknown", wrappers, path, schedule_path)


def _at(tree: Any, path: KeyPath) -> Any:
  for key in path:
    tree = tree.get(key) if isinstance(tree, Mapping) else None
  return tree


def moment_trees(node: Any, names: Collection[str] = MOMENTS, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
  """Each tree below `node` that is shaped like the weights and has one of `names`, with its path."""
  children = links(node) or (node if isinstance(node, Mapping) else {})
  for key, child in children.items():
    if key in names and isinstance(child, Mapping):
      yield (*path, key), child
    elif key not in WEIGHT_SHAPED:
      yield from moment_trees(child, names, (*path, key))
