"""Finds the weights and the configuration that a path names: a run, its checkpoints, one step, or its `items`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from etils import epath

from maxtext_posttrain.checkpointing.locations import steps_in
from maxtext_posttrain.checkpointing.names import ACTOR, CHECKPOINTS, ITEMS
from maxtext_posttrain.config.saved import MODEL_CONFIG, RUN_CONFIG
from maxtext_posttrain.errors import CheckpointError, ConfigError

_CONFIG_LEVELS = 4


@dataclasses.dataclass(frozen=True)
class ModelSource:
  """A model on disk.

  Attributes:
    items: its step's `items`, in MaxText's layout.
    step: the step's number, the name of its folder.
    config: the YAML its model and tokenizer are configured in.
  """

  items: epath.Path
  step: int
  config: Path


def find_source(path: str, config: str | None = None) -> ModelSource:
  """Finds the newest weights at `path`, and their configuration.

  Args:
    path: a run's folder, its `checkpoints`, a step's folder or its `items`; what `posttrain import` wrote likewise.
    config: the configuration's file; without it, the nearest `config.yml` or `model.yml` above the weights.

  Raises:
    CheckpointError: no weights in MaxText's layout are there.
    ConfigError: no configuration is found.
  """
  items = find_items(path)
  step = items.parent.name
  return ModelSource(items, int(step) if step.isdigit() else 0, _find_config(items, config))


def find_items(path: str) -> epath.Path:
  """The `items` that `path` names or holds; of several steps the newest.

  Raises:
    CheckpointError: there are none.
  """
  root = epath.Path(path.rstrip("/") or "/")
  if "://" not in path:
    root = epath.Path(Path(path).expanduser().absolute())  # Orbax takes no other.
  if not root.exists():
    raise CheckpointError(f"{path}: no such folder; name a run, a step's folder or its {ITEMS}")
  if not root.is_dir():
    raise CheckpointError(f"{path}: is a file; name a run, a step's folder or its {ITEMS}")
  if root.name == ITEMS:
    return root
  for folder in (root, root / ACTOR, root / CHECKPOINTS, root / CHECKPOINTS / ACTOR):
    if (folder / ITEMS).is_dir():
      return folder / ITEMS
    steps = [step for step in steps_in(folder) if (folder / str(step) / ITEMS).is_dir()]
    if steps:
      return folder / str(max(steps)) / ITEMS
  raise CheckpointError(
    f"{path}: holds no checkpoint in MaxText's layout (<step>/{ITEMS}); posttrain inspect says more"
  )


def _find_config(items: epath.Path, config: str | None) -> Path:
  if config is not None:
    if not Path(config).is_file():
      raise ConfigError(f"{config}: no such file; name the YAML that describes the model")
    return Path(config)
  if "://" not in str(items):
    parents = Path(str(items)).absolute().parents
    for folder in parents[:_CONFIG_LEVELS]:
      for name in (RUN_CONFIG, MODEL_CONFIG):
        if (folder / name).is_file():
          return folder / name
  raise ConfigError(
    f"{items}: no {RUN_CONFIG} of a run and no {MODEL_CONFIG} of an import lies above it; name the configuration with"
    " --config FILE"
  )
