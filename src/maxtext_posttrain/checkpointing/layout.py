"""Pure functions between a live train state and the tree pre-training keeps on disk.

A live state may be wrapped where pre-training's is not: the model may sit behind Tunix's adapter, the optimizer inside
`optax.MultiSteps`, `optax.inject_hyperparams` or a chain with a clip. `plan_layout` lines up the two leaf by leaf, by
optax's own state types and by the module tree, never by a key's name alone. The plan then gathers (`to_pretraining`)
and scatters (`from_pretraining`) leaves. A leaf with no place, or a place with no leaf, is an error that names it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxtext_posttrain.checkpointing.optimizer_layout import OptimizerAlignment
from maxtext_posttrain.checkpointing.paths import (
  ADAPTER_CHILD,
  MODEL,
  STEP,
  FlatState,
  Path,
  as_path,
  format_path,
  raise_problems,
)
from maxtext_posttrain.errors import CheckpointError

_MAX_ADAPTER_DEPTH = 3
_MAX_KEPT_SIZE = 64
"""Wrapper leaves up to this many elements (hyperparameters) are kept in the step's metadata."""


def flatten_state(state: nnx.State) -> FlatState:
  """Leaves of an `nnx.State` by path, without their `nnx.Variable` boxes."""
  return {as_path(path): variable.get_value() for path, variable in nnx.to_flat_state(state)}


@dataclasses.dataclass(frozen=True)
class LayoutPlan:
  """How a live train state and pre-training's line up; made from structure alone, so it serves every step.

  Attributes:
    moved: pre-training's path to the live path that holds the same leaf.
    counted: pre-training's scalar paths whose value is the number of updates made, without a leaf of their own.
    updates_path: live path of the scalar that counts optimizer updates.
    wrapper_counts: live scalars outside pre-training's tree that count updates.
    wrapper_zeros: live leaves outside it that are zero between updates (accumulated gradients, the micro-step).
    wrapper_values: live leaves outside it whose value must be kept (hyperparameters, the micro-step total).
    adapter_depth: levels of the adapter's child above the model.
  """

  moved: Mapping[Path, Path]
  counted: tuple[Path, ...]
  updates_path: Path
  wrapper_counts: tuple[Path, ...]
  wrapper_zeros: tuple[Path, ...]
  wrapper_values: tuple[Path, ...]
  adapter_depth: int


def plan_layout(
  live: nnx.State,
  live_opt_state: Any,
  target: nnx.State,
  target_opt_state: Any,
) -> LayoutPlan:
  """Lines up a live train state with the one pre-training would build.

  Args:
    live: state of a `TrainStateNNX` over the live model and optimizer; concrete or abstract.
    live_opt_state: the live optimizer's state with optax's own types, or None where there is no optimizer.
    target: pre-training's abstract state, of the bare model and MaxText's bare optimizer.
    target_opt_state: pre-training's optimizer state with optax's own types; None with `live_opt_state` None.

  Raises:
    CheckpointError: leaves that do not line up; each is named, with both shapes where they differ.
  """
  live_flat, target_flat = flatten_state(live), flatten_state(target)
  live_model, target_model = _below(live_flat, MODEL), _below(target_flat, MODEL)
  depth = find_adapter_depth(live_model, target_model)
  prefix = (ADAPTER_CHILD,) * depth
  moved: dict[Path, Path] = {}
  unplaced: list[Path] = []
  for path in target_model:
    source = (*MODEL, *prefix, *path)
    if source in live_flat:
      moved[(*MODEL, *path)] = source
    else:
      unplaced.append((*MODEL, *path))
  placed = set(moved.values())
  surplus = [(*MODEL, *path) for path in live_model if (*MODEL, *path) not in placed]

  alignment = OptimizerAlignment(prefix)
  if live_opt_state is not None:
    alignment.match(live_opt_state, target_opt_state)
    moved.update(alignment.moved)
    # nnx.Optimizer.step counts calls of `update`; under MultiSteps those are micro-steps.
    if alignment.micro_steps:
      alignment.wrapper_values.append(STEP)
      alignment.counted.append(STEP)
    elif STEP in live_flat:
      moved[STEP] = STEP
  _raise_on_misfit(moved, unplaced, surplus, live_flat, target_flat)
  return LayoutPlan(
    moved=moved,
    counted=tuple(alignment.counted),
    updates_path=alignment.updates_path or STEP,
    wrapper_counts=tuple(alignment.wrapper_counts),
    wrapper_zeros=tuple(alignment.wrapper_zeros),
    wrapper_values=tuple(alignment.wrapper_values),
    adapter_depth=depth,
  )


