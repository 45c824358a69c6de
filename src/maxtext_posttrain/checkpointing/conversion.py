"""Turns a checkpoint in Tunix's layout into one in MaxText's, and reads it back to see that it is the same."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from orbax.checkpoint import v1 as ocp

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.checkpointing import layout, reader, streaming
from maxtext_posttrain.checkpointing.locations import find_step
from maxtext_posttrain.checkpointing.metadata import (
  TUNIX_OPTIMIZER,
  KeyPath,
  StoredCheckpoint,
  describe_checkpoint,
  flatten_tree,
  reason,
)
from maxtext_posttrain.checkpointing.names import CHECKPOINTS, ITEMS
from maxtext_posttrain.checkpointing.paths import format_path
from maxtext_posttrain.checkpointing.storage import StorageOptions
from maxtext_posttrain.config import Config
from maxtext_posttrain.config.saved import save_config
from maxtext_posttrain.errors import CheckpointError
from maxtext_posttrain.maxtext_api import PretrainingState

_NOT_FOR_CONVERSION = re.compile(r"(ici|dcn)_\w+_parallelism|load_parameters_path|load_full_state_path")
_FIXED: Mapping[str, Any] = {
  "run_name": "conversion",
  "hardware": "cpu",
  "skip_jax_distributed_system": True,
  "enable_checkpointing": False,
}


@dataclasses.dataclass(frozen=True)
class Conversion:
  """What was written.

  Attributes:
    step_folder: the new step.
    step: optimizer updates made.
    arrays: how many were written, and read back.
    nbytes: their size.
    notes: what was absent.
  """

  step_folder: Path
  step: int
  arrays: int
  nbytes: int
  notes: tuple[str, ...]


def convert(old: str, new: Path, config: Config, *, step: int | None = None) -> Conversion:
  """Writes the run's folder `new` with one step of `old` in MaxText's layout, and its configuration.

  The whole state is in memory once. `new` appears only when everything in it was read back and is the same bit for bit.

  Args:
    old: a run's folder, its `checkpoints`, or a step's folder, in Tunix's layout.
    new: a folder that does not exist.
    config: of the run that wrote it: model, optimizer, storage.
    step: which step; the newest by default.

  Raises:
    CheckpointError: there is nothing to convert, it does not fit the configuration, or it can't be written.
    ConfigError: MaxText refuses the configuration.
  """
  _refuse_existing(new)
  stored = describe_checkpoint(find_step(old, step=step).root)
  if stored.layout != "tunix":
    raise CheckpointError(f"{stored.root} is in MaxText's layout already; there is nothing to convert")
  pretraining = _pretraining_state(config)
  storage = StorageOptions.of(None, config)
  with_optimizer = TUNIX_OPTIMIZER in stored.trees
  restored = reader.read_train_state(
    stored, pretraining.state, pretraining.opt_state, storage.context, with_optimizer=with_optimizer
  )
  items = _items(pretraining, restored.leaves)
  temporary = new.with_name(f"{new.name}.unfinished")
  try:
    with _one_line(new):
      temporary.mkdir(parents=True)
      written = temporary / CHECKPOINTS / str(restored.updates)
      with storage.context():
        ocp.save_checkpointables(
          str(written.absolute()), {ITEMS: items}, custom_metadata={"scan_layers": bool(config.scan_layers)}
        )
    arrays = verify(describe_checkpoint(str(written.absolute())), items)
    save_config(config, temporary)
    with _one_line(new):
      _refuse_existing(new)
      temporary.rename(new)
  except BaseException:
    shutil.rmtree(temporary, ignore_errors=True)
    raise
  return Conversion(
    step_folder=new / CHECKPOINTS / str(restored.updates),
    step=restored.updates,
    arrays=len(arrays),
    nbytes=sum(arrays.values()),
    notes=restored.notes[1:],
  )


def verify(stored: StoredCheckpoint, items: Mapping[str, Any]) -> dict[KeyPath, int]:
  """Reads `items` back from disk a few arrays at a time and compares them with those in memory, bit for bit.

  Returns:
    The size of each array.

  Raises:
    CheckpointError: something is missing or differs.
  """
  wanted = flatten_tree(items)
  have = stored.arrays(ITEMS)
  as_text = {tuple(map(str, path)): path for path in have}
  missing = [path for path in wanted if tuple(map(str, path)) not in as_text]
  surplus = len(have) - (len(wanted) - len(missing))
  if missing or surplus:
    raise CheckpointError(f"{stored.root}: reading it back found {len(missing)} arrays missing and {surplus} too many")
  memory = {as_text[tuple(map(str, path))]: leaf for path, leaf in wanted.items()}
  for group in streaming.groups(have):
    for path, on_disk in streaming.read_arrays(stored, ITEMS, group).items():
      in_memory = np.asarray(memory[path])
      if (on_disk.dtype, on_disk.shape) != (in_memory.dtype, in_memory.shape) or not _same_bits(on_disk, in_memory):
        raise CheckpointError(f"{stored.root}: {format_path(path)} was read back other than it was written")
  return {path: streaming.array_bytes(array) for path, array in have.items()}


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
  words = np.dtype(f"V{a.dtype.itemsize}")
  return bool(np.array_equal(np.ascontiguousarray(a).view(words), np.ascontiguousarray(b).view(words)))


def _pretraining_state(config: Config) -> PretrainingState:
  """What pre-training would build, on whatever devices are here: arrays' shapes do not depend on the mesh."""
  maxtext_api.use_pretraining_prng()
  overrides = {
    key: value for key, value in config.maxtext_overrides().items() if not _NOT_FOR_CONVERSION.fullmatch(key)
  }
  maxtext = maxtext_api.build_config({**overrides, **_FIXED}, hidden_environment=config.environment)
  return maxtext_api.pretraining_state(maxtext, maxtext_api.build_mesh(maxtext))


def _items(pretraining: PretrainingState, leaves: Mapping[KeyPath, Any]) -> dict[str, Any]:
  """The `items` tree of what was read; what was not, the rng state above all, is left out."""
  state: nnx.State = layout.replace_leaves(pretraining.state, leaves)
  tree = maxtext_api.to_checkpoint_dict(state)
  return {section: kept for section, child in tree.items() if (kept := _read(child)) is not None}


def _read(tree: Any) -> Any:
  if isinstance(tree, Mapping):
    children = {key: kept for key, child in tree.items() if (kept := _read(child)) is not None}
    return children or None
  if isinstance(tree, (list, tuple)):
    children = [_read(child) for child in tree]
    return children if any(child is not None for child in children) else None
  return None if isinstance(tree, jax.ShapeDtypeStruct) else tree


def _refuse_existing(new: Path) -> None:
  if new.exists() or new.is_symlink():
    raise CheckpointError(f"{new} exists; name a folder that does not, nothing is overwritten")


@contextlib.contextmanager
def _one_line(new: Path) -> Iterator[None]:
  try:
    yield
  except (OSError, ValueError) as error:
    raise CheckpointError(f"{new} can't be written: {reason(error)}; make room, or name another folder") from error
