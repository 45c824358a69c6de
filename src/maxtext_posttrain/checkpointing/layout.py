"""Pure functions between a live train state and the tree pre-training keeps on disk.

A live state may be wrapped where pre-training's is not: the model may sit behind Tunix's adapter, the optimizer inside
`optax.MultiSteps`, `optax.inject_hyperparams` or a chain with a clip. `plan_layout` lines up the two leaf by leaf, by
optax's own state types and by the module tree, never by a key's name alone. The plan then gathers (`to_pretraining`)
and scatters (`from_pretraining`) leaves. A leaf with no place, or a place with no leaf, is an error that names it.

Paths are tuples in the coordinates of MaxText's `TrainStateNNX`: `('model', ...)`, `('optimizer', 'opt_state', ...)`
and `('optimizer', 'step')`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from maxtext_posttrain.errors import CheckpointError

Path = tuple[str | int, ...]
FlatState = dict[Path, Any]

STEP: Path = ("optimizer", "step")
OPT_STATE: Path = ("optimizer", "opt_state")
MODEL: Path = ("model",)
ADAPTER_CHILD = "base"
_MAX_ADAPTER_DEPTH = 3
_INJECT_TYPES = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
_MAX_KEPT_SIZE = 64
"""Wrapper leaves up to this many elements (hyperparameters) are kept in the step's metadata."""


def format_path(path: Path) -> str:
  """`('model', 'layers', 0)` as `model/layers/0`."""
  return "/".join(map(str, path))


def flatten_state(state: nnx.State) -> FlatState:
  """Leaves of an `nnx.State` by path, without their `nnx.Variable` boxes."""
  return {as_path(path): variable.get_value() for path, variable in nnx.to_flat_state(state)}


def as_path(path: Iterable[Any]) -> Path:
  """NNX's key types are wider than the strings and integers that modules and chains use."""
  return tuple(path)


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


@dataclasses.dataclass
class _Wrappers:
  """What the optimizer's wrappers hold, collected while they are peeled."""

  counts: list[Path] = dataclasses.field(default_factory=list)
  zeros: list[Path] = dataclasses.field(default_factory=list)
  values: list[Path] = dataclasses.field(default_factory=list)
  updates: Path | None = None
  micro_steps: bool = False


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

  wrappers = _Wrappers()
  counted: list[Path] = []
  if live_opt_state is not None:
    _match(live_opt_state, target_opt_state, OPT_STATE, OPT_STATE, prefix, moved, counted, wrappers)
    # nnx.Optimizer.step counts calls of `update`; under MultiSteps those are micro-steps.
    if wrappers.micro_steps:
      wrappers.values.append(STEP)
      counted.append(STEP)
    elif STEP in live_flat:
      moved[STEP] = STEP
  _raise_on_misfit(moved, unplaced, surplus, live_flat, target_flat)
  return LayoutPlan(
    moved=moved,
    counted=tuple(counted),
    updates_path=wrappers.updates or STEP,
    wrapper_counts=tuple(wrappers.counts),
    wrapper_zeros=tuple(wrappers.zeros),
    wrapper_values=tuple(wrappers.values),
    adapter_depth=depth,
  )


def align_optimizer(stored: Any, target: Any, adapter_depth: int) -> tuple[dict[Path, Path], list[Path]]:
  """Lines up a stored optimizer state with pre-training's, both with optax's own types.

  Returns:
    Pre-training's path to the stored path, each below `('optimizer', 'opt_state')`, and pre-training's scalar paths
    that are the number of updates without a stored leaf of their own.

  Raises:
    CheckpointError: the two are of different optimizers.
  """
  moved: dict[Path, Path] = {}
  counted: list[Path] = []
  prefix = (ADAPTER_CHILD,) * adapter_depth
  _match(stored, target, OPT_STATE, OPT_STATE, prefix, moved, counted, _Wrappers())
  return moved, counted


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


