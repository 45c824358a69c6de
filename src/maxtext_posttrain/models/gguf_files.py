"""GGUF files: metadata and tensors under HuggingFace's names, dequantized.

The header is read here with every length checked against the file's size; the `gguf` package knows the block formats
and dequantizes them.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from maxtext_posttrain.errors import ModelError
from maxtext_posttrain.models.families import EMBEDDING, FAMILIES, GEMMA2, GEMMA3, HEAD, LLAMA
from maxtext_posttrain.models.safetensors_files import read_bytes
from maxtext_posttrain.models.weights import Weight

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_COUNT = 1 << 20
_MAX_DIMENSIONS = 4
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: Mapping[int, np.dtype] = {
  0: np.dtype("<u1"),
  1: np.dtype("<i1"),
  2: np.dtype("<u2"),
  3: np.dtype("<i2"),
  4: np.dtype("<u4"),
  5: np.dtype("<i4"),
  6: np.dtype("<f4"),
  7: np.dtype("<u1"),
  10: np.dtype("<u8"),
  11: np.dtype("<i8"),
  12: np.dtype("<f8"),
}
_LAYERS_OF_27B = {GEMMA2.name: 46, GEMMA3.name: 62}
"""The sizes of Gemma whose attention scale is not head_dim's; GGUF does not say, llama.cpp goes by the layers."""
_ROPE_FACTORS = "rope_freqs.weight"


@dataclasses.dataclass(frozen=True)
class GgufTensor:
  """One tensor of a file.

  Attributes:
    shape: numpy's order (GGUF's reversed).
    type_id: GGML's number of its type.
    start: of its bytes.
    stop: their end.
  """

  shape: tuple[int, ...]
  type_id: int
  start: int
  stop: int

  @property
  def type_name(self) -> str:
    """GGML's name of its type."""
    try:
      return gguf.GGMLQuantizationType(self.type_id).name
    except ValueError:
      return f"number {self.type_id}"


class _Cursor:
  """Reads a mapped file from front to back, never past its end."""

  def __init__(self, path: Path, data: np.ndarray):
    self._path = path
    self._data = data
    self.position = 0

  def take(self, count: int) -> np.ndarray:
    if count > len(self._data) - self.position:
      raise ModelError(
        f"{self._path}: cut off inside its header ({len(self._data)} bytes; {count} more are needed at byte"
        f" {self.position}); fetch it again"
      )
    self.position += count
    return self._data[self.position - count : self.position]

  def number(self, dtype: str) -> int:
    return int(self.take(np.dtype(dtype).itemsize).view(dtype)[0])

  def text(self) -> str:
    return self.take(self.number("<u8")).tobytes().decode("utf-8", errors="replace")

  def value(self, kind: int, *, in_array: bool = False) -> Any:
    if kind in _SCALARS:
      item = self.take(_SCALARS[kind].itemsize).view(_SCALARS[kind])[0].item()
      return bool(item) if kind == _BOOL else item
    if kind == _STRING:
      return self.text()
    if kind == _ARRAY and not in_array:
      item_kind, count = self.number("<u4"), self.number("<u8")
      if item_kind in _SCALARS:
        return self.take(count * _SCALARS[item_kind].itemsize).view(_SCALARS[item_kind])
      if item_kind == _STRING and count * 8 <= len(self._data) - self.position:
        return [self.text() for _ in range(count)]
    raise ModelError(f"{self._path}: a metadata value of kind {kind} at byte {self.position} is malformed")


