"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
  """Writes `text` to `path`, in place of what is there, through a temporary file of its own name beside it.

  Two writers never meet in one file, and a reader finds the old text or the new.

  Raises:
    OSError: it can't be written; what was there is left as it was.
  """
  descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
  try:
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
      file.write(text)
    umask = os.umask(0)
    os.umask(umask)
    Path(temporary).chmod(0o666 & ~umask)
    Path(temporary).replace(path)
  except BaseException:
    with contextlib.suppress(OSError):
      Path(temporary).unlink()
    raise