def strip_wrappers(opt_state: Any) -> Any:
  """The optimizer state pre-training's layout would hold, where no configuration says what it is.

  Wrappers go by type: `MultiSteps`, `inject_hyperparams` and stateless links of a chain. An injected learning rate is
  pre-training's schedule, so the chain's last, stateless link becomes the schedule's count again.
  """
  if isinstance(opt_state, optax.MultiStepsState):
    return strip_wrappers(opt_state.inner_opt_state)
  if isinstance(opt_state, _INJECT_TYPES):
    inner = strip_wrappers(opt_state.inner_state)
    if "learning_rate" in opt_state.hyperparams and type(inner) is tuple and _is_stateless(inner[-1]):
      return (*inner[:-1], optax.ScaleByScheduleState(count=opt_state.count))
    return inner
  if type(opt_state) is tuple and not _is_stateless(opt_state):
    stateful = [entry for entry in opt_state if not _is_stateless(entry)]
    # A clip stands before the optimizer it clips; MaxText's own chains begin with a state, or (SGD's) hold a schedule.
    clipped = _is_stateless(opt_state[0]) and not isinstance(stateful[0], optax.ScaleByScheduleState)
    if len(stateful) == 1 and (clipped or type(stateful[0]) is tuple or _is_wrapper(stateful[0])):
      return strip_wrappers(stateful[0])
  return opt_state


def strip_adapter(state: nnx.State, depth: int) -> nnx.State:
  """A `TrainStateNNX` state with `depth` adapter levels taken from the model; the optimizer is left out."""
  prefix = (*MODEL, *(ADAPTER_CHILD,) * depth)
  flat = [
    ((*MODEL, *path[len(prefix) :]), variable)
    for path, variable in nnx.to_flat_state(state)
    if tuple(path[: len(prefix)]) == prefix
  ]
  return nnx.from_flat_state(flat)


def strip_adapter_from_optimizer(opt_state: Any, depth: int) -> Any:
  """The optimizer state with `depth` adapter levels taken from each tree that is shaped like the weights."""

  def strip(node: Any) -> Any:
    if isinstance(node, nnx.State):
      for _ in range(depth):
        node = node[ADAPTER_CHILD]
    return node

  return jax.tree.map(strip, opt_state, is_leaf=lambda node: isinstance(node, nnx.State))