class GgufFile:
  """A GGUF file: its metadata, and its tensors as HuggingFace has them."""

  def __init__(self, path: Path):
    """Reads the header.

    Raises:
      ModelError: it is not a GGUF file of a known version, it is cut off, or its model is not of a known family.
    """
    self.where = str(path)
    self.path = path
    try:
      with path.open("rb") as file:
        size = path.stat().st_size
        start = file.read(4)
        if start != _MAGIC:
          raise ModelError(f"{path}: not a GGUF file (it begins with {start!r})")
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
      raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    cursor = _Cursor(path, data)
    cursor.take(4)
    version = cursor.number("<u4")
    if version not in _VERSIONS:
      raise ModelError(f"{path}: GGUF version {version}; {' and '.join(map(str, _VERSIONS))} are read")
    tensor_count, value_count = cursor.number("<u8"), cursor.number("<u8")
    if max(tensor_count, value_count) > _MAX_COUNT:
      raise ModelError(f"{path}: its header claims {tensor_count} tensors and {value_count} values; it is broken")
    self.metadata: dict[str, Any] = {}
    for _ in range(value_count):
      key = cursor.text()
      self.metadata[key] = cursor.value(cursor.number("<u4"))
    self.tensors = self._read_tensors(cursor, tensor_count, size)
    architecture = self.metadata.get("general.architecture")
    family = next((family for family in FAMILIES if family.gguf_architecture == architecture), None)
    if family is None:
      known = ", ".join(sorted({family.gguf_architecture for family in FAMILIES}))
      raise ModelError(f"{path}: architecture {architecture!r} is not known; known are {known}")
    self._family = family
    self._sources: dict[str, Weight] = {}
    self._head_dim = 0

  def _read_tensors(self, cursor: _Cursor, count: int, size: int) -> dict[str, GgufTensor]:
    infos: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(count):
      name, rank = cursor.text(), cursor.number("<u4")
      if not 1 <= rank <= _MAX_DIMENSIONS:
        raise ModelError(f"{self.path}: tensor {name} has {rank} dimensions; it is broken")
      shape = tuple(cursor.number("<u8") for _ in range(rank))[::-1]
      infos.append((name, shape, cursor.number("<u4"), cursor.number("<u8")))
    alignment = self.metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
      raise ModelError(f"{self.path}: general.alignment is {alignment!r}; it is broken")
    data = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, type_id, offset in infos:
      start = data + offset
      length = self._length(name, shape, type_id)
      if start + length > size:
        raise ModelError(
          f"{self.path}: tensor {name}: the file is cut off ({size} bytes, this tensor ends at {start + length});"
          " fetch it again"
        )
      if name in tensors:
        raise ModelError(f"{self.path}: tensor {name} stands twice in its header")
      tensors[name] = GgufTensor(shape, type_id, start, start + length)
    return tensors

  def _length(self, name: str, shape: tuple[int, ...], type_id: int) -> int:
    """Bytes of a tensor; types that are not known have an unknown length, and are named when they are read."""
    try:
      block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type_id)]
    except (ValueError, KeyError):
      return 0
    if shape[-1] % block:
      raise ModelError(f"{self.path}: tensor {name}: rows of {shape[-1]} are no multiple of their blocks of {block}")
    return math.prod(shape) // block * block_bytes

  def huggingface_config(self) -> dict[str, Any]:
    """The metadata as HuggingFace's config.json has it.

    Raises:
      ModelError: a value is missing, or differs from layer to layer.
    """
    family = self._family
    prefix = family.gguf_architecture

    def value(key: str, default: Any = None) -> Any:
      found = self.metadata.get(f"{prefix}.{key}", default)
      if isinstance(found, np.ndarray):
        distinct = {item.item() for item in found}
        if len(distinct) != 1:
          raise ModelError(f"{self.path}: {prefix}.{key} differs from layer to layer")
        found = distinct.pop()
      return _shortest(found)

    embedding = self.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
      raise ModelError(f"{self.path}: tensor token_embd.weight ({EMBEDDING}) is missing")
    width, heads = value("embedding_length"), value("attention.head_count")
    # Whatever else stands there is refused where the sizes are checked.
    share = width // heads if isinstance(heads, int) and isinstance(width, int) and heads > 0 else None
    config: dict[str, Any] = {
      "architectures": [family.architecture],
      "model_type": family.model_type,
      "vocab_size": embedding.shape[0],
      "hidden_size": width,
      "intermediate_size": value("feed_forward_length"),
      "num_hidden_layers": value("block_count"),
      "num_attention_heads": heads,
      "num_key_value_heads": value("attention.head_count_kv", heads),
      "head_dim": value("attention.key_length"),
      "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
      "rope_theta": value("rope.freq_base", 10000.0),
      "max_position_embeddings": value("context_length"),
      "tie_word_embeddings": "output.weight" not in self.tensors,
    }
    if config["head_dim"] is None:
      del config["head_dim"]
      if share is not None:
        config["head_dim"] = share
    scaling = value("rope.scaling.type", "none")
    if _ROPE_FACTORS in self.tensors:
      factors = self._dequantized(_ROPE_FACTORS)
      if not factors.size:
        raise ModelError(f"{self.path}: tensor {_ROPE_FACTORS} is empty; it is broken")
      factor = float(factors.max())
      config["rope_scaling"] = {"rope_type": "llama3", "factor": factor}
    elif scaling not in ("none", None):
      config["rope_scaling"] = {"rope_type": scaling, "factor": value("rope.scaling.factor")}
    if family in (GEMMA2, GEMMA3):
      config["sliding_window"] = value("attention.sliding_window")
      config["query_pre_attn_scalar"] = config.get("head_dim")
      if config["num_hidden_layers"] == _LAYERS_OF_27B[family.name]:
        config["query_pre_attn_scalar"] = share
      config["tie_word_embeddings"] = True
    if family is GEMMA2:
      config["final_logit_softcapping"] = value("final_logit_softcapping", 30.0)
      config["attn_logit_softcapping"] = value("attn_logit_softcapping", 50.0)
    return config

  def bind(self, weights: Sequence[Weight], head_dim: int) -> None:
    """Says which tensors `shapes` and `read` are asked for by HuggingFace's names, and how wide a head is."""
    self._sources = {weight.name: weight for weight in weights}
    self._head_dim = head_dim

  def shapes(self) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape, by HuggingFace's name where it has one."""
    names = {weight.gguf_name: name for name, weight in self._sources.items()}
    return {names.get(name, name): tensor.shape for name, tensor in self.tensors.items() if name != _ROPE_FACTORS}

  def read(self, name: str) -> np.ndarray:
    """A tensor as HuggingFace has it, float32.

    Raises:
      ModelError: its type cannot be dequantized.
    """
    if name == HEAD and name not in self._sources:
      return self._dequantized("output.weight")
    weight = self._sources[name]
    array = self._dequantized(weight.gguf_name)
    if weight.rule.offset:
      array = array - np.float32(weight.rule.offset)
    if weight.rule.rotary and self._family is LLAMA:
      # llama.cpp turns neighbours; its files hold Llama's heads in that order.
      pairs = array.reshape(-1, self._head_dim // 2, 2, *array.shape[1:])
      array = pairs.swapaxes(1, 2).reshape(array.shape)
    return array

  def _dequantized(self, name: str) -> np.ndarray:
    tensor = self.tensors[name]
    raw = read_bytes(self.path, tensor.start, tensor.stop)
    try:
      kind = gguf.GGMLQuantizationType(tensor.type_id)
      block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
      rows = raw.reshape(*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)
      return np.asarray(gguf.dequantize(rows, kind), np.float32).reshape(tensor.shape)
    except (ValueError, KeyError, NotImplementedError) as error:
      raise ModelError(
        f"{self.path}: tensor {name} is of type {tensor.type_name}, which cannot be dequantized; use a file with F32,"
        " F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 or K-quants"
      ) from error


def _shortest(value: Any) -> Any:
  """GGUF holds 1e-5 as a 32-bit float; the number meant is the shortest that rounds to it."""
  return float(str(np.float32(value))) if isinstance(value, float) else value
