"""The data position beside a step's items.

It lies in `<step>/post_train_iter`, not in `iter`: pre-training with `dataset_type=grain` puts whatever it finds in
`iter` into its own, different pipeline, and would fail to resume.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Protocol

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from maxtext_posttrain.checkpointing.metadata import DATA_POSITION as DATA_POSITION
from maxtext_posttrain.errors import CheckpointError


class PositionedIterator(Protocol):
  """An iterator that knows and can take a position, as JSON."""

  def get_state(self) -> dict[str, Any]:
    """The position after the batches already yielded."""
    ...

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes to a position from `get_state`; refuses one of other data."""
    ...


class DataPosition(ocp.StatefulCheckpointable):
  """Saves each process's position to a file of its own, `process_<index>-of-<count>.json`.

  Where all of them are the same, as those of this package's data are, any number of processes goes on from it.
  """

  def __init__(self, iterator: PositionedIterator):
    self._iterator = iterator

  @staticmethod
  def _file_name() -> str:
    return f"process_{jax.process_index()}-of-{jax.process_count()}.json"

  async def save(self, directory: Any) -> Any:
    """Notes the position now; the returned coroutine writes it in the background."""
    text = json.dumps(self._iterator.get_state())

    async def write() -> None:
      folder = await directory.await_creation()
      await asyncio.to_thread((folder / self._file_name()).write_text, text)

    return write()

  async def load(self, directory: Any) -> Any:
    """Reads this process's file and moves the iterator there."""

    async def read() -> None:
      await asyncio.to_thread(self.restore, epath.Path(directory))

    return read()

  def restore(self, directory: epath.Path) -> bool:
    """Moves the iterator to the position saved in `directory`; False where there is none.

    Raises:
      CheckpointError: the folder was written by another number of processes, each with a position of its own, or a
        file can't be read.
    """
    file = directory / self._file_name()
    if file.exists():
      self._iterator.set_state(_read(file))
      return True
    found = sorted(directory.glob("process_*.json")) if directory.exists() else []
    if not found:
      return False
    first, *others = [_read(path) for path in found]
    if any(other != first for other in others):
      raise CheckpointError(
        f"data position {directory} was written by other processes ({', '.join(path.name for path in found)}), each at"
        f" its own, and {self._file_name()} is wanted; resume with the same number of processes"
      )
    self._iterator.set_state(first)
    return True


def _read(file: epath.Path) -> dict[str, Any]:
  try:
    state = json.loads(file.read_text())
    if not isinstance(state, dict):
      raise ValueError("it holds no position")
  except (OSError, ValueError) as error:
    raise CheckpointError(
      f"data position {file} can't be read: {error}; remove its folder to begin the data anew"
    ) from error
  return state