def as_nested_state(opt_state: Any) -> nnx.State:
  """An optimizer state with optax's own types as `nnx.state(optimizer)['opt_state']` would file it."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(opt_state)
  return nnx.from_flat_state(
    [(tuple(_key_name(key) for key in path), nnx.optimizer.OptState(leaf)) for path, leaf in leaves]
  )


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


def _is_stateless(node: Any) -> bool:
  return not jax.tree.leaves(node)


def _is_wrapper(node: Any) -> bool:
  return isinstance(node, (optax.MultiStepsState, *_INJECT_TYPES))


def _states(node: Any, path: Path, wrappers: _Wrappers | None) -> list[tuple[Path, Any]]:
  """The stateful optax states under chains and wrappers, in order; what the wrappers hold is recorded."""
  if _is_stateless(node):
    return []
  if wrappers is not None and isinstance(node, optax.MultiStepsState):
    wrappers.updates = (*path, "gradient_step")
    wrappers.micro_steps = True
    wrappers.counts.append((*path, "gradient_step"))
    wrappers.zeros.append((*path, "mini_step"))
    wrappers.zeros.extend((*path, "acc_grads", *leaf) for leaf in _leaf_paths(node.acc_grads))
    return _states(node.inner_opt_state, (*path, "inner_opt_state"), wrappers)
  if wrappers is not None and isinstance(node, _INJECT_TYPES):
    wrappers.updates = wrappers.updates or (*path, "count")
    wrappers.counts.append((*path, "count"))
    wrappers.values.extend((*path, "hyperparams", *leaf) for leaf in _leaf_paths(node.hyperparams))
    states = getattr(node, "hyperparams_states", {})
    wrappers.counts.extend((*path, "hyperparams_states", *leaf) for leaf in _leaf_paths(states))
    return _states(node.inner_state, (*path, "inner_state"), wrappers)
  if type(node) is tuple or type(node) is list:
    return [state for index, child in enumerate(node) for state in _states(child, (*path, index), wrappers)]
  return [(path, node)]


def _match(
  live: Any,
  target: Any,
  live_path: Path,
  target_path: Path,
  prefix: Path,
  moved: dict[Path, Path],
  counted: list[Path],
  wrappers: _Wrappers,
) -> None:
  """Lines up two optimizer states: chains by the order and type of what they hold, the rest field by field."""
  live_states = _states(live, live_path, wrappers)
  for path, wanted in _states(target, target_path, None):
    if live_states and _same_kind(live_states[0][1], wanted):
      source_path, source = live_states.pop(0)
      for name, wanted_child in _children(wanted):
        child = dict(_children(source))[name]
        _match_field(child, wanted_child, (*source_path, name), (*path, name), prefix, moved, counted, wrappers)
    elif isinstance(wanted, optax.ScaleByScheduleState):
      # The schedule lives in a wrapper here (an injected learning rate); its count is the updates made.
      counted.append((*path, "count"))
    else:
      found = type(live_states[0][1]).__name__ if live_states else "nothing"
      raise CheckpointError(
        f"optimizer state {format_path(path)}: pre-training's optimizer keeps {type(wanted).__name__} here, the live"
        f" one has {found}; use the optimizer that the configuration names (opt_type)"
      )
  if live_states:
    path, left = live_states[0]
    raise CheckpointError(
      f"optimizer state {format_path(path)}: {type(left).__name__} has no place in pre-training's optimizer; use the"
      " optimizer that the configuration names (opt_type)"
    )


def _match_field(
  live: Any,
  target: Any,
  live_path: Path,
  target_path: Path,
  prefix: Path,
  moved: dict[Path, Path],
  counted: list[Path],
  wrappers: _Wrappers,
) -> None:
  if isinstance(target, nnx.State):
    live_paths, target_paths = set(_leaf_paths(live)), _leaf_paths(target)
    misfits = [path for path in target_paths if (*prefix, *path) not in live_paths]
    misfits += [path for path in live_paths if path[: len(prefix)] != prefix or path[len(prefix) :] not in target_paths]
    if misfits:
      listed = ", ".join(format_path((*live_path, *path)) for path in sorted(misfits, key=str)[:10])
      raise CheckpointError(f"optimizer state does not follow the model's weights: {listed}")
    moved.update({(*target_path, *path): (*live_path, *prefix, *path) for path in target_paths})
  elif _is_leaf(target):
    if not _is_leaf(live):
      raise CheckpointError(f"optimizer state {format_path(live_path)}: pre-training keeps one array here")
    moved[target_path] = live_path
  elif not _is_stateless(target) or not _is_stateless(live):
    _match(live, target, live_path, target_path, prefix, moved, counted, wrappers)


def _same_kind(live: Any, target: Any) -> bool:
  if isinstance(live, dict) and isinstance(target, dict):
    return set(live) == set(target)
  return type(live) is type(target)


def _children(node: Any) -> list[tuple[str | int, Any]]:
  """A state's fields with the names under which `nnx.state` files them."""
  if isinstance(node, Mapping):
    return list(node.items())
  if hasattr(node, "_fields"):
    return [(name, getattr(node, name)) for name in node._fields]
  if dataclasses.is_dataclass(node):
    return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
  raise CheckpointError(f"optimizer state of type {type(node).__name__} is not known to the checkpoint layout")


def _is_leaf(node: Any) -> bool:
  return hasattr(node, "shape") and hasattr(node, "dtype")


def _leaf_paths(tree: Any) -> set[Path]:
  paths, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {tuple(_key_name(key) for key in path) for path, _ in paths}


def _key_name(key: Any) -> str | int:
  for attribute in ("key", "name", "idx"):
    if hasattr(key, attribute):
      return getattr(key, attribute)
  raise TypeError(f"unknown tree key {key!r}")


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


def raise_problems(title: str, problems: Iterable[str], *, limit: int = 20) -> None:
  """Raises one CheckpointError that lists up to `limit` problems, if there is any."""
  problems = list(problems)
  if problems:
    more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    raise CheckpointError(f"{title}: {'; '.join(problems[:limit])}{more}")


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
