"""Safetensors files without torch, read and written tensor by tensor.

The format: eight bytes with the header's length, little-endian; the header, JSON, from a tensor's name to its `dtype`,
`shape` and `data_offsets` within what follows; the tensors' bytes, without holes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from maxtext_posttrain.errors import ModelError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER = 100_000_000
_MAX_INDEX = 100_000_000
DTYPES = {
  "float32": np.dtype(np.float32),
  "bfloat16": np.dtype(ml_dtypes.bfloat16),
  "float16": np.dtype(np.float16),
}
"""Types that weights are written in, by the name config.json gives them."""
_DTYPES: Mapping[str, np.dtype] = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"


@dataclasses.dataclass(frozen=True)
class TensorEntry:
  """One tensor of a header.

  Attributes:
    shape: its shape.
    dtype: the format's name of its type.
    start: of its bytes in the file.
    stop: their end.
  """

  shape: tuple[int, ...]
  dtype: str
  start: int
  stop: int


def read_header(path: Path) -> dict[str, TensorEntry]:
  """What a file says it holds, checked against its size before anything is allocated.

  Raises:
    ModelError: it is not a safetensors file, or it is cut off.
  """
  try:
    size = path.stat().st_size
    with path.open("rb") as file:
      prefix = file.read(8)
      length = int.from_bytes(prefix, "little")
      if len(prefix) < 8:
        raise ModelError(f"{path}: {size} bytes are no safetensors file")
      if length > _MAX_HEADER:
        raise ModelError(f"{path}: a header of {length} bytes is larger than the format allows ({_MAX_HEADER})")
      if length > size - 8:
        raise ModelError(f"{path}: cut off inside its header ({size} bytes, the header alone has {length})")
      raw = file.read(length)
  except OSError as error:
    raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
  header = parse_json(raw, f"{path}: its header")
  entries: dict[str, TensorEntry] = {}
  for name, fields in header.items():
    if name != _METADATA:
      entries[name] = _entry(path, name, fields, 8 + length, size)
  return entries


def parse_json(raw: bytes, where: str) -> dict[str, Any]:
  """A JSON object.

  Raises:
    ModelError: it is none.
  """
  try:
    value = json.loads(raw)
  except (ValueError, RecursionError) as error:
    raise ModelError(f"{where} is no JSON: {' '.join(str(error).split())[:120]}") from error
  if not isinstance(value, dict):
    raise ModelError(f"{where} is no JSON object")
  return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
  """Writes a JSON object as HuggingFace's files have it."""
  path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _entry(path: Path, name: str, fields: Any, data: int, size: int) -> TensorEntry:
  where = f"{path}: tensor {name}"
  shape: Any = fields.get("shape") if isinstance(fields, dict) else None
  offsets: Any = fields.get("data_offsets") if isinstance(fields, dict) else None
  known = _sizes(shape) and _sizes(offsets) and len(offsets) == 2 and isinstance(fields.get("dtype"), str)
  if not known or offsets[1] < offsets[0]:
    raise ModelError(f"{where}: its entry in the header is malformed")
  start, stop = offsets
  if data + stop > size:
    raise ModelError(f"{where}: the file is cut off ({size} bytes, this tensor ends at {data + stop}); fetch it again")
  dtype = _DTYPES.get(fields["dtype"])
  if dtype is not None and math.prod(shape) * dtype.itemsize != stop - start:
    raise ModelError(f"{where}: shape {tuple(shape)} of {fields['dtype']} does not fill its {stop - start} bytes")
  return TensorEntry(tuple(shape), fields["dtype"], data + start, data + stop)


def _sizes(value: Any) -> bool:
  return isinstance(value, list) and all(isinstance(item, int) and 0 <= item < 1 << 62 for item in value)


def read_bytes(path: Path, start: int, stop: int) -> np.ndarray:
  """A part of a file, read rather than mapped: pages of a mapped file would count as this process's memory.

  Raises:
    ModelError: it cannot be read.
  """
  try:
    data = np.fromfile(path, np.uint8, stop - start, offset=start)
  except OSError as error:
    raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
  if len(data) != stop - start:
    raise ModelError(f"{path}: became shorter while it was read")
  return data


