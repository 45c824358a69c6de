"""All there is to know of a checkpoint without a model: from its metadata, and the few numbers that count steps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

from etils import epath

from maxtext_posttrain.checkpointing import diagnosis, streaming
from maxtext_posttrain.checkpointing.diagnosis import Diagnosis, Place
from maxtext_posttrain.checkpointing.locations import Location, bytes_on_disk, find_step
from maxtext_posttrain.checkpointing.metadata import (
  DATA_POSITION,
  TUNIX_OPTIMIZER,
  TUNIX_PARAMS,
  DamagedCheckpointError,
  StoredCheckpoint,
  describe_checkpoint,
  flatten_tree,
)
from maxtext_posttrain.checkpointing.names import ITEMS
from maxtext_posttrain.errors import CheckpointError

Contents = Literal["maxtext", "weights", "adapter", "tunix", "damaged", "unknown"]

LAYOUTS: Mapping[str, str] = {
  "maxtext": "MaxText's items, with an optimizer",
  "weights": "MaxText's items, weights alone",
  "adapter": "MaxText's items of a LoRA adapter, without the base it was trained over",
  "tunix": "Tunix's model_params and optimizer_state, which pre-training does not read",
  "damaged": "a checkpoint whose files can't be read",
  "unknown": "neither MaxText's layout nor Tunix's",
}
_MAX_POSITION_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Inspection:
  """What is known of a step.

  Attributes:
    location: where it lies.
    layout: what it is; see `LAYOUTS`.
    problem: why it is `damaged` or `unknown`.
    stored: its described trees; None where they can't be read.
    counts: values of its steps and counts by path.
    diagnosis: what it is worth to pre-training; None where nothing can be read.
    data_positions: files of the saved data position and what they hold, None for one that can't be read.
    bytes_on_disk: of its arrays' folders.
  """

  location: Location
  layout: Contents
  problem: str | None = None
  stored: StoredCheckpoint | None = None
  counts: Mapping[Any, int] = dataclasses.field(default_factory=dict)
  diagnosis: Diagnosis | None = None
  data_positions: Mapping[str, Mapping[str, Any] | None] = dataclasses.field(default_factory=dict)
  bytes_on_disk: int = 0

  @property
  def trees(self) -> dict[str, Any]:
    """The trees of arrays by item."""
    if self.stored is None:
      return {}
    names = (ITEMS, TUNIX_PARAMS, TUNIX_OPTIMIZER)
    return {name: self.stored.trees[name] for name in names if name in self.stored.trees}

  @property
  def weights(self) -> Any:
    """The tree of weights, rng state left out where the layout tells it apart."""
    if self.layout == "tunix":
      return self.trees[TUNIX_PARAMS]
    return self.trees.get(ITEMS, {}).get("params")

  @property
  def step(self) -> int | None:
    """The step inside: optimizer updates made."""
    if self.layout == "tunix":
      return self.location.folder_step
    return self.counts.get(("step",))

  @property
  def state_bytes(self) -> int:
    """Of all arrays, uncompressed."""
    return diagnosis.state_bytes(self.trees)

  @property
  def scan_layers(self) -> bool | None:
    """Whether layers are stacked; by the weights, or else by the metadata."""
    found = diagnosis.is_scanned(self.weights)
    if found is None and self.stored is not None:
      written = self.stored.custom_metadata.get("scan_layers")
      found = written if isinstance(written, bool) else None
    return found


def inspect_step(path: epath.PathLike, *, step: int | None = None) -> Inspection:
  """Examines the step that a path means; see `locations.find_step`.

  Raises:
    CheckpointError: the path means no step.
  """
  location = find_step(path, step=step)
  try:
    stored = describe_checkpoint(location.root)
  except DamagedCheckpointError as error:
    return Inspection(location, "damaged", problem=str(error))
  except CheckpointError as error:
    return Inspection(location, "unknown", problem=str(error))
  place = Place(
    in_run=location.run is not None,
    newest=location.newest,
    newest_step=location.steps[-1] if location.steps else None,
    folder_step=location.folder_step,
    actor=location.actor,
    custom_metadata=stored.custom_metadata,
  )
  known = {
    "data_positions": _data_positions(location.root),
    "bytes_on_disk": sum(
      bytes_on_disk(location.root / name) for name in stored.trees if (location.root / name).exists()
    ),
  }
  if stored.layout == "tunix":
    from maxtext_posttrain.checkpointing import tunix_layout

    optimizer = tunix_layout.unbox(stored.trees.get(TUNIX_OPTIMIZER))
    opt_state = optimizer.get("opt_state", optimizer) if isinstance(optimizer, Mapping) else None
    return Inspection(location, "tunix", None, stored, {}, diagnosis.diagnose_tunix(opt_state, place), **known)
  try:
    counts = streaming.read_counts(stored, ITEMS)
  except DamagedCheckpointError as error:
    return Inspection(location, "damaged", str(error), stored, **known)
  items = stored.trees[ITEMS]
  verdict = diagnosis.diagnose_items(items, place, counts)
  layout: Contents = "maxtext" if flatten_tree(items.get("opt_state")) else "weights"
  if diagnosis.is_adapter(items):
    layout = "adapter"
  return Inspection(location, layout, None, stored, counts, verdict, **known)


def _data_positions(root: epath.Path) -> dict[str, Mapping[str, Any] | None]:
  folder = root / DATA_POSITION
  if not folder.is_dir():
    return {}
  return {file.name: _read_position(file) for file in sorted(folder.glob("process_*.json"))}


def _read_position(file: epath.Path) -> Mapping[str, Any] | None:
  try:
    if file.stat().length > _MAX_POSITION_BYTES:
      return None
    position = json.loads(file.read_text())
  except (OSError, ValueError):
    return None
  return position if isinstance(position, dict) else None
