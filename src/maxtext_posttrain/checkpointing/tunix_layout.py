"""Reads what Tunix's own checkpoint manager wrote: `model_params` and `optimizer_state`.

Its trees are nested dicts with a `value` box at each leaf and, for a sequence, keys that are digits. Optax's types are
not stored, so they are told by the fields a node has; the typed tree then goes through the same alignment as a live
optimizer (`layout.plan_layout`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax
from flax import nnx

_BOX = "value"
_STATE_TYPES: tuple[type, ...] = (
  optax.ScaleByAdamState,
  optax.MultiStepsState,
  optax.InjectStatefulHyperparamsState,
  optax.InjectHyperparamsState,
  optax.ScaleByScheduleState,
  optax.TraceState,
  optax.MaskedState,
  optax.transforms.PartitionState,
)


def unbox(tree: Any) -> Any:
  """The tree without the `value` level above each leaf."""
  if not isinstance(tree, Mapping):
    return tree
  if set(tree) == {_BOX} and not isinstance(tree[_BOX], Mapping):
    return tree[_BOX]
  return {key: unbox(child) for key, child in tree.items()}


def typed_opt_state(tree: Any) -> Any:
  """The unboxed `optimizer_state` tree with optax's types put back.

  A node whose keys are all digits is a chain; holes in it are stateless links. A node with exactly the fields of a
  known optax state is that state. What lies below `mu`, `nu` and the like stays a tree of weights.
  """
  if not isinstance(tree, Mapping):
    return tree
  if tree and all(str(key).isdigit() for key in tree):
    chain: list[Any] = [optax.EmptyState()] * (max(int(key) for key in tree) + 1)
    for key, child in tree.items():
      chain[int(key)] = typed_opt_state(child)
    return tuple(chain)
  for state_type in _STATE_TYPES:
    if _has_fields_of(tree, state_type):
      fields = {name: _field(name, tree.get(name)) for name in getattr(state_type, "_fields", ())}
      return state_type(**fields)
  return {key: typed_opt_state(child) for key, child in tree.items()}


_WEIGHT_FIELDS = frozenset({"mu", "nu", "trace", "acc_grads"})
_EMPTY_FIELDS = frozenset({"skip_state", "hyperparams_states"})


def _has_fields_of(tree: Mapping[str, Any], state_type: type) -> bool:
  fields = set(getattr(state_type, "_fields", ()))
  return set(tree) <= fields and fields - set(tree) <= _EMPTY_FIELDS


def _field(name: str, child: Any) -> Any:
  if child is None:
    return ()
  if name in _WEIGHT_FIELDS:
    return nnx.State(child) if isinstance(child, Mapping) else child
  return typed_opt_state(child)