def to_pretraining(plan: LayoutPlan, live: nnx.State, target: nnx.State) -> nnx.State:
  """Pre-training's train state filled with the live leaves.

  Raises:
    CheckpointError: the optimizer is between two updates of an accumulation, so its state is not whole.
  """
  flat = flatten_state(live)
  for path in plan.wrapper_zeros:
    if path[-1] == "mini_step" and int(flat[path]) != 0:
      raise CheckpointError(
        f"{format_path(path)} is {int(flat[path])}: a checkpoint falls on an update, not inside an accumulation;"
        " save after the accumulation's last micro-step"
      )
  updates = jnp.asarray(flat[plan.updates_path])
  leaves = {path: flat[source] for path, source in plan.moved.items()}
  for path in plan.counted:
    leaves[path] = updates
  return replace_leaves(target, leaves)


def kept_wrapper_values(plan: LayoutPlan, live: nnx.State) -> dict[str, dict[str, Any]]:
  """The wrappers' own values as JSON, exact to the bit: path to dtype, shape and little-endian hex bytes."""
  flat = flatten_state(live)
  kept = {}
  for path in plan.wrapper_values:
    value = np.asarray(jax.device_get(flat[path]))
    if value.size > _MAX_KEPT_SIZE:
      raise CheckpointError(
        f"optimizer state {format_path(path)} of shape {value.shape} has no place in pre-training's tree and is"
        f" larger than the {_MAX_KEPT_SIZE} values that are kept beside it"
      )
    kept[format_path(path)] = {"dtype": str(value.dtype), "shape": list(value.shape), "hex": value.tobytes().hex()}
  return kept


def from_pretraining(
  plan: LayoutPlan,
  restored: Mapping[Path, Any],
  live: nnx.State,
  kept: Mapping[str, Mapping[str, Any]] | None = None,
  *,
  micro_steps_per_update: int = 1,
) -> nnx.State:
  """The live train state with the leaves of pre-training's put back, and its wrappers as they were.

  Args:
    plan: from `plan_layout` for this live state.
    restored: pre-training's leaves by path; those that are missing keep their live value.
    live: the live state, for its structure and for leaves that were not restored.
    kept: from `kept_wrapper_values` at the save, where it is known.
    micro_steps_per_update: accumulation steps, used where `kept` does not say how many micro-steps were made.
  """
  flat = flatten_state(live)
  leaves: FlatState = {source: restored[path] for path, source in plan.moved.items() if path in restored}
  if not (plan.wrapper_counts or plan.wrapper_zeros or plan.wrapper_values):
    return replace_leaves(live, leaves)
  updates = _number_of_updates(restored, flat, plan)
  for path in plan.wrapper_counts:
    leaves[path] = _like(updates, flat[path])
  for path in plan.wrapper_zeros:
    leaves[path] = jnp.zeros_like(flat[path])
  for path in plan.wrapper_values:
    entry = (kept or {}).get(format_path(path))
    if entry is not None:
      value = np.frombuffer(bytes.fromhex(entry["hex"]), dtype=jnp.dtype(entry["dtype"])).reshape(entry["shape"])
      leaves[path] = _like(value, flat[path])
    elif path == STEP:
      leaves[path] = _like(updates * micro_steps_per_update, flat[path])
  return replace_leaves(live, leaves)


