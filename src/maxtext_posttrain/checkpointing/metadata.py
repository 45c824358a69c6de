"""What a checkpoint says of itself: its step's metadata and the tree of each item, without reading an array."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from maxtext_posttrain.checkpointing.names import CHECKPOINTS, ITEMS
from maxtext_posttrain.errors import CheckpointError

logger = logging.getLogger(__name__)

TUNIX_PARAMS = "model_params"
TUNIX_OPTIMIZER = "optimizer_state"
DATA_POSITION = "post_train_iter"
TREE_METADATA = "_METADATA"
"""The file of an item in which Orbax keeps its tree."""
STEP_METADATA = "_CHECKPOINT_METADATA"
"""The file of a step's folder in which Orbax keeps what was noted of the step."""

Layout = Literal["maxtext", "tunix"]
KeyPath = tuple[str | int, ...]


class DamagedCheckpointError(CheckpointError):
  """The checkpoint's own files can't be read, whatever model asks for them."""


@dataclasses.dataclass(frozen=True)
class StoredArray:
  """Shape and dtype of an array on disk."""

  shape: tuple[int, ...]
  dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class StoredCheckpoint:
  """One step on disk.

  Attributes:
    root: the step's folder, the parent of its items.
    layout: `maxtext` (one `items` tree) or `tunix` (`model_params` and `optimizer_state`).
    trees: each item's nested tree of `StoredArray`.
    custom_metadata: what the writer noted of the step, for example `scan_layers`.
  """

  root: epath.Path
  layout: Layout
  trees: Mapping[str, Any]
  custom_metadata: Mapping[str, Any]

  def arrays(self, item: str = ITEMS) -> dict[KeyPath, StoredArray]:
    """The item's arrays by path."""
    return flatten_tree(self.trees[item])


def flatten_tree(tree: Any) -> dict[KeyPath, Any]:
  """Leaves of nested dicts and lists by path; `None` stands for no leaf."""
  if isinstance(tree, Mapping):
    children = list(tree.items())
  elif isinstance(tree, (list, tuple)):
    children = list(enumerate(tree))
  else:
    return {} if tree is None else {(): tree}
  return {(key, *path): leaf for key, child in children for path, leaf in flatten_tree(child).items()}


def step_root(path: epath.PathLike) -> epath.Path:
  """The step's folder for a path that names it, or one of its items."""
  path = epath.Path(str(path).rstrip("/"))
  return path.parent if path.name in (ITEMS, TUNIX_PARAMS, TUNIX_OPTIMIZER) else path


def noted_metadata(root: epath.Path) -> dict[str, Any]:
  """The step's custom metadata, read from its file alone and not through its items.

  Raises:
    OSError: there is no such file.
    ValueError: it is not what Orbax writes.
  """
  noted = json.loads((root / STEP_METADATA).read_text())
  if not isinstance(noted, Mapping):
    raise ValueError(f"{root / STEP_METADATA} is not a JSON object")
  return _json_object(noted.get("custom_metadata"))


def noted_shapes(root: epath.Path) -> dict[tuple[str, ...], tuple[int, ...]]:
  """The shape in which each array of the step's items was written, by path, without opening an array.

  It is the array's own where one device held all of it, else that of a device's part.

  Raises:
    OSError: the file that says it is missing.
    ValueError: it is not what Orbax writes.
    KeyError: likewise.
    TypeError: likewise.
  """
  leaves = json.loads((root / ITEMS / TREE_METADATA).read_text())["tree_metadata"].values()
  written = {
    tuple(str(part["key"]) for part in leaf["key_metadata"]): leaf["value_metadata"].get("write_shape")
    for leaf in leaves
  }
  return {path: tuple(shape) for path, shape in written.items() if shape is not None}


