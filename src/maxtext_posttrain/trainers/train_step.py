"""One optimizer update and one evaluation batch, as pure functions of the train state; compiled once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from maxtext_posttrain.optimizer import global_norm
from maxtext_posttrain.trainers.objective import Batch, LossOutput

FrozenStates = Mapping[str, nnx.State]
LossFn = Callable[[nnx.Module, FrozenStates, Batch, jax.Array, bool], LossOutput]
WeightFn = Callable[[Batch], jax.Array]
TrainStep = Callable[[nnx.State, FrozenStates, Batch], tuple[nnx.State, dict[str, jax.Array]]]
EvalStep = Callable[[nnx.State, FrozenStates, Batch], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class StepSettings:
  """What an update needs beside the loss.

  Attributes:
    schedule: learning rate by updates made, for the metrics.
    grad_dtype: float32 gradients are cast to it before the update, as pre-training does.
    clipping_threshold: the threshold inside the optimizer, for what spike detection sees; 0 is none.
    skip_nonfinite: leave weights and optimizer as they are where the gradient is not finite.
    pass_loss_to_optimizer: the optimizer wants `loss` and `grad_norm` (MaxText's `skip_step_on_spikes`).
    trainable: which of the model's variables are trained.
  """

  schedule: optax.Schedule
  grad_dtype: Any = jnp.float32
  clipping_threshold: float = 0.0
  skip_nonfinite: bool = False
  pass_loss_to_optimizer: bool = False
  trainable: nnx.filterlib.Filter = nnx.Param


def make_train_step(graphdef: nnx.GraphDef, loss_fn: LossFn, weight_fn: WeightFn, settings: StepSettings) -> TrainStep:
  """The function of one optimizer update.

  The objective is the sum of the losses of all micro-batches over the sum of their weights: the mean over the whole
  global batch, not a mean of means. The metric `finite` says whether loss and gradient norm are.

  Args:
    graphdef: of the `TrainStateNNX` of the live model and optimizer.
    loss_fn: (model, states of frozen models, micro-batch, updates made, is_train) to loss and metrics.
    weight_fn: micro-batch to what its sum is divided by: trained tokens, or pairs.
    settings: see `StepSettings`.

  Returns:
    (state, states of frozen models, batch of arrays [micro-batches, batch, ...]) to (new state, metrics as float32
    scalars).
  """

  def train_step(state: nnx.State, frozen: FrozenStates, batch: Batch) -> tuple[nnx.State, dict[str, jax.Array]]:
    train_state = nnx.merge(graphdef, state)
    model_graphdef, params, rest = nnx.split(train_state.model, settings.trainable, ...)
    step = train_state.optimizer.step.get_value()
    weight = jnp.sum(jax.vmap(weight_fn)(batch).astype(jnp.float32))
    divisor = jnp.maximum(weight, 1.0)

    def mean_loss(params: nnx.State, rest: nnx.State, micro_batch: Batch) -> tuple[jax.Array, Any]:
      model = nnx.merge(model_graphdef, params, rest, copy=True)
      output = loss_fn(model, frozen, micro_batch, step, True)
      new_rest = nnx.state(model, nnx.Not(nnx.Any(settings.trainable, nnx.Intermediate)))
      return output.loss_sum / divisor, (output, new_rest)

    value_and_grad = jax.value_and_grad(mean_loss, has_aux=True)
    micro_batches = next(iter(batch.values())).shape[0]
    if micro_batches == 1:
      (loss, (output, rest)), grads = value_and_grad(params, rest, jax.tree.map(lambda leaf: leaf[0], batch))
    else:

      def accumulate(carry: Any, micro_batch: Batch) -> tuple[Any, Any]:
        loss_sum, grad_sum, rest = carry
        (loss, (output, rest)), grads = value_and_grad(params, rest, micro_batch)
        return (loss_sum + loss, jax.tree.map(jnp.add, grad_sum, grads), rest), output

      start = (jnp.float32(0.0), jax.tree.map(jnp.zeros_like, params), rest)
      (loss, grads, rest), outputs = jax.lax.scan(accumulate, start, batch)
      output = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), outputs)
    grads = jax.tree.map(lambda grad: grad.astype(settings.grad_dtype) if grad.dtype == jnp.float32 else grad, grads)
    grad_norm = global_norm(grads)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
    before = nnx.as_pure((nnx.state(train_state.optimizer), params))
    learning_rate = settings.schedule(step)
    extra = {}
    if settings.pass_loss_to_optimizer:
      clip = settings.clipping_threshold
      extra = {"loss": loss, "grad_norm": jnp.minimum(grad_norm, clip) if clip > 0 else grad_norm}
    train_state.optimizer.update(train_state.model, grads, **extra)
    if settings.skip_nonfinite:
      after = nnx.as_pure((nnx.state(train_state.optimizer), nnx.state(train_state.model, settings.trainable)))
      # A select fuses into the update; a branch would hold both states.
      kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
      nnx.update(train_state.optimizer, kept[0])
      nnx.update(train_state.model, kept[1])
    nnx.update(train_state.model, rest)
    metrics = {
      "loss": loss,
      "grad_norm": grad_norm,
      "learning_rate": jnp.asarray(learning_rate, jnp.float32),
      "weight": weight,
      "finite": finite,
      **output.totals,
      **{name: value / divisor for name, value in output.means.items()},
    }
    return nnx.state(train_state, nnx.Not(nnx.Intermediate)), metrics

  return train_step


def make_eval_step(graphdef: nnx.GraphDef, loss_fn: LossFn, weight_fn: WeightFn) -> EvalStep:
  """The function of one evaluation batch.

  Returns:
    (state, states of frozen models, batch [1, batch, ...]) to the sums `loss_sum` and `weight`, and those of the means
    under `means`.
  """

  def eval_step(state: nnx.State, frozen: FrozenStates, batch: Batch) -> dict[str, Any]:
    batch = jax.tree.map(lambda leaf: leaf[0], batch)
    merged = nnx.merge(graphdef, state)
    optimizer = getattr(merged, "optimizer", None)
    step = jnp.int32(0) if optimizer is None else optimizer.step.get_value()
    output = loss_fn(merged.model, frozen, batch, step, False)
    return {"loss_sum": output.loss_sum, "weight": weight_fn(batch).astype(jnp.float32), "means": output.means}

  return eval_step


@dataclasses.dataclass(frozen=True)
class CompiledSteps:
  """The compiled update and evaluation; `memory` is the update's memory by XLA's own analysis, in bytes."""

  train: TrainStep
  evaluate: EvalStep | None
  memory: Any
  seconds: float
