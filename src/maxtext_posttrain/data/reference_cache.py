"""The reference's log-probabilities of a run's pairs, kept in a file of the run: computed once, read ever after."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from maxtext_posttrain.checkpointing.identity import weights_identity
from maxtext_posttrain.data.batches import PADDING_ROW, Batch
from maxtext_posttrain.data.reference_rows import ReferenceRows
from maxtext_posttrain.errors import CheckpointError
from maxtext_posttrain.files import replacing

FILE_NAME = "reference_log_probs.npz"

Sums = npt.NDArray[np.float32]
Compute = Callable[[Batch], Sums]
"""A batch of rows to their sums [rows, 2, pairs]."""


def fill_reference(
  sources: Mapping[str, ReferenceRows],
  *,
  file: Path,
  start: str | None,
  model: str,
  batch_rows: int,
  resuming: bool,
  writes: bool,
  load: Callable[[], Compute],
) -> str:
  """Gives each source its sums: from the run's file where they are those, else computed and kept there.

  Args:
    sources: the run's rows, by split.
    file: where the sums are kept.
    start: the weights the reference has, as `load_parameters_path` names them; None for fresh ones.
    model: what else the sums depend on: sizes, number formats, and the seed of fresh weights.
    batch_rows: rows of one forward.
    resuming: the run has updates behind it: sums of another reference would change its loss midway, so a file with
      such is refused, not replaced.
    writes: this process writes the file.
    load: loads the reference; returns what makes sums [rows, 2, pairs] of a batch.

  Returns:
    A line on what was done.

  Raises:
    CheckpointError: `resuming`, and the file holds sums of other data or of another reference, or none that can be
      read; or it can't be written.
  """
  names = sorted(sources)
  key = _key({name: sources[name].fingerprint() for name in names}, start, model)
  if file.exists():
    kept = _read(file, key, sources)
    if not isinstance(kept, str):
      for name in names:
        sources[name].fill(kept[name])
      return f"reference: log-probabilities read from {file}"
    if resuming:
      raise CheckpointError(
        f"{file}: {kept}, and the run has updates behind it; restore its data, its dpo and model keys and"
        " load_parameters_path, or remove the file to go on against the reference they name"
      )
  compute = load()
  sums: dict[str, Sums] = {}
  for name in names:
    batches = [compute(batch) for batch in _batches(sources[name], batch_rows)]
    sums[name] = np.concatenate(batches)[: len(sources[name])]
    sources[name].fill(sums[name])
  if writes:
    _write(file, key, sums)
  rows = sum(len(source) for source in sources.values())
  return f"reference: log-probabilities of {rows:,} sequences computed, kept in {file}"


def _key(data: Mapping[str, str], start: str | None, model: str) -> str:
  """What sums must agree in to be used again."""
  weights = "fresh" if start is None else f"{start} {weights_identity(start)}"
  text = "\n".join([model, weights, *(f"{name} {digest}" for name, digest in data.items())])
  return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _batches(source: ReferenceRows, batch_rows: int) -> Iterator[Batch]:
  for first in range(0, len(source), batch_rows):
    rows = range(first, first + batch_rows)
    yield source.source.assemble([row if row < len(source) else PADDING_ROW for row in rows])


def _read(file: Path, key: str, sources: Mapping[str, ReferenceRows]) -> dict[str, Sums] | str:
  """The file's sums; or, where they are not those, what they are instead."""
  try:
    with np.load(file, allow_pickle=False) as archive:
      if str(archive["key"]) != key:
        return "its log-probabilities are of other data or of another reference"
      sums = {name: archive[name] for name in sources}
  except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
    return f"can't be read ({type(error).__name__})"
  for name, source in sources.items():
    if sums[name].shape != (len(source), 2, source.pairs) or sums[name].dtype != np.float32:
      return f"its {name} log-probabilities have another shape"
  return sums


def _write(file: Path, key: str, sums: Mapping[str, Sums]) -> None:
  """Keeps the sums.

  Raises:
    CheckpointError: the file can't be written.
  """
  try:
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as stream:
      np.savez(stream, key=np.array(key), **dict(sums))  # pyright: ignore[reportArgumentType]
  except OSError as error:
    raise CheckpointError(
      f"{file} can't be written: {error.strerror or error}; make room for it, or change base_output_directory"
    ) from error