def load_step_metadata(path: epath.PathLike) -> dict[str, Any]:
  """The step's custom metadata, found at `path` or at its parent; `{}` with one warning where neither has any."""
  path = epath.Path(str(path).rstrip("/"))
  reasons = []
  for candidate in (path, path.parent):
    try:
      return _json_object(ocp.checkpointables_metadata(candidate).custom_metadata)
    except (ValueError, OSError, KeyError) as error:
      reasons.append(f"{candidate}: {type(error).__name__}")
  logger.warning("no checkpoint metadata at %s or its parent (%s)", path, "; ".join(reasons))
  return {}


def describe_checkpoint(path: epath.PathLike) -> StoredCheckpoint:
  """Reads what a step's folder holds.

  Args:
    path: the step's folder, or its `items` or `model_params`.

  Raises:
    CheckpointError: there is no checkpoint there, or its layout is neither MaxText's nor Tunix's.
    DamagedCheckpointError: there is one, and its metadata can't be read.
  """
  root = step_root(path)
  if not root.exists():
    raise CheckpointError(f"no checkpoint at {root}: the path does not exist; name a step's folder or its {ITEMS}")
  items = [name for name in (ITEMS, TUNIX_PARAMS) if (root / name).exists()]
  try:
    metadata = ocp.checkpointables_metadata(root)
    trees = {name: _stored_tree(tree) for name, tree in metadata.metadata.items() if isinstance(tree, (dict, list))}
  except (ValueError, OSError, KeyError, TypeError) as error:
    if items:
      raise DamagedCheckpointError(f"checkpoint {root} is damaged: {reason(error)}") from error
    raise CheckpointError(
      f"no readable checkpoint at {root}: {_wanted_instead(root)} ({reason(error, length=120)})"
    ) from error
  if ITEMS in trees:
    layout: Layout = "maxtext"
  elif TUNIX_PARAMS in trees:
    layout = "tunix"
  elif items:
    raise DamagedCheckpointError(f"checkpoint {root} is damaged: the tree of its {items[0]} can't be read")
  else:
    names = ", ".join(sorted(trees)) or "nothing"
    raise CheckpointError(
      f"checkpoint at {root} holds {names}: expected MaxText's {ITEMS} or Tunix's {TUNIX_PARAMS};"
      f" {_wanted_instead(root)}"
    )
  return StoredCheckpoint(root, layout, trees, _json_object(metadata.custom_metadata))


def _wanted_instead(root: epath.Path) -> str:
  """What to name in place of a path without a checkpoint: its newest step, where it is a run's folder."""
  for folder in (root, root / CHECKPOINTS):
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    if steps:
      return f"name a step's folder, for example {folder / str(max(steps))}"
  return f"name a step's folder, as <run>/checkpoints/<step>, or its {ITEMS}"


def _json_object(value: Any) -> dict[str, Any]:
  return dict(value) if isinstance(value, Mapping) else {}


def _stored_tree(tree: Any) -> Any:
  if isinstance(tree, Mapping):
    return {key: _stored_tree(child) for key, child in tree.items()}
  if isinstance(tree, (list, tuple)):
    return [_stored_tree(child) for child in tree]
  if hasattr(tree, "shape") and hasattr(tree, "dtype"):
    return StoredArray(tuple(tree.shape), np.dtype(tree.dtype))
  return None


def stored_shape(leaf: Any) -> tuple[int, ...]:
  """The shape a leaf has on disk: a typed rng key is stored as its words."""
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return tuple(jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)).shape)
  return tuple(leaf.shape)


def reason(error: BaseException, *, length: int = 300) -> str:
  """An exception's own words on one short line: where they are many, the first and, for the cause, the last.

  What the operating system said comes first: TensorStore has it somewhere in the middle, or as a number alone.
  """
  text = " ".join(str(error).split())
  code = re.search(r"os_error_code='(\d+)'", text)
  if code is not None:
    text = f"{os.strerror(int(code[1]))}: {text}"
  if len(text) > length:
    text = f"{text[: length // 2]} ... {text[-length // 2 :]}"
  return f"{type(error).__name__}: {text}" if text else type(error).__name__
