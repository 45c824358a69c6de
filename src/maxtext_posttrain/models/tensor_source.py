"""A model as others ship it: its config.json, its tensors under HuggingFace's names, its tokenizer's files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from maxtext_posttrain.errors import ModelError
from maxtext_posttrain.models.families import HEAD
from maxtext_posttrain.models.huggingface_config import from_huggingface
from maxtext_posttrain.models.safetensors_files import SafetensorsFolder, parse_json
from maxtext_posttrain.models.weights import Weight, list_weights

_MAX_CONFIG = 16_000_000
_MAX_TOKENIZER = 512_000_000
_LISTED = 8
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Buffers that old files hold and that follow from the configuration."""

TOKENIZER_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  "tokenizer.model",
  "chat_template.jinja",
  "chat_template.json",
  "generation_config.json",
)


class TensorSource(Protocol):
  """Tensors by HuggingFace's names."""

  where: str

  def shapes(self) -> Mapping[str, tuple[int, ...]]:
    """Every tensor's shape."""
    ...

  def read(self, name: str) -> np.ndarray:
    """One tensor."""
    ...


class Source(Protocol):
  """A whole model: a HuggingFace folder or a GGUF file."""

  where: str

  def config(self) -> Mapping[str, Any]:
    """What config.json says, or would."""
    ...

  def tensors(self) -> TensorSource:
    """Its tensors."""
    ...

  def write_tokenizer(self, folder: Path) -> str | None:
    """Writes what it has of a tokenizer into `folder`; returns a line on what is missing, or None."""
    ...


class HuggingFaceFolder:
  """A folder with config.json and safetensors."""

  def __init__(self, folder: Path):
    self.where = str(folder)
    self._folder = folder

  def config(self) -> Mapping[str, Any]:
    """The contents of config.json.

    Raises:
      ModelError: there is none, or it is no JSON object.
    """
    return read_json(self._folder / "config.json", _MAX_CONFIG)

  def tensors(self) -> TensorSource:
    """The folder's safetensors."""
    return SafetensorsFolder(self._folder)

  def write_tokenizer(self, folder: Path) -> str | None:
    """Copies the tokenizer's files."""
    found = [self._folder / name for name in TOKENIZER_FILES if (self._folder / name).is_file()]
    for path in found:
      shutil.copyfile(path, folder / path.name)
    if not any(path.name in ("tokenizer.json", "tokenizer.model") for path in found):
      return f"{self.where} holds no tokenizer; set tokenizer_path and tokenizer_type"
    return None


class GgufSource:
  """A GGUF file."""

  def __init__(self, path: Path):
    from maxtext_posttrain.models.gguf_files import GgufFile

    self.where = str(path)
    self._file = GgufFile(path)

  def config(self) -> Mapping[str, Any]:
    """The metadata as config.json would have them."""
    return self._file.huggingface_config()

  def tensors(self) -> TensorSource:
    """The file's tensors, dequantized when they are read."""
    architecture = from_huggingface(self.config(), self.where)
    weights = list_weights(architecture.family, architecture.dimensions, scan_layers=False)
    self._file.bind(weights, architecture.dimensions.head)
    return self._file

  def write_tokenizer(self, folder: Path) -> str | None:
    """Makes a HuggingFace tokenizer of the metadata."""
    from maxtext_posttrain.models.gguf_tokenizer import write_tokenizer

    return write_tokenizer(self._file.metadata, folder, self.where)


def open_source(path: str) -> Source:
  """The model at a path.

  Raises:
    ModelError: there is none, or it is of a kind that is not read.
  """
  found = Path(path).expanduser()
  if found.is_dir():
    if (found / "config.json").is_file():
      return HuggingFaceFolder(found)
    models = sorted(found.glob("*.gguf"))
    if len(models) == 1:
      return GgufSource(models[0])
    what = f"{len(models)} GGUF files; name one" if models else "no config.json and no GGUF file"
    raise ModelError(f"{found}: the folder has {what}")
  if found.is_file():
    with found.open("rb") as file:
      start = file.read(4)
    if start == b"GGUF" or found.suffix == ".gguf":
      return GgufSource(found)
    if found.suffix == ".safetensors" or found.name == "config.json":
      raise ModelError(f"{found}: name the folder that holds it, with its config.json: {found.parent}")
    raise ModelError(f"{found}: is a file, but not a GGUF file; name a HuggingFace folder or a .gguf file")
  raise ModelError(f"{found}: no such file or folder; models are not downloaded: fetch it first")


def read_json(path: Path, limit: int) -> dict[str, Any]:
  """A JSON object from a file of at most `limit` bytes.

  Raises:
    ModelError: it cannot be read, is larger, or is no JSON object.
  """
  try:
    size = path.stat().st_size
    if size > limit:
      raise ModelError(f"{path}: {size} bytes are more than the {limit} that are read of such a file")
    return parse_json(path.read_bytes(), str(path))
  except OSError as error:
    raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error


def check_tensors(source: TensorSource, weights: Sequence[Weight], family: str, *, tied: bool) -> None:
  """Whether a source has each weight, in its shape, and nothing else.

  Raises:
    ModelError: names what is missing, left over or of another shape.
  """
  shapes = source.shapes()
  wanted = {weight.name: weight.shape for weight in weights}
  problems = [f"{name} is missing" for name in wanted if name not in shapes]
  problems += [
    f"{name} has shape {shapes[name]}, {shape} is needed"
    for name, shape in wanted.items()
    if name in shapes and shapes[name] != shape
  ]
  surplus = [name for name in shapes if name not in wanted and not name.endswith(_IGNORED_SUFFIXES)]
  problems += [f"{name} has no place in a {family} model" for name in surplus if not (tied and name == HEAD)]
  if problems:
    more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    raise ModelError(f"{source.where}: {'; '.join(problems[:_LISTED])}{more}")


def tokenizer_size(folder: Path) -> int | None:
  """One more than the largest id in a folder's tokenizer.json; None where there is none.

  Raises:
    ModelError: the file is not a tokenizer.
  """
  path = folder / "tokenizer.json"
  if not path.is_file():
    return None
  tokenizer = read_json(path, _MAX_TOKENIZER)
  model, added = tokenizer.get("model"), tokenizer.get("added_tokens") or []
  vocabulary = model.get("vocab") if isinstance(model, dict) else None
  if isinstance(vocabulary, dict):
    ids = [index for index in vocabulary.values() if isinstance(index, int)]
  elif isinstance(vocabulary, list):
    ids = [len(vocabulary) - 1]
  else:
    raise ModelError(f"{path}: has no vocabulary")
  ids += [token["id"] for token in added if isinstance(token, dict) and isinstance(token.get("id"), int)]
  return max(ids, default=-1) + 1