def strip_adapter(state: nnx.State, depth: int) -> nnx.State:
  """A `TrainStateNNX` state with `depth` adapter levels taken from the model; the optimizer is left out."""
  prefix = (*MODEL, *(ADAPTER_CHILD,) * depth)
  flat = [
    ((*MODEL, *path[len(prefix) :]), variable)
    for path, variable in nnx.to_flat_state(state)
    if tuple(path[: len(prefix)]) == prefix
  ]
  return nnx.from_flat_state(flat)


def _below(flat: Mapping[Path, Any], prefix: Path) -> FlatState:
  return {path[len(prefix) :]: leaf for path, leaf in flat.items() if path[: len(prefix)] == prefix}


def find_adapter_depth(live: Mapping[Path, Any], target: Mapping[Path, Any]) -> int:
  """How many adapter levels stand above the model: the depth at which its paths are the target's."""
  for depth in range(_MAX_ADAPTER_DEPTH + 1):
    prefix = (ADAPTER_CHILD,) * depth
    if {(*prefix, *path) for path in target} == set(live):
      return depth
  # Nothing fits whole; the depth that places most leaves gives the clearest list of the others.
  return max(
    range(_MAX_ADAPTER_DEPTH + 1),
    key=lambda depth: sum((*(ADAPTER_CHILD,) * depth, *path) in live for path in target),
  )


def _raise_on_misfit(
  moved: Mapping[Path, Path],
  unplaced: Sequence[Path],
  surplus: Sequence[Path],
  live: Mapping[Path, Any],
  target: Mapping[Path, Any],
) -> None:
  problems = [f"{format_path(path)}: pre-training has it, the live model does not" for path in unplaced]
  problems += [f"{format_path(path)}: the live model has it, pre-training does not" for path in surplus]
  problems += [
    problem
    for path, source in moved.items()
    if (problem := describe_mismatch(format_path(source), live[source], target[path]))
  ]
  raise_problems("the live state does not fit pre-training's layout", problems)


def describe_mismatch(name: str, have: Any, want: Any) -> str | None:
  """One line on how two leaves differ in shape or type, or None where they agree."""
  if _is_key(have) and _is_key(want) and have.dtype != want.dtype:
    return (
      f"{name}: rng keys are {have.dtype}, pre-training's are {want.dtype}; set jax_default_prng_impl before the model"
      " is built"
    )
  if tuple(have.shape) != tuple(want.shape):
    return f"{name}: shape {tuple(have.shape)} here, {tuple(want.shape)} wanted"
  if have.dtype != want.dtype and not _is_step_cast(have, want):
    return f"{name}: {have.dtype} here, {want.dtype} wanted"
  return None


def _is_key(leaf: Any) -> bool:
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_step_cast(have: Any, want: Any) -> bool:
  return have.shape == () and {str(have.dtype), str(want.dtype)} == {"uint32", "int32"}


def replace_leaves(state: nnx.State, leaves: Mapping[Path, Any]) -> nnx.State:
  """`state` with the leaves named in `leaves` replaced, cast to the integer type that stands there."""
  replaced = []
  for path, variable in nnx.to_flat_state(state):
    if as_path(path) in leaves:
      leaf = leaves[as_path(path)]
      want = variable.get_value()
      if not _is_key(want) and leaf.dtype != want.dtype and leaf.shape == ():
        leaf = leaf.astype(want.dtype) if not isinstance(leaf, jax.ShapeDtypeStruct) else want
      variable = variable.replace(leaf)
    replaced.append((path, variable))
  return nnx.from_flat_state(replaced)


def _number_of_updates(restored: Mapping[Path, Any], flat: FlatState, plan: LayoutPlan) -> np.ndarray:
  value = restored.get(STEP)
  return np.asarray(jax.device_get(flat[plan.updates_path] if value is None else value))


def _like(value: Any, leaf: Any) -> jax.Array:
  """`value` as an array of `leaf`'s type, placed as `leaf` is."""
  array = jnp.asarray(value, dtype=leaf.dtype).reshape(leaf.shape)
  leaf_sharding = getattr(leaf, "sharding", None)
  return jax.device_put(array, leaf_sharding) if leaf_sharding is not None else array
