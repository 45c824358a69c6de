"""Tunix's training loop with our step, our metrics and our end of a run.

`PostTrainer` runs `PeftTrainer.train` as it is released and overrides the methods that loop calls. The data budget ends
it, so Tunix is told that it is managed from outside: it neither counts to `max_steps` nor skips batches on resume.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, cast

import jax
import numpy as np
import optax
from flax import nnx
from tunix.sft import peft_trainer

from maxtext_posttrain import hosts, maxtext_api
from maxtext_posttrain.checkpointing.manager import MaxTextLayoutCheckpointManager
from maxtext_posttrain.data import StepBudgetedIterator
from maxtext_posttrain.errors import TrainingError
from maxtext_posttrain.report import Reporter
from maxtext_posttrain.trainers.objective import Objective
from maxtext_posttrain.trainers.train_step import CompiledSteps, FrozenStates

EvalBatches = Iterable[dict[str, np.ndarray]] | Callable[[], dict[str, float]]
Split = Literal["train", "eval"]
PlaceBatch = Callable[[Mapping[str, np.ndarray], Split], dict[str, jax.Array]]


class _EndOfDataError(Exception):
  """The data ended while a skipped update's batch was being replaced."""


class PostTrainer(peft_trainer.PeftTrainer):
  """A Tunix trainer whose update is one compiled function of the whole train state.

  Attributes:
    skipped_updates: updates left out because a gradient was not finite (`nonfinite_gradients=skip`).
  """

  checkpoint_manager: MaxTextLayoutCheckpointManager

  def __init__(
    self,
    model: nnx.Module,
    tx: optax.GradientTransformation,
    training_config: peft_trainer.TrainingConfig,
    *,
    accumulation_steps: int,
    nonfinite_policy: str,
    max_skipped_steps: int,
    throughput: Callable[[float, float], dict[str, float]],
  ):
    """Builds Tunix's trainer; `prepare` gives it what only exists once a checkpoint has been restored.

    Args:
      model: the live model.
      tx: MaxText's optimizer with the clip inline.
      training_config: Tunix's; without accumulation, which happens inside the update.
      accumulation_steps: micro-batches of one update.
      nonfinite_policy: `error` or `skip`.
      max_skipped_steps: with `skip`, how many updates in a row may be left out.
      throughput: (tokens, seconds) of an update to metrics.
    """
    super().__init__(model, tx, training_config)
    self.is_managed_externally = True
    self.skipped_updates = 0
    self._accumulation_steps = accumulation_steps
    self._nonfinite_policy = nonfinite_policy
    self._max_skipped_steps = max_skipped_steps
    self._throughput = throughput

  def prepare(
    self,
    *,
    objective: Objective,
    steps: CompiledSteps,
    frozen: FrozenStates,
    place: PlaceBatch,
    budget: StepBudgetedIterator[Any],
    groups: Iterator[dict[str, np.ndarray]],
    batch_metrics: Callable[[], dict[str, float]],
    reporter: Reporter,
    save_on_completion: bool,
  ) -> None:
    """Hands over the compiled steps, the frozen models, the data and the outputs; call it after restoring."""
    self._objective = objective
    self._steps = steps
    self._frozen = frozen
    self._place = place
    self._budget = budget
    self._groups = groups
    self._batch_metrics = batch_metrics
    self._reporter = reporter
    self._save_on_completion = save_on_completion
    self._state = nnx.state(maxtext_api.TrainStateNNX(self.model, self.optimizer), nnx.Not(nnx.Intermediate))
    self._first_step = self._train_steps
    self._aux: dict[int, tuple[dict[str, jax.Array], dict[str, float]]] = {}
    self._waited = 0.0
    self._saved = 0.0
    self._last_time = time.perf_counter()

  def run(self, eval_batches: EvalBatches | None) -> None:
    """Trains until the budget is spent, the data ends or a stop is asked for; then closes everything."""
    try:
      # Tunix only hands it on, to `_run_eval`.
      self.train(self._groups, cast("Any", eval_batches), skip_jit=True)
    except _EndOfDataError:
      pass
    finally:
      self._sync_modules()
    self.close()

  @property
  def model_state(self) -> nnx.State:
    """The live model's state as the last update left it; the next one takes its arrays."""
    return self._state["model"]

  @property
  def reporter(self) -> Reporter:
    """Where the run's metrics go."""
    return self._reporter

  def jit_train_and_eval_step(self, skip_jit: bool = False, cache_nnx_graph: bool = False) -> tuple[Any, Any]:
    """The compiled update for Tunix's loop; its evaluation goes through `_run_eval`."""
    del skip_jit, cache_nnx_graph
    self._last_time = time.perf_counter()
    return self._update, self._steps.evaluate

  def _prepare_inputs(self, input_data: Any) -> Any:
    return self._place(input_data, "train")

  def _update(self, batch: dict[str, jax.Array]) -> tuple[Any, Any, Any]:
    """Makes one update; with `skip`, as many attempts as it takes to find a finite gradient."""
    in_a_row = 0
    while True:
      self._state, metrics = self._steps.train(self._state, self._frozen, batch)
      if self._nonfinite_policy != "skip" or bool(metrics["finite"]):
        return metrics["loss"], metrics, metrics["grad_norm"]
      self.skipped_updates += 1
      in_a_row += 1
      self._reporter.line(
        f"step {self._train_steps + 1}: gradient norm {float(metrics['grad_norm'])}, update skipped"
        f" ({self.skipped_updates} so far)"
      )
      if in_a_row > self._max_skipped_steps:
        raise TrainingError(
          f"step {self._train_steps + 1}: {in_a_row} updates in a row skipped for gradients that are not finite,"
          f" more than max_skipped_steps={self._max_skipped_steps}; lower learning_rate or look at the data"
        )
      self._budget.allow_more(self._accumulation_steps)
      replacement = next(self._groups, None)
      if replacement is None:
        raise _EndOfDataError
      batch = self._prepare_inputs(replacement)

  def _post_process_train_step(self, aux: Any) -> None:
    self._aux[self._train_steps] = (aux, self._batch_metrics())

  def _write_train_metrics(self) -> None:
    """Writes the update before this one, as Tunix does; and this one too where its checkpoint is due.

    So the metrics of a step are on disk before its checkpoint is, and a gradient that is not finite is met before
    anything is saved.
    """
    super()._write_train_metrics()
    if self.checkpoint_manager.should_save(self._train_steps):
      self._flush_train_metrics()
      self._sync_modules()

  def _flush_train_metrics(self) -> None:
    if self._prev_buffered_train_metrics is not None:
      super()._write_train_metrics()

  def _write_metrics(self, metrics_buffer: peft_trainer.MetricsBuffer) -> None:
    step = metrics_buffer.step
    made, of_batch = self._aux.pop(step - 1)
    aux = {key: float(value) for key, value in jax.device_get(made).items()}
    if not aux.pop("finite"):
      raise TrainingError(
        f"step {step}: loss {aux['loss']}, gradient norm {aux['grad_norm']}: not finite, nothing of it was saved; lower"
        " learning_rate, look at the data, or set nonfinite_gradients=skip"
      )
    now = time.perf_counter()
    seconds, self._last_time = now - self._last_time, now
    waited, self._waited = self._budget.wait_seconds - self._waited, self._budget.wait_seconds
    total_saved = self.checkpoint_manager.save_seconds
    saved, self._saved = total_saved - self._saved, total_saved
    values = {key: value for key, value in aux.items() if key != "weight"}
    values[self._objective.weight_name] = aux["weight"]
    values |= of_batch
    values["step_seconds"] = seconds
    values |= self._throughput(aux.get("tokens", aux["weight"]), seconds)
    values["data_wait_seconds"] = waited
    values["save_wait_seconds"] = saved
    if self.skipped_updates:
      values["skipped_updates"] = self.skipped_updates
    self._reporter.train(step, values)

  def _run_eval(self, eval_ds: Iterable[Any], eval_step_fn: Callable[..., Any]) -> None:
    """One pass over the evaluation data: means over all of it."""
    # Tunix evaluates as training starts; a resumed run does so only where the run before it was to and did not.
    due = self._train_steps % self.config.eval_every_n_steps == 0
    # Only the first process has the metrics.
    if not due or hosts.from_first(np.bool_(self._reporter.has("eval", self._train_steps))):
      return
    self._flush_train_metrics()
    started = time.perf_counter()
    values = eval_ds() if callable(eval_ds) else self._mean_loss(eval_ds, eval_step_fn)
    self._reporter.evaluation(self._train_steps, values)
    # The evaluation is no part of the next update; a save before it is, as where nothing is evaluated.
    self._last_time += time.perf_counter() - started

  def _mean_loss(self, eval_ds: Iterable[Any], eval_step_fn: Callable[..., Any]) -> dict[str, float]:
    sums: Any = None
    for batch in eval_ds:
      result = jax.tree.map(float, jax.device_get(eval_step_fn(self._state, self._frozen, self._place(batch, "eval"))))
      sums = result if sums is None else jax.tree.map(operator.add, sums, result)
    weight_name = self._objective.weight_name
    if sums is None or not sums["weight"]:
      what = weight_name.replace("_", " ")
      raise TrainingError(f"the evaluation data has no {what}; mend it or set eval_interval=-1")
    loss = sums["loss_sum"] / sums["weight"]
    means = {name: value / sums["weight"] for name, value in sums["means"].items()}
    return {"loss": loss, **self._objective.evaluation_metrics(loss), weight_name: int(sums["weight"]), **means}

  def _save_last_checkpoint(self) -> None:
    # Pre-training's folder of the step a run starts from has another name; nothing new was made, nothing is written.
    if self._save_on_completion and self._train_steps > self._first_step:
      super()._save_last_checkpoint()

  def close(self) -> None:
    """Writes what is buffered, the last checkpoint included, and closes every output."""
    try:
      super().close()
    finally:
      self._reporter.close()

  def _sync_modules(self) -> None:
    """The modules that Tunix and the checkpoint manager see take the arrays the last update made."""
    nnx.update(self.model, self._state["model"])
    nnx.update(self.optimizer, self._state["optimizer"])
