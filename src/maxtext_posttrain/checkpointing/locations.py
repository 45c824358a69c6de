"""Finds the step a path means: a run, its `checkpoints`, a step's folder, or an item of one."""

from __future__ import annotations

import dataclasses

from etils import epath

from maxtext_posttrain.checkpointing.metadata import STEP_METADATA, TUNIX_OPTIMIZER, TUNIX_PARAMS, step_root
from maxtext_posttrain.checkpointing.names import ACTOR, CHECKPOINTS, ITEMS
from maxtext_posttrain.errors import CheckpointError

_ITEM_NAMES = (ITEMS, TUNIX_PARAMS, TUNIX_OPTIMIZER)
_UNFINISHED = ".orbax-checkpoint-tmp"


@dataclasses.dataclass(frozen=True)
class Location:
  """A step on disk and what lies around it.

  Attributes:
    root: the step's folder.
    folder_step: the number that is its name, or None.
    steps: all finished steps beside it, oldest first; empty for a step that stands alone.
    unfinished: names of saves beside it that did not end.
    run: the run's folder, where the step lies in a run as pre-training looks for it (`<run>/checkpoints/<step>`).
    actor: whether it lies in `checkpoints/actor`, as reinforcement learning writes it.
  """

  root: epath.Path
  folder_step: int | None
  steps: tuple[int, ...]
  unfinished: tuple[str, ...]
  run: epath.Path | None
  actor: bool

  @property
  def newest(self) -> bool:
    """Whether no later step lies beside it."""
    return not self.steps or self.folder_step == self.steps[-1]


def find_step(path: epath.PathLike, *, step: int | None = None) -> Location:
  """Finds a step's folder.

  Args:
    path: a run's folder, its `checkpoints`, a step's folder, or one of its items.
    step: which of several steps; the newest by default.

  Raises:
    CheckpointError: there is nothing of the kind; one line that says what was found.
  """
  if not str(path):
    raise CheckpointError("an empty path names no checkpoint; name a run's folder or a step's")
  given = epath.Path(str(path).rstrip("/") or "/")
  if not given.exists():
    raise CheckpointError(f"{given}: no such path; name a run's folder, or a step's as <run>/{CHECKPOINTS}/<step>")
  if not given.is_dir():
    raise CheckpointError(f"{given} is a file; name the folder of a run, of a step, or of its {ITEMS}")
  given = given.resolve()
  root = step_root(given)
  if _is_step(root) and (root != given or not steps_in(given)):
    if step is not None and root.name != str(step):
      raise CheckpointError(f"{given} is one step's folder, and not step {step}'s; name the run's folder")
    return _locate(root)
  folders = [given / CHECKPOINTS, given, given / CHECKPOINTS / ACTOR, given / ACTOR]
  folder = next((folder for folder in folders if steps_in(folder)), None)
  if folder is None:
    unfinished = [name for each in folders for name in _unfinished_in(each)]
    if unfinished:
      raise CheckpointError(
        f"{given} holds no finished checkpoint, only {', '.join(unfinished)}, whose save did not end"
      )
    raise CheckpointError(
      f"{given} holds no checkpoint: neither {CHECKPOINTS}/<step> nor {ITEMS} nor {TUNIX_PARAMS} is there"
    )
  steps = steps_in(folder)
  if step is not None and step not in steps:
    raise CheckpointError(f"{folder} has no step {step}; it has {', '.join(map(str, steps))}")
  return _locate(folder / str(steps[-1] if step is None else step))


def _is_step(folder: epath.Path) -> bool:
  """A step's folder, whole or damaged."""
  numbered = folder.name.isdigit() and folder.parent.name in (CHECKPOINTS, ACTOR)
  return numbered or any((folder / name).exists() for name in (STEP_METADATA, *_ITEM_NAMES))


def _locate(root: epath.Path) -> Location:
  folder_step = int(root.name) if root.name.isdigit() else None
  parent = root.parent
  actor = parent.name == ACTOR
  in_run = folder_step is not None and parent.name == CHECKPOINTS
  return Location(
    root=root,
    folder_step=folder_step,
    steps=steps_in(parent) if folder_step is not None else (),
    unfinished=_unfinished_in(parent) if folder_step is not None else (),
    run=parent.parent if in_run else None,
    actor=actor,
  )


def steps_in(folder: epath.Path) -> tuple[int, ...]:
  """The steps whose folders lie in `folder`, oldest first; a save that did not end has another name."""
  if not folder.is_dir():
    return ()
  return tuple(sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit() and path.is_dir()))


def _unfinished_in(folder: epath.Path) -> tuple[str, ...]:
  if not folder.is_dir():
    return ()
  return tuple(sorted(path.name for path in folder.iterdir() if _UNFINISHED in path.name))


def bytes_on_disk(folder: epath.Path) -> int:
  """Size of all files below a folder."""
  total = 0
  for path in folder.iterdir():
    total += bytes_on_disk(path) if path.is_dir() else path.stat().length
  return total
