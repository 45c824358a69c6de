"""The reference's log-probabilities of a run's pairs, computed once before training and kept in the run's folder."""

from __future__ import annotations

import hashlib
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from maxtext_posttrain.checkpointing.identity import weights_identity
from maxtext_posttrain.data.batches import PADDING_ROW
from maxtext_posttrain.data.reference_rows import ReferenceRows
from maxtext_posttrain.errors import CheckpointError
from maxtext_posttrain.performance import compiler_options
from maxtext_posttrain.trainers.frozen import FrozenModels
from maxtext_posttrain.trainers.objective import Batch, FrozenModel

if TYPE_CHECKING:
  from maxtext_posttrain.trainers.base import Session

FILE_NAME = "reference_log_probs.npz"

Sums = npt.NDArray[np.float32]
RowBatch = dict[str, np.ndarray]
Compute = Callable[[RowBatch], Sums]

_REFERENCE = "reference"


def precompute(session: Session, completed: int, sums: Callable[[nnx.Module, Batch], jax.Array]) -> str:
  """Fills the `ReferenceRows` of a run's data with what the weights that the run started from make of them.

  Args:
    session: the run.
    completed: updates behind it.
    sums: (model, batch of rows) to float32 [rows, 2, pairs]; traced.

  Returns:
    A line on what was done.

  Raises:
    CheckpointError: see `fill_reference`; or the starting weights can't be told or read.
  """
  datasets = {"train": session.datasets.train, "evaluation": session.datasets.evaluation}
  sources = {
    name: dataset.source
    for name, dataset in datasets.items()
    if dataset is not None and isinstance(dataset.source, ReferenceRows)
  }

  def load() -> Compute:
    mt, mesh = session.maxtext, session.mesh
    models = FrozenModels({_REFERENCE: FrozenModel(mt)}, live=mt, pretraining=session.pretraining, mesh=mesh)
    states = session.load_frozen(models, completed)

    def forward(states: Mapping[str, nnx.State], batch: Batch) -> jax.Array:
      return sums(models.merge(states)[_REFERENCE], {key: values[0] for key, values in batch.items()})

    # Every process gets all of it: each needs the rows that its batches will have.
    compiled = jax.jit(
      forward,
      out_shardings=NamedSharding(mesh, PartitionSpec()),
      compiler_options=compiler_options(mesh.devices.flat[0].platform),
    )
    share = mt.micro_batch_size_to_train_on // jax.process_count()
    mine = slice(jax.process_index() * share, (jax.process_index() + 1) * share)
    return lambda batch: np.asarray(
      compiled(states, session.place({key: values[None, mine] for key, values in batch.items()}))
    )

  return fill_reference(
    sources,
    file=session.run_directory / FILE_NAME,
    start=session.starting_weights(completed),
    model=_describe_model(session),
    batch_rows=session.maxtext.micro_batch_size_to_train_on,
    resuming=completed > 0,
    writes=jax.process_index() == 0,
    load=load,
  )


def _describe_model(session: Session) -> str:
  """What beside the weights on disk decides on log-probabilities: shapes, number formats, and fresh weights' seed."""
  mt = session.maxtext
  digest = hashlib.blake2b(digest_size=16)
  leaves = jax.tree_util.tree_leaves_with_path(nnx.filter_state(session.pretraining.state["model"], nnx.Param))
  for path, leaf in leaves:
    digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}\n".encode())
  names = ("decoder_block", "dtype", "init_weights_seed", "rope_max_timescale", "rope_type")
  return " ".join([digest.hexdigest(), *(f"{name}={getattr(mt, name)}" for name in names)])


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
      read.
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


def _batches(source: ReferenceRows, batch_rows: int) -> Iterator[RowBatch]:
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
  """Writes under another name first: the file is whole or not there."""
  file.parent.mkdir(parents=True, exist_ok=True)
  descriptor, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
  try:
    with os.fdopen(descriptor, "wb") as stream:
      np.savez(stream, key=np.array(key), **dict(sums))  # pyright: ignore[reportArgumentType]
    Path(temporary).replace(file)
  except BaseException:
    Path(temporary).unlink(missing_ok=True)
    raise
