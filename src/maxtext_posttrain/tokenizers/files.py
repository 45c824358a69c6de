"""Finding tokenizer files on this machine."""

from __future__ import annotations

import base64
import binascii
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from maxtext_posttrain.errors import TokenizerError

ASSET_SCHEME = "maxtext://"


def local_path(path: str) -> Path:
  """The place of `path` here; `maxtext://...` lies in the assets of the installed maxtext, which is not imported.

  Raises:
    TokenizerError: maxtext is not installed, or the path leads out of its assets.
  """
  if not path.startswith(ASSET_SCHEME):
    return Path(path).expanduser()
  spec = importlib.util.find_spec("maxtext")
  if spec is None or not spec.submodule_search_locations:
    raise TokenizerError(f"tokenizer {path}: maxtext is not installed here, so its assets are not either")
  assets = (Path(next(iter(spec.submodule_search_locations))) / "assets").resolve()
  found = (assets / path.removeprefix(ASSET_SCHEME)).resolve()
  if not found.is_relative_to(assets):
    raise TokenizerError(f"tokenizer {path}: leads out of maxtext's assets")
  return found


def vocabulary_file(path: str, patterns: Sequence[str]) -> Path:
  """The one vocabulary file that `path` names, or that lies in the folder it names.

  Raises:
    TokenizerError: there is no such file, or more than one.
  """
  found = local_path(path)
  if found.is_file():
    return found
  if not found.is_dir():
    siblings = _siblings(found)
    raise TokenizerError(f"tokenizer {path}: no such file" + (f"; its folder has {siblings}" if siblings else ""))
  candidates = sorted({file for pattern in patterns for file in found.glob(pattern) if file.is_file()})
  if len(candidates) != 1:
    wanted = " or ".join(patterns)
    names = ", ".join(file.name for file in candidates) or "none"
    raise TokenizerError(f"tokenizer {path}: the folder must have one file {wanted}, it has {names}; name the file")
  return candidates[0]


def _siblings(path: Path, shown: int = 12) -> str:
  if not path.parent.is_dir():
    return ""
  names = sorted(entry.name for entry in path.parent.iterdir() if "token" in entry.name)
  return ", ".join(names[:shown])


def guess_kind(data: bytes) -> str | None:
  """The kind of tokenizer that a file's contents look like, for the message when loading it as another kind fails."""
  start = data[:4096]
  if start.lstrip()[:1] == b"{":
    return "huggingface"
  fields = start.partition(b"\n")[0].split()
  if len(fields) == 2 and fields[1].isdigit():
    try:
      base64.b64decode(fields[0], validate=True)
    except binascii.Error:
      return None
    return "tiktoken"
  # A SentencePiece model begins with its first piece: field 1, length-delimited, and in it field 1 again.
  if len(start) > 3 and start[0] == 0x0A and start[2] == 0x0A:
    return "sentencepiece"
  return None


def kind_hint(data: bytes, kind: str) -> str:
  """Ends a message: which kind the file is of, if it is of another than `kind`."""
  guess = guess_kind(data)
  return f"; it looks like a {guess} tokenizer: set tokenizer_type={guess}" if guess not in (None, kind) else ""
