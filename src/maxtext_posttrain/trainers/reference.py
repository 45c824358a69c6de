"""The reference's log-probabilities of a run's pairs, computed once before training and kept in the run's folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from maxtext_posttrain import hosts
from maxtext_posttrain.data.reference_cache import FILE_NAME, Compute, fill_reference
from maxtext_posttrain.data.reference_rows import ReferenceRows
from maxtext_posttrain.errors import ConfigError
from maxtext_posttrain.performance import compiler_options
from maxtext_posttrain.trainers.frozen import FrozenModels
from maxtext_posttrain.trainers.objective import Batch, FrozenModel

if TYPE_CHECKING:
  from maxtext_posttrain.trainers.base import Session

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
    ConfigError: the processes have no folder in common.
    CheckpointError: see `fill_reference`; or the starting weights can't be told or read.
  """
  if hosts.several() and "://" in session.maxtext.base_output_directory:
    raise ConfigError(
      "dpo.reference=precomputed: several processes share the file of log-probabilities in the run's folder, which"
      " for a bucket lies on one host; use dpo.reference=frozen, or a base_output_directory that all hosts mount"
    )
  datasets = {"train": session.datasets.train, "evaluation": session.datasets.evaluation}
  sources = {
    name: dataset.source
    for name, dataset in datasets.items()
    if dataset is not None and isinstance(dataset.source, ReferenceRows)
  }

  def load() -> Compute:
    mt, mesh = session.maxtext, session.mesh
    built = session.pretraining if session.lora is None else session.lora.base
    models = FrozenModels({_REFERENCE: FrozenModel(mt)}, live=mt, pretraining=built, mesh=mesh)
    states = session.load_frozen(models, completed)

    def forward(states: Mapping[str, nnx.State], batch: Batch) -> jax.Array:
      return sums(models.merge(states)[_REFERENCE], {key: values[0] for key, values in batch.items()})

    # Every process gets all of it: each needs the rows that its batches will have.
    compiled = jax.jit(
      forward,
      out_shardings=NamedSharding(mesh, PartitionSpec()),
      compiler_options=compiler_options(mesh.devices.flat[0].platform),
    )
    mine = session.held_rows("train") or slice(None)
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
    writes=hosts.is_first(),
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
