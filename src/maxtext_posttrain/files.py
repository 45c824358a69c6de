"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, text: str) -> None:
  """Writes `text` to `path`; see `replacing`."""
  with replacing(path) as file:
    file.write(text.encode("utf-8"))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
  """A file that takes the place of what is at `path` once it is written, through a temporary name of its own beside it.

  Two writers never meet in one file, and a reader finds the old content or the new.

  Raises:
    OSError: it can't be written; what was there is left as it was.
  """
  descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
  try:
    with os.fdopen(descriptor, "wb") as file:
      yield file
    umask = os.umask(0)
    os.umask(umask)
    Path(temporary).chmod(0o666 & ~umask)
    Path(temporary).replace(path)
  except BaseException:
    with contextlib.suppress(OSError):
      Path(temporary).unlink()
    raise
