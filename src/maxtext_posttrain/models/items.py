"""Weights on disk in MaxText's layout: `params/params/...` of a step's `items`, written and read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.checkpointing.metadata import DamagedCheckpointError, describe_checkpoint, reason
from maxtext_posttrain.checkpointing.names import ITEMS
from maxtext_posttrain.errors import CheckpointError, ModelError
from maxtext_posttrain.lora.record import refuse_adapter

_PREFIX = ("params", "params")


def write_items(step_folder: Path, parameters: Mapping[tuple[str, ...], np.ndarray], *, scan_layers: bool) -> None:
  """Writes `step_folder/items` as pre-training's `load_parameters_path` reads it.

  Args:
    step_folder: the step's folder, which does not exist yet.
    parameters: by path below `params/params`.
    scan_layers: noted in the step's metadata.

  Raises:
    ModelError: it could not be written.
  """
  tree: dict[str, Any] = {}
  for path, array in parameters.items():
    node = tree
    for key in path[:-1]:
      node = node.setdefault(key, {})
    node[path[-1]] = array
  items = {"params": {"params": tree}, "step": np.asarray(0, np.int32)}
  maxtext_api.quiet_logs(show=False)
  try:
    context = maxtext_api.build_orbax_context(use_ocdbt=True, use_zarr3=True)
    context.memory.deepcopy_host_arrays = False  # Nothing changes them until the save is done.
    with context:
      ocp.save_checkpointables(str(step_folder), {ITEMS: items}, custom_metadata={"scan_layers": scan_layers})
  except (OSError, ValueError, RuntimeError) as error:
    raise ModelError(f"{step_folder.parent} could not be written: {reason(error)}; is there room?") from error


def read_parameters(items: str, *, adapter: bool = False) -> tuple[dict[tuple[str, ...], np.ndarray], bool]:
  """The weights of a step in MaxText's layout, by path below `params/params`, as they are stored.

  Args:
    items: a step's folder or its `items`.
    adapter: read a LoRA adapter's A and B; without it a step that holds an adapter is refused.

  Returns:
    The weights, and whether layers are scanned.

  Raises:
    CheckpointError: there is no such checkpoint, or it is damaged.
  """
  maxtext_api.quiet_logs(show=False)
  stored = describe_checkpoint(items)
  if stored.layout != "maxtext":
    raise CheckpointError(f"checkpoint {stored.root} is in Tunix's layout; posttrain convert makes it MaxText's")
  if not adapter:
    refuse_adapter(stored.custom_metadata, str(stored.root))
  arrays = {path: leaf for path, leaf in stored.arrays().items() if path[:2] == _PREFIX}
  if not arrays:
    raise CheckpointError(f"checkpoint {stored.root} holds no weights at {'/'.join(_PREFIX)}")
  device = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
  wanted: dict[str | int, Any] = {}
  for path, leaf in arrays.items():
    node: Any = wanted
    for key in path[:-1]:
      node = node.setdefault(key, {})
    node[path[-1]] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
  try:
    with maxtext_api.build_orbax_context(use_ocdbt=True, use_zarr3=True, partial_load=True):
      loaded = ocp.load_checkpointables(stored.root, {ITEMS: wanted})[ITEMS]
  except Exception as error:  # Orbax and TensorStore raise many types for a broken file; all of them mean this one.
    raise DamagedCheckpointError(f"checkpoint {stored.root} is damaged: {reason(error)}") from error
  parameters = {}
  for path in arrays:
    node = loaded
    for key in path:
      node = node[key]
    parameters[tuple(map(str, path[2:]))] = np.asarray(node)  # A view: the array lies on the host.
  scanned = any(path[1:2] == ("layers",) for path in parameters)
  return parameters, bool(stored.custom_metadata.get("scan_layers", scanned))