class SafetensorsFolder:
  """The tensors of a folder with `model.safetensors`, or its shards and their index."""

  def __init__(self, folder: Path):
    """Reads every header.

    Raises:
      ModelError: there are no weights here, or a file is broken, missing, or holds a tensor that another holds.
    """
    self.where = str(folder)
    self._files: dict[str, Path] = {}
    self._entries: dict[str, TensorEntry] = {}
    for path in _files(folder):
      for name, entry in read_header(path).items():
        if name in self._entries:
          raise ModelError(f"{path}: tensor {name} is in {self._files[name].name} too")
        self._files[name], self._entries[name] = path, entry

  def shapes(self) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape."""
    return {name: entry.shape for name, entry in self._entries.items()}

  def read(self, name: str) -> np.ndarray:
    """A tensor.

    Raises:
      ModelError: its type is not one that weights have.
    """
    entry, path = self._entries[name], self._files[name]
    if entry.dtype not in _DTYPES:
      raise ModelError(
        f"{path}: tensor {name} is {entry.dtype}; {', '.join(_DTYPES)} are read: save the model in one of those"
      )
    return read_bytes(path, entry.start, entry.stop).view(_DTYPES[entry.dtype]).reshape(entry.shape)


def _files(folder: Path) -> list[Path]:
  index, single = folder / INDEX_NAME, folder / SINGLE_NAME
  if index.is_file():
    if index.stat().st_size > _MAX_INDEX:
      raise ModelError(f"{index}: larger than {_MAX_INDEX} bytes")
    weight_map = parse_json(index.read_bytes(), str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
      raise ModelError(f"{index}: has no weight_map")
    names = sorted({name for name in weight_map.values() if isinstance(name, str)})
    for name in names:
      if Path(name).name != name:
        raise ModelError(f"{index}: names {name!r}, which is not a file of its folder")
      if not (folder / name).is_file():
        raise ModelError(f"{folder / name}: missing; {INDEX_NAME} names it")
    return [folder / name for name in names]
  if single.is_file():
    return [single]
  found = sorted(folder.glob("*.safetensors"))
  if len(found) == 1:
    return found
  others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.h5") for path in folder.glob(pattern))
  if others:
    raise ModelError(f"{folder}: has {others[0]} and no safetensors; pickled weights are not read: save it anew")
  raise ModelError(f"{folder}: has no {SINGLE_NAME} or {INDEX_NAME}")


@dataclasses.dataclass(frozen=True)
class PlannedTensor:
  """A tensor to be written."""

  name: str
  shape: tuple[int, ...]


def plan_shards(tensors: Sequence[PlannedTensor], dtype: np.dtype, limit: int) -> list[tuple[str, list[PlannedTensor]]]:
  """Which tensors go into which file: one file, or several of at most `limit` bytes (or one larger tensor) each."""
  shards: list[list[PlannedTensor]] = [[]]
  filled = 0
  for tensor in tensors:
    size = math.prod(tensor.shape) * dtype.itemsize
    if shards[-1] and filled + size > limit:
      shards.append([])
      filled = 0
    shards[-1].append(tensor)
    filled += size
  if len(shards) == 1:
    return [(SINGLE_NAME, shards[0])]
  count = len(shards)
  return [(f"model-{index:05d}-of-{count:05d}.safetensors", shard) for index, shard in enumerate(shards, 1)]


def write_shards(
  folder: Path, shards: Sequence[tuple[str, list[PlannedTensor]]], dtype: np.dtype, tensors: Iterator[tuple[str, Any]]
) -> int:
  """Writes the planned files from tensors that come in the planned order; returns the bytes of tensors.

  Raises:
    OSError: there is no room, or the folder cannot be written.
  """
  total = 0
  for file_name, planned in shards:
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    position = 0
    for tensor in planned:
      end = position + math.prod(tensor.shape) * dtype.itemsize
      header[tensor.name] = {"dtype": _NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
      position = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with (folder / file_name).open("wb") as file:
      file.write(len(raw).to_bytes(8, "little") + raw)
      for tensor in planned:
        name, array = next(tensors)
        if (name, array.shape, array.dtype) != (tensor.name, tensor.shape, dtype):
          raise ModelError(f"internal: {name} {array.shape} {array.dtype} came where {tensor.name} was planned")
        file.write(np.ascontiguousarray(array).view(np.uint8).data)
      file.flush()
      os.fsync(file.fileno())
    total += position
  if len(shards) > 1:
    weight_map = {tensor.name: file_name for file_name, planned in shards for tensor in planned}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / INDEX_NAME, index)
  return total
