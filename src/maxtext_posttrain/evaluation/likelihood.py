"""How probable a model finds the trained tokens of data: by the trainer's own evaluation step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.data import BATCH_KEYS, PreparedRows, group_batches
from maxtext_posttrain.errors import EvaluationError
from maxtext_posttrain.models.loading import LoadedModel
from maxtext_posttrain.performance import compiler_options
from maxtext_posttrain.trainers.objective import Batch, LossContext, LossOutput
from maxtext_posttrain.trainers.sft import SFT
from maxtext_posttrain.trainers.train_step import FrozenStates, make_eval_step

_LARGEST_EXPONENT = 700.0


@dataclasses.dataclass(frozen=True)
class Likelihood:
  """Means over all trained tokens.

  Attributes:
    loss: the trainer's loss, in nats a token.
    token_accuracy: share of tokens that were the most probable ones.
    trained_tokens: how many there are.
  """

  loss: float
  token_accuracy: float
  trained_tokens: int

  @property
  def perplexity(self) -> float:
    """e to the loss."""
    return math.exp(min(self.loss, _LARGEST_EXPONENT))


def evaluate_likelihood(
  loaded: LoadedModel, rows: PreparedRows, batch_size: int, *, progress: Callable[[int, int], None]
) -> Likelihood:
  """Evaluates a model on all rows, once through and in order.

  Args:
    loaded: the model.
    rows: the data, prepared for its vocabulary and length.
    batch_size: sequences at once; a multiple of the devices that share them.
    progress: is told after each batch how many there were, and how many there will be.

  Raises:
    EvaluationError: the data has no trained token.
  """
  config, mesh = loaded.maxtext, loaded.mesh
  objective = SFT()
  graphdef, state = nnx.split(nnx.Dict(model=loaded.model))
  sharding = NamedSharding(mesh, PartitionSpec(None, *maxtext_api.batch_sharding(config, mesh).spec))
  shape = (1, batch_size, config.max_target_length)
  abstract = {key: jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding) for key in BATCH_KEYS}

  def loss(model: nnx.Module, frozen: FrozenStates, batch: Batch, step: jax.Array, is_train: bool) -> LossOutput:
    del frozen
    return objective.loss(model, batch, LossContext(loaded.config, config, step, is_train))

  step = make_eval_step(graphdef, loss, objective.weight)
  dataset = rows.dataset(batch_size=batch_size)
  sums: Any = {"loss_sum": 0.0, "weight": 0.0, "means": {"token_accuracy": 0.0}}
  iterator = dataset.iterator()
  try:
    with maxtext_api.mesh_context(config, mesh):
      compiled = jax.jit(step).lower(state, {}, abstract).compile(compiler_options(mesh.devices.flat[0].platform))
      for number, batch in enumerate(group_batches(iterator, 1), start=1):
        result = jax.device_get(compiled(state, {}, jax.device_put(dict(batch), sharding)))
        sums = jax.tree.map(lambda total, value: total + float(value), sums, result)
        progress(number, dataset.batches_per_epoch)
  finally:
    iterator.close()
  weight = sums["weight"]
  if not weight:
    raise EvaluationError(f"{rows.report.source} has no trained token: there is nothing to evaluate")
  return Likelihood(sums["loss_sum"] / weight, sums["means"]["token_accuracy"] / weight, int(weight))
