"""Lines up two optimizer states by optax's own types: a live or stored one, and the one pre-training keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from flax import nnx

from maxtext_posttrain.checkpointing.paths import ADAPTER_CHILD, OPT_STATE, Path, format_path
from maxtext_posttrain.errors import CheckpointError

_INJECT_TYPES = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)


@dataclasses.dataclass
class OptimizerAlignment:
  """Where each leaf of pre-training's optimizer state is in another one; filled by `match`.

  Attributes:
    prefix: what stands above the model's paths in the other state: the adapter's levels.
    moved: pre-training's path to the other's.
    counted: pre-training's scalar paths that are the number of updates, without a leaf of their own.
    updates_path: the other's scalar that counts updates, where a wrapper holds it.
    wrapper_counts: the wrappers' scalars that count updates.
    wrapper_zeros: the wrappers' leaves that are zero between updates.
    wrapper_values: the wrappers' leaves whose value must be kept.
    micro_steps: whether `optax.MultiSteps` accumulates gradients.
  """

  prefix: Path = ()
  moved: dict[Path, Path] = dataclasses.field(default_factory=dict)
  counted: list[Path] = dataclasses.field(default_factory=list)
  updates_path: Path | None = None
  wrapper_counts: list[Path] = dataclasses.field(default_factory=list)
  wrapper_zeros: list[Path] = dataclasses.field(default_factory=list)
  wrapper_values: list[Path] = dataclasses.field(default_factory=list)
  micro_steps: bool = False

  def match(self, live: Any, target: Any, live_path: Path = OPT_STATE, target_path: Path = OPT_STATE) -> None:
    """Lines up two optimizer states: chains by the order and type of what they hold, the rest field by field.

    Args:
      live: the live or stored state, with optax's own types.
      target: pre-training's, likewise.
      live_path: where `live` is.
      target_path: where `target` is.

    Raises:
      CheckpointError: the two are of different optimizers.
    """
    live_states = self._peel(live, live_path)
    for path, wanted in _states(target, target_path):
      if live_states and _same_kind(live_states[0][1], wanted):
        source_path, source = live_states.pop(0)
        children = dict(_children(source))
        for name, wanted_child in _children(wanted):
          self._match_field(children[name], wanted_child, (*source_path, name), (*path, name))
      elif isinstance(wanted, optax.ScaleByScheduleState):
        # The schedule lives in a wrapper here (an injected learning rate); its count is the updates made.
        self.counted.append((*path, "count"))
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

  def _match_field(self, live: Any, target: Any, live_path: Path, target_path: Path) -> None:
    prefix = self.prefix
    if isinstance(target, nnx.State):
      live_paths, target_paths = set(_leaf_paths(live)), _leaf_paths(target)
      misfits = [path for path in target_paths if (*prefix, *path) not in live_paths]
      misfits += [
        path for path in live_paths if path[: len(prefix)] != prefix or path[len(prefix) :] not in target_paths
      ]
      if misfits:
        listed = ", ".join(format_path((*live_path, *path)) for path in sorted(misfits, key=str)[:10])
        raise CheckpointError(f"optimizer state does not follow the model's weights: {listed}")
      self.moved.update({(*target_path, *path): (*live_path, *prefix, *path) for path in target_paths})
    elif _is_leaf(target):
      if not _is_leaf(live):
        raise CheckpointError(f"optimizer state {format_path(live_path)}: pre-training keeps one array here")
      self.moved[target_path] = live_path
    elif not _is_stateless(target) or not _is_stateless(live):
      self.match(live, target, live_path, target_path)

  def _peel(self, node: Any, path: Path) -> list[tuple[Path, Any]]:
    """The stateful optax states under chains and wrappers, in order; what the wrappers hold is recorded."""
    if isinstance(node, optax.MultiStepsState):
      self.updates_path = (*path, "gradient_step")
      self.micro_steps = True
      self.wrapper_counts.append((*path, "gradient_step"))
      self.wrapper_zeros.append((*path, "mini_step"))
      self.wrapper_zeros.extend((*path, "acc_grads", *leaf) for leaf in _leaf_paths(node.acc_grads))
      return self._peel(node.inner_opt_state, (*path, "inner_opt_state"))
    if isinstance(node, _INJECT_TYPES):
      self.updates_path = self.updates_path or (*path, "count")
      self.wrapper_counts.append((*path, "count"))
      self.wrapper_values.extend((*path, "hyperparams", *leaf) for leaf in _leaf_paths(node.hyperparams))
      states = getattr(node, "hyperparams_states", {})
      self.wrapper_counts.extend((*path, "hyperparams_states", *leaf) for leaf in _leaf_paths(states))
      return self._peel(node.inner_state, (*path, "inner_state"))
    return _states(node, path, self._peel)


def align_optimizer(stored: Any, target: Any, adapter_depth: int) -> OptimizerAlignment:
  """Lines up a stored optimizer state with pre-training's, both with optax's own types.

  Raises:
    CheckpointError: the two are of different optimizers.
  """
  alignment = OptimizerAlignment((ADAPTER_CHILD,) * adapter_depth)
  alignment.match(stored, target)
  return alignment


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


def _is_stateless(node: Any) -> bool:
  return not jax.tree.leaves(node)


def _is_wrapper(node: Any) -> bool:
  return isinstance(node, (optax.MultiStepsState, *_INJECT_TYPES))


def _states(
  node: Any, path: Path, below: Callable[[Any, Path], list[tuple[Path, Any]]] | None = None
) -> list[tuple[Path, Any]]:
  """The stateful optax states of a chain, in order; `below` says what is under each of its links."""
  if _is_stateless(node):
    return []
  if type(node) is tuple or type(node) is list:
    return [state for index, child in enumerate(node) for state in (below or _states)(child, (*path, index))]
  return [(path, node)]


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
