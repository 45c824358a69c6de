"""Reads a step's train state, in MaxText's layout or Tunix's, as pre-training's leaves by path."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from orbax.checkpoint import v1 as ocp

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.checkpointing import layout, tunix_layout
from maxtext_posttrain.checkpointing.metadata import (
  TUNIX_OPTIMIZER,
  TUNIX_PARAMS,
  DamagedCheckpointError,
  StoredArray,
  StoredCheckpoint,
  flatten_tree,
  noted_metadata,
  noted_shapes,
  reason,
  stored_shape,
)
from maxtext_posttrain.checkpointing.names import ITEMS
from maxtext_posttrain.checkpointing.optimizer_layout import align_optimizer
from maxtext_posttrain.checkpointing.paths import (
  ADAPTER_CHILD,
  MODEL,
  OPT_STATE,
  STEP,
  FlatState,
  Path,
  as_path,
  format_path,
  raise_problems,
)


@dataclasses.dataclass(frozen=True)
class RestoredState:
  """What was read.

  Attributes:
    leaves: pre-training's leaves by path, in the coordinates of `TrainStateNNX`.
    updates: optimizer updates made when it was written.
    notes: what was absent and keeps its fresh value, one line each.
    custom_metadata: what the writer noted of the step.
  """

  leaves: FlatState
  updates: int
  notes: tuple[str, ...] = ()
  custom_metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def read_fitting_train_state(
  root: epath.Path,
  target: nnx.State,
  make_context: Callable[[], ocp.Context],
  before_reading: Callable[[], None] = lambda: None,
) -> RestoredState | None:
  """Reads a step in MaxText's layout that holds exactly what `target` asks for, without a look at its arrays before.

  What the tree's file says is compared first, for a read that Orbax breaks off leaves coroutines that complain; Orbax
  itself compares trees and shapes again. That saves opening every array once more.

  Args:
    root: the step's folder.
    target: see `read_train_state`.
    make_context: see `read_train_state`.
    before_reading: called once it is known that the step holds all that is asked for, before its arrays are read.

  Returns:
    None where it is not so, whatever the reason: `read_train_state` finds that, and says it or makes do.
  """
  wanted = maxtext_api.to_checkpoint_dict(jax.tree.map(_abstract, target))
  if "step" not in wanted or not (root / ITEMS).exists():
    return None
  context = make_context()
  context.pytree.loading.partial_load = False
  try:
    noted, written = noted_metadata(root), noted_shapes(root)
    asked = {tuple(map(str, path)): leaf for path, leaf in flatten_tree(wanted).items()}
    if asked.keys() != written.keys() or not all(_was_written(leaf, written[path]) for path, leaf in asked.items()):
      return None
    before_reading()
    with context:
      items = ocp.load_checkpointables(root, {ITEMS: wanted})[ITEMS]
  except Exception:  # As in `_load`; what it means is said there.
    return None
  return RestoredState(_leaves_from_items(items), int(items["step"]), custom_metadata=noted)


def read_train_state(
  stored: StoredCheckpoint,
  target: nnx.State,
  target_opt_state: Any,
  make_context: Callable[[], ocp.Context],
  *,
  with_optimizer: bool = True,
  before_reading: Callable[[], None] = lambda: None,
) -> RestoredState:
  """Reads what `target`, pre-training's abstract state, asks for; weights must all be there.

  Args:
    stored: from `metadata.describe_checkpoint`.
    target: abstract or concrete; its leaves' shardings say where what is read goes.
    target_opt_state: the optimizer part with optax's own types; None without an optimizer.
    make_context: a fresh Orbax context with the run's storage options and partial loading.
    with_optimizer: False reads weights and `nnx_aux` only.
    before_reading: called once it is known that the step holds the weights that are asked for, before any is read.

  Raises:
    CheckpointError: paths or shapes that do not fit, each named.
    DamagedCheckpointError: files are missing or broken.
  """
  if stored.layout == "tunix":
    return _read_tunix(
      stored, target, target_opt_state, make_context, with_optimizer=with_optimizer, before_reading=before_reading
    )
  return _read_items(stored, target, make_context, with_optimizer=with_optimizer, before_reading=before_reading)


def read_parameters(
  stored: StoredCheckpoint,
  target: nnx.State,
  make_context: Callable[[], ocp.Context],
  before_reading: Callable[[], None] = lambda: None,
) -> RestoredState:
  """Reads the weights only, as `load_parameters_path` means it."""
  params, _, _ = maxtext_api.split_for_checkpoint(target)
  weights = nnx.State({"model": params["model"]})
  return read_train_state(stored, weights, None, make_context, with_optimizer=False, before_reading=before_reading)


def _read_items(
  stored: StoredCheckpoint,
  target: nnx.State,
  make_context: Callable[[], ocp.Context],
  *,
  with_optimizer: bool,
  before_reading: Callable[[], None],
) -> RestoredState:
  wanted = maxtext_api.to_checkpoint_dict(jax.tree.map(_abstract, target))
  have = stored.arrays()
  notes: list[str] = []
  if with_optimizer and "opt_state" in wanted and not any(path[0] == "opt_state" for path in have):
    notes.append("no optimizer state here: its moments start fresh")
    wanted.pop("opt_state")
  if "step" in wanted and ("step",) not in have:
    wanted.pop("step")
  if not with_optimizer:
    wanted = {key: tree for key, tree in wanted.items() if key in ("params", "nnx_aux")}
  absent_aux = [path for path in flatten_tree(wanted.get("nnx_aux", {})) if ("nnx_aux", *path) not in have]
  if absent_aux:
    notes.append(f"{len(absent_aux)} rng or buffer entries are not here and keep their fresh value")
    wanted["nnx_aux"] = _without(wanted["nnx_aux"], absent_aux)
    if not wanted["nnx_aux"]:
      wanted.pop("nnx_aux")
  _raise_on_mismatch(stored, flatten_tree(wanted), have, sections=set(wanted) - {"nnx_aux"})
  before_reading()
  restored = _load(stored, {ITEMS: wanted}, make_context)[ITEMS]
  leaves = _leaves_from_items(restored)
  updates = int(restored["step"]) if "step" in restored else _step_of_folder(stored)
  return RestoredState(leaves, updates, tuple(notes), stored.custom_metadata)


def _was_written(leaf: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> bool:
  """Whether an array like this is written in that shape: whole, or in parts as it is sharded."""
  if shape == stored_shape(leaf):
    return True
  is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  return not is_key and leaf.sharding is not None and shape == tuple(leaf.sharding.shard_shape(leaf.shape))


def _leaves_from_items(items: Mapping[str, Any]) -> FlatState:
  """A restored `items` tree as leaves by path, in the coordinates of `TrainStateNNX`."""
  leaves: FlatState = {}
  for path, leaf in flatten_tree(items["params"]["params"]).items():
    leaves[(*MODEL, *path)] = leaf
  for path, leaf in flatten_tree(items.get("nnx_aux", {})).items():
    leaves[path] = leaf
  for path, leaf in flatten_tree(maxtext_api.opt_state_from_checkpoint(items.get("opt_state"))).items():
    leaves[(*OPT_STATE, *path)] = leaf
  if "step" in items:
    leaves[STEP] = items["step"]
  return leaves


def _read_tunix(
  stored: StoredCheckpoint,
  target: nnx.State,
  target_opt_state: Any,
  make_context: Callable[[], ocp.Context],
  *,
  with_optimizer: bool,
  before_reading: Callable[[], None],
) -> RestoredState:
  params_state, aux_state, _ = maxtext_api.split_for_checkpoint(target)
  target_flat = layout.flatten_state(target)
  wanted_params = [path[1:] for path in layout.flatten_state(params_state) if path[:1] == MODEL]
  have_params = flatten_tree(tunix_layout.unbox(stored.trees[TUNIX_PARAMS]))
  depth = layout.find_adapter_depth(have_params, dict.fromkeys(wanted_params))
  prefix = (ADAPTER_CHILD,) * depth
  # Buffers lie among the weights; those that an older model had not keep their fresh value, as in `items`.
  buffers = [
    as_path(path[1:]) for path, variable in nnx.to_flat_state(aux_state) if not isinstance(variable, nnx.RngState)
  ]
  wanted = [*wanted_params, *(path for path in buffers if (*prefix, *path) in have_params)]
  sources: dict[str, dict[Path, Path]] = {TUNIX_PARAMS: {(*MODEL, *path): (*prefix, *path) for path in wanted}}
  notes = ["written in Tunix's layout; the next save is in MaxText's", "rng state of Tunix's layout is not used"]
  problems = [
    f"{format_path(path)}: missing" for path, source in sources[TUNIX_PARAMS].items() if source not in have_params
  ]
  problems += [
    f"{format_path(path)}: in the checkpoint, but not in the model"
    for path in have_params
    if (*MODEL, *path[depth:]) not in target_flat and not _is_rng_state(path)
  ]
  raise_problems(f"checkpoint {stored.root / TUNIX_PARAMS} does not fit the model", problems)
  counted: list[Path] = []
  have = {TUNIX_PARAMS: have_params}
  if with_optimizer and target_opt_state is not None:
    if TUNIX_OPTIMIZER in stored.trees:
      tree = tunix_layout.unbox(stored.trees[TUNIX_OPTIMIZER])
      typed = tunix_layout.typed_opt_state(tree.get("opt_state", tree))
      alignment = align_optimizer(typed, target_opt_state, depth)
      counted = alignment.counted
      sources[TUNIX_OPTIMIZER] = {path: source[1:] for path, source in alignment.moved.items()}
      have[TUNIX_OPTIMIZER] = {tuple(map(_digit, path)): leaf for path, leaf in flatten_tree(tree).items()}
    else:
      notes.append("no optimizer state here: its moments start fresh")
  problems = [
    f"{format_path(path)}: shape {have[item][source].shape} on disk, {stored_shape(target_flat[path])} wanted"
    for item, paths in sources.items()
    for path, source in paths.items()
    if have[item][source].shape != stored_shape(target_flat[path])
  ]
  raise_problems(f"checkpoint {stored.root} does not fit the model", problems)
  requests = {
    item: _boxed_request(stored.trees[item], {source: target_flat[path] for path, source in paths.items()})
    for item, paths in sources.items()
  }
  before_reading()
  loaded = {
    item: {tuple(map(_digit, path)): leaf for path, leaf in flatten_tree(tunix_layout.unbox(tree)).items()}
    for item, tree in _load(stored, requests, make_context).items()
  }
  leaves = {path: loaded[item][source] for item, paths in sources.items() for path, source in paths.items()}
  updates = _step_of_folder(stored)
  for path in counted:
    leaves[path] = np.asarray(updates, dtype=target_flat[path].dtype)
  if with_optimizer:
    leaves[STEP] = np.asarray(updates, dtype=np.uint32)
  return RestoredState(leaves, updates, tuple(notes), stored.custom_metadata)


def _is_rng_state(path: Path) -> bool:
  return path[-1] in ("key", "count") and not {"rngs", "dropout"}.isdisjoint(path)


def _digit(key: str | int) -> str | int:
  return int(key) if isinstance(key, str) and key.isdigit() else key


def _boxed_request(tree: Any, wanted: Mapping[Path, Any], path: Path = ()) -> Any:
  """The part of a stored tree that is wanted, with its `value` boxes, as abstract arrays."""
  if isinstance(tree, Mapping):
    children: dict[str, Any] = {}
    for key, value in tree.items():
      # Attention has a module that is truly called `value`; a box has an array in it.
      boxed = key == "value" and len(tree) == 1 and not isinstance(value, Mapping)
      child = _boxed_request(value, wanted, path if boxed else (*path, _digit(key)))
      if child is not None:
        children[key] = child
    return children or None
  return _abstract(wanted[path]) if isinstance(tree, StoredArray) and path in wanted else None


def _abstract(leaf: Any) -> Any:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def _without(tree: Any, absent: list[Path]) -> Any:
  """A nested dict without the leaves at `absent`, and without dicts that this empties."""
  gone = set(absent)

  def prune(node: Any, path: Path) -> Any:
    if not isinstance(node, Mapping):
      return None if path in gone else node
    kept = {key: child for key, value in node.items() if (child := prune(value, (*path, key))) is not None}
    return kept or None

  return prune(tree, ()) or {}


def _raise_on_mismatch(
  stored: StoredCheckpoint, wanted: Mapping[Path, Any], have: Mapping[Path, StoredArray], *, sections: set[str]
) -> None:
  problems = [f"{format_path(path)}: not in the checkpoint" for path in wanted if path not in have]
  problems += [
    f"{format_path(path)}: in the checkpoint, but not in the model"
    for path in have
    if path[0] in sections and path not in wanted
  ]
  problems += [
    f"{format_path(path)}: shape {have[path].shape} on disk, {stored_shape(leaf)} wanted"
    for path, leaf in wanted.items()
    if path in have and have[path].shape != stored_shape(leaf)
  ]
  hint = _scan_hint(stored, wanted, have) or _key_hint(wanted, have) if problems else ""
  raise_problems(f"checkpoint {stored.root} does not fit the model{hint}", problems)


def _scan_hint(stored: StoredCheckpoint, wanted: Mapping[Path, Any], have: Mapping[Path, StoredArray]) -> str:
  """Scanned weights lie under `layers`, unscanned ones under `layers_<n>`; the most common reason for a misfit."""

  def scanned(paths: Mapping[Path, Any]) -> bool:
    return any(key in ("layers", "scanned_blocks") for path in paths for key in path)

  written = stored.custom_metadata.get("scan_layers", scanned(have))
  return f" (it was written with scan_layers={str(written).lower()}; set that)" if written != scanned(wanted) else ""


def _key_hint(wanted: Mapping[Path, Any], have: Mapping[Path, StoredArray]) -> str:
  """JAX's default rng keys have two words, those that pre-training sets have four."""
  for path, leaf in wanted.items():
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    if is_key and path in have and have[path].shape[-1:] != stored_shape(leaf)[-1:]:
      return (
        f" (its rng keys are not of pre-training's kind, {maxtext_api.PRNG_IMPL}; load its weights alone with"
        " load_parameters_path)"
      )
  return ""


def _load(
  stored: StoredCheckpoint, wanted: Mapping[str, Any], make_context: Callable[[], ocp.Context]
) -> dict[str, Any]:
  try:
    with make_context():
      return ocp.load_checkpointables(stored.root, dict(wanted))
  except Exception as error:  # Orbax and TensorStore raise many types for a broken file; all of them mean this one.
    raise DamagedCheckpointError(f"checkpoint {stored.root} is damaged: {reason(error)}") from error


def _step_of_folder(stored: StoredCheckpoint) -> int:
  return int(stored.root.name) if stored.root.name.isdigit() else 0
