"""What tells the weights on disk from other ones without reading them."""

from __future__ import annotations

import hashlib

from etils import epath

_WHOLE_BELOW = 1 << 20
"""Files smaller than this are digested whole; of Orbax's, its manifests and metadata, which name every write."""


def weights_identity(path: str) -> str:
  """A hexadecimal digest of a checkpoint folder: its files' names and sizes, and the content of the small ones.

  Orbax's manifests differ between any two writes, so weights saved anew are told apart, while a copy is the same.

  Args:
    path: a step's folder or an item of one, local or in a bucket.

  Raises:
    OSError: it can't be read.
  """
  digest = hashlib.blake2b(digest_size=16)
  root = epath.Path(path)
  for file in sorted(_files(root), key=str):
    size = file.stat().length
    digest.update(f"{file.relative_to(root)} {size}\n".encode())
    if size < _WHOLE_BELOW:
      digest.update(file.read_bytes())
  return digest.hexdigest()


def _files(folder: epath.Path) -> list[epath.Path]:
  found: list[epath.Path] = []
  for path in folder.iterdir():
    found += _files(path) if path.is_dir() else [path]
  return found
