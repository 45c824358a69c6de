"""A folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from maxtext_posttrain.errors import ModelError


@contextlib.contextmanager
def new_folder(target: Path, size: int) -> Iterator[Path]:
  """A folder under a temporary name that becomes `target` if all goes well, and is removed otherwise.

  Args:
    target: must not exist.
    size: bytes that will be written, at least.

  Raises:
    ModelError: there is no room, or the folder cannot be written.
  """
  temporary = target.parent / f".{target.name}.partial-{os.getpid()}"
  try:
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if size > free:
      raise ModelError(f"{target.parent}: {size} bytes are needed and {free} are free; make room or name another place")
    temporary.mkdir()
    try:
      yield temporary
      temporary.rename(target)
    except BaseException:
      shutil.rmtree(temporary, ignore_errors=True)
      raise
  except OSError as error:
    raise ModelError(f"{target} cannot be written: {error.strerror or error}") from error
