"""A teacher's most probable tokens, saved once for the rows of a data set and read back row by row.

  <folder>/teacher_logits.json                what they were made of: data, tokenizer, teacher
  <folder>/<part>-00000.offsets.npy           [rows + 1] int64: where each row's positions begin
  <folder>/<part>-00000.ids.npy               [positions, k] int32, by falling probability
  <folder>/<part>-00000.log_probs.npy         [positions, k + 1] float32, the last that of all other tokens together

Parts are `train` and `eval`. Only trained positions are kept, in the order of the row. Arrays are mapped into memory
and never unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

from maxtext_posttrain.data.batches import PADDING_ROW, Batch, RowSource
from maxtext_posttrain.errors import DataError

METADATA_FILE = "teacher_logits.json"
VERSION = 1
TEACHER_IDS = "teacher_ids"
TEACHER_LOG_PROBS = "teacher_log_probs"

_ARRAYS: Mapping[str, Any] = {"offsets": np.int64, "ids": np.int32, "log_probs": np.float32}
_ROUNDING = 1e-3
_LARGEST_METADATA = 64 << 20


class _Strict(pydantic.BaseModel):
  model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


class Shard(_Strict):
  """One file of each kind.

  Attributes:
    rows: how many it holds.
    positions: trained ones of all its rows.
    digest: of its arrays.
  """

  rows: int = pydantic.Field(ge=0)
  positions: int = pydantic.Field(ge=0)
  digest: str


class Part(_Strict):
  """The rows of one data set.

  Attributes:
    data: fingerprint of the rows.
    shards: in the order of the rows.
  """

  data: str
  shards: list[Shard]


class Metadata(_Strict):
  """What saved logits were made of.

  Attributes:
    version: of the files.
    k: tokens kept of each position.
    vocab_size: of the teacher.
    tokenizer: fingerprint of its vocabulary; None for synthetic data.
    teacher: where its weights lay, for people.
    teacher_digest: of its weights.
    parts: by name.
  """

  version: int
  k: int = pydantic.Field(ge=1)
  vocab_size: int = pydantic.Field(ge=1)
  tokenizer: str | None
  teacher: str
  teacher_digest: str
  parts: dict[str, Part]


def shard_path(folder: Path, part: str, number: int, array: str) -> Path:
  """A shard's file of one array: `offsets`, `ids` or `log_probs`."""
  return folder / f"{part}-{number:05}.{array}.npy"


