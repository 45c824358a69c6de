"""Runs a distillation's teacher over its data once, and saves its most probable tokens."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.config import Config
from maxtext_posttrain.data import BATCH_KEYS, PreparedData, PreparedRows
from maxtext_posttrain.data.batches import PADDING_ROW
from maxtext_posttrain.data.distillation import vocabulary_of
from maxtext_posttrain.data.teacher_logits import VERSION, Metadata, Part, Shard, write_metadata, write_shard
from maxtext_posttrain.errors import ConfigError
from maxtext_posttrain.losses.distillation import top_k_log_probs
from maxtext_posttrain.models.new_folder import new_folder
from maxtext_posttrain.performance import compiler_options
from maxtext_posttrain.trainers.distillation import TEACHER, teacher_model
from maxtext_posttrain.trainers.frozen import FrozenModels

_ROWS_OF_A_SHARD = 1024
_PROGRESS_SECONDS = 10.0

Batch = Mapping[str, Any]
TopK = Callable[[Batch], tuple[jax.Array, jax.Array]]


def save_teacher_logits(
  config: Config, data: PreparedData, k: int, output: Path, *, progress: Callable[[str, int, int], None]
) -> Metadata:
  """Saves the teacher's k most probable tokens of every trained position.

  Args:
    config: of the distillation.
    data: its data.
    k: tokens kept.
    output: a folder that does not exist.
    progress: is told now and then which data set it is, how many rows are done, and of how many.

  Returns:
    What was written.

  Raises:
    ConfigError: MaxText refuses the teacher's configuration, or there are several processes.
    CheckpointError: the teacher's weights can't be read.
    ModelError: the files can't be written.
  """
  if jax.process_count() > 1:
    raise ConfigError(f"posttrain teacher-logits runs in one process, not in {jax.process_count()}")
  maxtext_api.quiet_logs(show=config.maxtext_log)
  maxtext_api.use_pretraining_prng()
  teacher = teacher_model(config)
  mesh = maxtext_api.build_mesh(teacher.maxtext)
  with maxtext_api.mesh_context(teacher.maxtext, mesh):
    pretraining = maxtext_api.pretraining_state(teacher.maxtext, mesh)
    frozen = FrozenModels({TEACHER: teacher}, live=teacher.maxtext, pretraining=pretraining, mesh=mesh)
    state = frozen.load(config, lambda: None)[TEACHER]
    batch_size = teacher.maxtext.micro_batch_size_to_train_on

    def top_k(state: nnx.State, batch: Batch) -> tuple[jax.Array, jax.Array]:
      model = frozen.merge({TEACHER: state})[TEACHER]
      return top_k_log_probs(maxtext_api.forward(teacher.maxtext, model, batch, is_train=False), k)

    sharding = NamedSharding(mesh, maxtext_api.batch_sharding(teacher.maxtext, mesh).spec)
    shape = (batch_size, teacher.maxtext.max_target_length)
    spec = {key: jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding) for key in BATCH_KEYS}
    whole = NamedSharding(mesh, PartitionSpec())
    compiled = jax.jit(top_k, out_shardings=whole).lower(state, spec).compile(
      compiler_options(mesh.devices.flat[0].platform)
    )  # fmt: skip

    def run(batch: Batch) -> tuple[jax.Array, jax.Array]:
      return compiled(state, jax.device_put(dict(batch), sharding))

    parts = {"train": data.train} | ({} if data.evaluation is None else {"eval": data.evaluation})
    positions = sum(rows.report.trained_tokens for rows in parts.values())
    with new_folder(output, positions * (2 * k + 1) * 4) as folder:
      metadata = Metadata(
        version=VERSION,
        k=k,
        vocab_size=teacher.maxtext.vocab_size,
        tokenizer=vocabulary_of(config),
        teacher=str(teacher.items),
        teacher_digest=_digest(state),
        parts={
          name: Part(data=rows.source.fingerprint(), shards=_write(folder, name, rows, batch_size, run, progress))
          for name, rows in parts.items()
        },
      )
      write_metadata(folder, metadata)
  return metadata


def _write(
  folder: Path,
  part: str,
  rows: PreparedRows,
  batch_size: int,
  run: TopK,
  progress: Callable[[str, int, int], None],
) -> list[Shard]:
  shards: list[Shard] = []
  saved: list[tuple[np.ndarray, np.ndarray]] = []
  count, told = len(rows.source), time.monotonic()
  for first in range(0, count, batch_size):
    numbers = list(range(first, min(first + batch_size, count)))
    batch = rows.source.assemble([*numbers, *[PADDING_ROW] * (batch_size - len(numbers))])
    ids, log_probs = jax.device_get(run({key: batch[key] for key in BATCH_KEYS}))
    for place in range(len(numbers)):
      trained = batch["targets_segmentation"][place] != 0
      saved.append((ids[place][trained], log_probs[place][trained]))
    while len(saved) >= _ROWS_OF_A_SHARD:
      shards.append(write_shard(folder, part, len(shards), saved[:_ROWS_OF_A_SHARD]))
      saved = saved[_ROWS_OF_A_SHARD:]
    if time.monotonic() - told > _PROGRESS_SECONDS:
      told = time.monotonic()
      progress(part, numbers[-1] + 1, count)
  if saved:
    shards.append(write_shard(folder, part, len(shards), saved))
  return shards


def _digest(state: nnx.State) -> str:
  """A digest of a model's weights."""
  digest = hashlib.blake2b(digest_size=16)
  for path, variable in nnx.to_flat_state(nnx.filter_state(state, nnx.Param)):
    array = np.asarray(jax.device_get(variable.get_value()))
    digest.update(f"{'/'.join(map(str, path))} {array.dtype} {array.shape}".encode())
    digest.update(np.ascontiguousarray(array).view(np.uint8).data)
  return digest.hexdigest()