def write_shard(folder: Path, part: str, number: int, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Shard:
  """Writes the rows of one shard.

  Args:
    folder: where; it exists.
    part: `train` or `eval`.
    number: of the shard, from 0.
    rows: of each, ids [positions, k] int32 and log-probabilities [positions, k + 1] float32.
  """
  offsets = np.cumsum([0, *(len(ids) for ids, _ in rows)], dtype=np.int64)
  arrays = {
    "offsets": offsets,
    "ids": np.concatenate([ids for ids, _ in rows]).astype(np.int32, copy=False),
    "log_probs": np.concatenate([log_probs for _, log_probs in rows]).astype(np.float32, copy=False),
  }
  digest = hashlib.blake2b(digest_size=16)
  for name, array in arrays.items():
    np.save(shard_path(folder, part, number, name), array, allow_pickle=False)
    digest.update(np.ascontiguousarray(array).data)
  return Shard(rows=len(rows), positions=int(offsets[-1]), digest=digest.hexdigest())


def write_metadata(folder: Path, metadata: Metadata) -> None:
  """Writes what the shards in `folder` were made of."""
  (folder / METADATA_FILE).write_text(metadata.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_metadata(folder: str | os.PathLike[str]) -> Metadata:
  """Reads what saved logits were made of.

  Raises:
    DataError: there is no such file, or it is not one of ours.
  """
  path = Path(folder) / METADATA_FILE
  try:
    if path.stat().st_size > _LARGEST_METADATA:
      raise DataError(f"{path}: is larger than any that posttrain teacher-logits writes")
    raw = json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError:
    raise DataError(f"{folder}: holds no {METADATA_FILE}; name a folder that posttrain teacher-logits wrote") from None
  except (OSError, ValueError, RecursionError) as error:
    raise DataError(f"{path}: can't be read: {error}; write the folder again") from error
  version = raw.get("version") if isinstance(raw, dict) else None
  if version != VERSION:
    raise DataError(f"{path}: its version is {version}, this package reads {VERSION}; write the folder again")
  try:
    return Metadata.model_validate(raw)
  except pydantic.ValidationError as error:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    raise DataError(f"{path}: {where}: {first['msg']}; write the folder again") from error


class TeacherRows:
  """Rows with the saved logits of a teacher beside their tokens: a `RowSource`."""

  def __init__(self, rows: RowSource, folder: str | os.PathLike[str], part: str, *, vocab_size: int):
    """Opens the logits saved for `rows`.

    Args:
      rows: the data set's.
      folder: what `posttrain teacher-logits` wrote.
      part: `train` or `eval`.
      vocab_size: the student's.

    Raises:
      DataError: they are damaged, or belong to other rows or another vocabulary.
    """
    self._rows = rows
    self._folder = Path(folder)
    self.metadata = read_metadata(folder)
    if self.metadata.vocab_size != vocab_size:
      raise DataError(
        f"{folder}: its teacher has vocab_size={self.metadata.vocab_size}, the student {vocab_size}; they must have the"
        " same vocabulary"
      )
    if self.metadata.k > vocab_size:
      raise DataError(f"{folder}: keeps {self.metadata.k} tokens of a vocabulary of {vocab_size}; write it again")
    known = self.metadata.parts.get(part)
    if known is None:
      raise DataError(
        f"{folder}: holds no logits for the {part} data; write it again with these data configured, or turn them off"
      )
    if known.data != rows.fingerprint():
      raise DataError(
        f"{folder}: its {part} logits are of other data: the rows, their packing or the tokenizer changed since; give"
        " the data as they were, or write the folder again"
      )
    if sum(shard.rows for shard in known.shards) != len(rows):
      raise DataError(f"{folder}: its {part} shards hold other numbers of rows than the data; write it again")
    self._part = known
    self._shards = [self._open(part, number, shard) for number, shard in enumerate(known.shards)]
    self._first_rows = np.cumsum([0, *(shard.rows for shard in known.shards)])

  def _open(self, part: str, number: int, shard: Shard) -> dict[str, np.ndarray]:
    k = self.metadata.k
    shapes = {"offsets": (shard.rows + 1,), "ids": (shard.positions, k), "log_probs": (shard.positions, k + 1)}
    arrays = {}
    for name, dtype in _ARRAYS.items():
      path = shard_path(self._folder, part, number, name)
      try:
        # An empty array can't be mapped.
        array = np.load(path, mmap_mode="r" if shapes[name][0] else None, allow_pickle=False)
      except FileNotFoundError:
        raise DataError(f"{path}: is missing; write the folder again") from None
      except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: is damaged: {error}; write the folder again") from error
      if array.dtype != dtype or array.shape != shapes[name]:
        raise DataError(
          f"{path}: is {array.dtype} {array.shape}, expected {np.dtype(dtype)} {shapes[name]}; write the folder again"
        )
      arrays[name] = array
    offsets = arrays["offsets"]
    if offsets[0] != 0 or offsets[-1] != shard.positions or np.any(np.diff(offsets) < 0):
      raise DataError(f"{shard_path(self._folder, part, number, 'offsets')}: is damaged; write the folder again")
    return arrays

  def __len__(self) -> int:
    return len(self._rows)

  def assemble(self, rows: Sequence[int]) -> Batch:
    """The batch of `rows`, with the teacher's beside it.

    Returns:
      As the rows themselves give, and `teacher_ids` [rows, length, k] int32 and `teacher_log_probs`
      [rows, length, k + 1] float32, 0 where nothing is trained.

    Raises:
      DataError: a file holds what no teacher gives.
    """
    batch = self._rows.assemble(rows)
    trained = batch["targets_segmentation"] != 0
    k = self.metadata.k
    batch[TEACHER_IDS] = np.zeros((*trained.shape, k), np.int32)
    batch[TEACHER_LOG_PROBS] = np.zeros((*trained.shape, k + 1), np.float32)
    for place, row in enumerate(rows):
      if row == PADDING_ROW:
        continue
      ids, log_probs = self._saved(int(row))
      if len(ids) != np.count_nonzero(trained[place]):
        raise DataError(
          f"{self._folder}: row {row} has {len(ids)} positions, not those that are trained; write it again"
        )
      batch[TEACHER_IDS][place, trained[place]] = ids
      batch[TEACHER_LOG_PROBS][place, trained[place]] = log_probs
    return batch

  def _saved(self, row: int) -> tuple[np.ndarray, np.ndarray]:
    number = int(np.searchsorted(self._first_rows, row, side="right")) - 1
    shard = self._shards[number]
    first, last = shard["offsets"][row - self._first_rows[number] :][:2]
    ids, log_probs = shard["ids"][first:last], shard["log_probs"][first:last]
    if len(ids):
      total = np.exp(log_probs.astype(np.float64)).sum(axis=-1)
      in_vocabulary = ids.min() >= 0 and ids.max() < self.metadata.vocab_size
      if not in_vocabulary or not np.all(np.abs(total - 1.0) < _ROUNDING):
        raise DataError(f"{self._folder}: row {row} holds no distribution over the vocabulary; write the folder again")
    return ids, log_probs

  def fingerprint(self) -> str:
    """A digest of the rows and of what the teacher said of them."""
    digest = hashlib.blake2b(self._rows.fingerprint().encode(), digest_size=16)
    digest.update(f"{self.metadata.k} {self.metadata.teacher_digest}".encode())
    for shard in self._part.shards:
      digest.update(shard.digest.encode())
    return digest.hexdigest()
