"""The life of a run, the same for every trainer: build, restore, train within the budget, save, report."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tunix.sft import peft_trainer, profiler

from maxtext_posttrain import hosts, maxtext_api, maxtext_lora
from maxtext_posttrain.checkpointing.manager import MaxTextLayoutCheckpointManager, install
from maxtext_posttrain.config import Config
from maxtext_posttrain.config.saved import save_config
from maxtext_posttrain.data import (
  PreparedData,
  RowDataset,
  StepBudgetedIterator,
  group_batches,
)
from maxtext_posttrain.data.prompts import PromptDataset
from maxtext_posttrain.errors import CheckpointError, ConfigError, ReportError, TrainingError
from maxtext_posttrain.logs import quiet_late_writes
from maxtext_posttrain.lora.record import AdapterRecord
from maxtext_posttrain.lora.training import adapter_record
from maxtext_posttrain.maxtext_api import MaxTextConfig, PretrainingState
from maxtext_posttrain.optimizer import add_gradient_clipping
from maxtext_posttrain.performance import compiler_options, peak_tflops, throughput_metrics
from maxtext_posttrain.report import Reporter
from maxtext_posttrain.report.run_file import RunRecord
from maxtext_posttrain.report.run_folder import run_directory
from maxtext_posttrain.trainers import memory, plan
from maxtext_posttrain.trainers.frozen import FrozenModels
from maxtext_posttrain.trainers.loop import PostTrainer, Split
from maxtext_posttrain.trainers.objective import Batch, LossContext, LossOutput, Objective, TrainBatches
from maxtext_posttrain.trainers.record import leaving_report, wandb_loggers
from maxtext_posttrain.trainers.signals import StopRequest
from maxtext_posttrain.trainers.train_step import (
  CompiledSteps,
  FrozenStates,
  StepSettings,
  make_eval_step,
  make_train_step,
)

_ROWS = 1
"""The axis of an update's arrays along which its sequences lie."""


def run(
  objective: Objective,
  config: Config,
  *,
  dry_run: bool = False,
  compiles: bool = True,
  prepared: Callable[[], PreparedData] | None = None,
) -> int:
  """Post-trains as configured.

  Args:
    objective: what the trainer states.
    config: the validated configuration of the run.
    dry_run: build everything, print the plan, train nothing and write nothing.
    compiles: False in a dry run builds everything but the compiled steps.
    prepared: waits for the run's data, where something reads them already; see `maxtext_posttrain.ahead`.

  Returns:
    The process's exit code: 0 for a finished run, 143 or 130 after a signal.

  Raises:
    PostTrainError: one line on what ended the run.
  """
  with (
    StopRequest().listening() as stop,
    quiet_late_writes(show=config.maxtext_log),
    contextlib.ExitStack() as together,
  ):

    def joined() -> None:
      # As processes join, JAX's preemption service takes SIGTERM for itself.
      together.enter_context(stop.listening())
      together.enter_context(hosts.ending_together())
      together.enter_context(hosts.quiet_beside_first())

    hosts.join(config)
    if dry_run:
      session = Session(objective, config, with_weights=False, compiles=compiles, prepared=prepared, joined=joined)
      session.print_plan()
      return 0
    session = Session(objective, config, prepared=prepared, joined=joined)
    return session.train(stop)


def absolute_paths(overrides: Mapping[str, Any]) -> dict[str, Any]:
  """MaxText's keys with local paths made absolute, as Orbax wants them; `gs://` and the like stay."""
  result = dict(overrides)
  for key in ("base_output_directory", "load_parameters_path", "load_full_state_path"):
    path = result.get(key)
    if path and "://" not in str(path):
      result[key] = str(Path(path).absolute())
  restored = result.get("lora", {}).get("lora_restore_path")
  if restored and "://" not in restored:
    result["lora"] = {**result["lora"], "lora_restore_path": str(Path(restored).absolute())}
  return result


@dataclasses.dataclass(frozen=True)
class Datasets:
  """The run's data."""

  train: RowDataset | PromptDataset
  evaluation: RowDataset | PromptDataset | None


class Session:
  """Everything one run is built of.

  Attributes:
    trainer: from `train` on, with the weights and the optimizer.
    maxtext: MaxText's view of the configuration.
    pretraining: what pre-training would build for it, abstractly; with an adapter, over the frozen base.
    lora: both of these where an adapter is trained.
    adapter: how it was made, from the time the base is loaded.
    datasets: the run's data.
    fit: what the run takes of each device, against what there is.
    compiled: the update and evaluation; None where nothing is compiled.
  """

  trainer: PostTrainer

  def __init__(
    self,
    objective: Objective,
    config: Config,
    *,
    with_weights: bool = True,
    compiles: bool = True,
    prepared: Callable[[], PreparedData] | None = None,
    joined: Callable[[], None] = lambda: None,
  ):
    """Builds the model, the data and the compiled steps; writes nothing.

    Args:
      objective: what the trainer states.
      config: the validated configuration.
      with_weights: False plans only, and allocates no weights.
      compiles: False compiles nothing, for a plan alone.
      prepared: waits for data that are being read already; without it they are read here.
      joined: called once the processes of the run know of each other, before anything is built.

    Raises:
      ConfigError: MaxText or the devices refuse the configuration, or it does not fit their memory.
    """
    self.started = time.perf_counter()
    self.objective = objective
    self.config = config
    self._prepared = prepared or functools.partial(objective.prepare_data, config)
    maxtext_api.quiet_logs(show=config.maxtext_log)
    maxtext_api.use_pretraining_prng()
    overrides = absolute_paths(config.maxtext_overrides())
    # Where only epochs are asked for, the data says how many steps that is, and the schedule needs to know.
    datasets = None
    by_epochs = config.get("num_epoch") and "steps" not in overrides
    # MaxText connects the processes of a TPU here; before it nothing may look at a device.
    self.maxtext: MaxTextConfig = maxtext_api.build_config(overrides, hidden_environment=config.environment)
    joined()
    if by_epochs:
      self.mesh = maxtext_api.build_mesh(self.maxtext)
      self.batch_specs = self._batch_specs()
      datasets = self._build_datasets()
      batches = datasets.train.total_batches or 0
      overrides["steps"] = max(1, -(-batches // self.maxtext.gradient_accumulation_steps))
      self.maxtext = maxtext_api.build_config(overrides, hidden_environment=config.environment)
    self.mesh: Mesh = maxtext_api.build_mesh(self.maxtext)
    self.lora = maxtext_lora.lora_states(self.maxtext, self.mesh) if maxtext_lora.lora_enabled(self.maxtext) else None
    self.pretraining: PretrainingState = (
      self.lora.run if self.lora is not None else maxtext_api.pretraining_state(self.maxtext, self.mesh)
    )
    self.adapter: AdapterRecord | None = None
    self.tx = add_gradient_clipping(self.pretraining.tx, self.maxtext.gradient_clipping_threshold)
    self.graphdef = maxtext_api.train_state_graphdef(self.pretraining, self.tx)
    self.batch_specs = self._batch_specs()
    self.frozen = FrozenModels(
      objective.frozen_models(config, self.maxtext),
      live=self.maxtext,
      pretraining=self.pretraining if self.lora is None else self.lora.base,
      mesh=self.mesh,
    )
    self.fit = memory.Fit(memory.estimate(self), memory.limit_of(config, self.mesh))
    if with_weights:
      memory.check_fit(config, self.maxtext, self.fit)
    with concurrent.futures.ThreadPoolExecutor(2, "compile") as executor:
      # XLA compiles without the interpreter lock: meanwhile the data is read and tokenised.
      compiling = executor.submit(self._compile) if compiles else None
      initialising = executor.submit(self._init_model) if with_weights else None
      self.datasets = datasets or self._build_datasets()
      self.compiled: CompiledSteps | None = compiling.result() if compiling is not None else None
      self.model = initialising.result() if initialising is not None else None

  def _init_model(self) -> nnx.Module:
    """The model with fresh weights; with an adapter, over the base it is to be trained over."""
    mt, lora = self.maxtext, self.lora
    if lora is None:
      return maxtext_api.init_model(mt, self.pretraining, self.mesh)
    plain = maxtext_lora.without_lora(mt)
    if mt.load_parameters_path:
      base = nnx.merge(*nnx.split(lora.base.abstract_model))
      loader = MaxTextLayoutCheckpointManager(None, None, _Merged(self.config, mt), target=lora.base)
      loader.load_parameters(mt.load_parameters_path, base)
      nnx.update(base, maxtext_api.init_all_but_weights(plain, lora.base))
    else:
      base = maxtext_api.init_model(plain, lora.base, self.mesh)
    self.adapter = adapter_record(mt, base)
    return maxtext_lora.adapt(mt, self.mesh, lora, base)

  @property
  def steps(self) -> CompiledSteps:
    """The compiled update and evaluation."""
    assert self.compiled is not None
    return self.compiled

  @property
  def run_directory(self) -> Path:
    """Where metrics and the page go; see `report.run_folder.run_directory`."""
    return run_directory(self.maxtext.base_output_directory, self.maxtext.run_name)

  @property
  def checkpoint_directory(self) -> str:
    """Where the steps lie, with a slash at its end."""
    return f"{self.maxtext.checkpoint_dir.rstrip('/')}/{self.objective.checkpoint_role}"

  def _build_datasets(self) -> Datasets:
    data = self._prepared()
    for name, rows in (("data", data.train), ("evaluation data", data.evaluation)):
      if rows is not None:
        for line in rows.report.lines():
          print(f"{name}: {line}", flush=True)
    sizes = {"train": self.maxtext.micro_batch_size_to_train_on, "eval": self.maxtext.micro_batch_size_to_eval_on}
    return Datasets(
      data.train.dataset(batch_size=sizes["train"], mine=self.held_rows("train")),
      None
      if data.evaluation is None
      else data.evaluation.dataset(batch_size=sizes["eval"], mine=self.held_rows("eval")),
    )

  def held_rows(self, split: Split) -> list[int] | None:
    """The places in a micro-batch whose rows this process's devices hold; None for all of them."""
    specs = self.batch_specs.get(split)
    if specs is None:
      return None
    spec = next(iter(specs.values()))
    return hosts.held_rows(spec.sharding, spec.shape, _ROWS)

  def _compile(self) -> CompiledSteps:
    config, mesh = self.maxtext, self.mesh
    settings = StepSettings(
      schedule=self.pretraining.schedule,
      grad_dtype=config.grad_dtype,
      clipping_threshold=config.gradient_clipping_threshold,
      pass_loss_to_optimizer=config.skip_step_on_spikes,
      skip_nonfinite=self.config.nonfinite_gradients == "skip",
      trainable=self.pretraining.trainable,
    )

    def loss(model: nnx.Module, frozen: FrozenStates, batch: Batch, step: jax.Array, is_train: bool) -> LossOutput:
      context = LossContext(
        config=self.config,
        maxtext=config,
        step=step,
        is_train=is_train,
        frozen=self.frozen.merge(frozen),
        frozen_maxtext=self.frozen.maxtext,
      )
      return self.objective.loss(model, batch, context)

    state, frozen = self.pretraining.state, self.frozen.abstract
    started = time.perf_counter()
    with maxtext_api.mesh_context(config, mesh):
      shardings = _shardings((state, frozen))
      train_step = jax.jit(
        make_train_step(self.graphdef, loss, self.objective.weight, settings),
        donate_argnums=0,
        in_shardings=(*shardings, _shardings(self.batch_specs["train"])),
        out_shardings=(shardings[0], NamedSharding(mesh, PartitionSpec())),
      )
      options = compiler_options(mesh.devices.flat[0].platform)
      train = train_step.lower(state, frozen, self.batch_specs["train"]).compile(options)
      evaluate = None
      spec = self.batch_specs.get("eval")
      if spec is not None:
        eval_step = jax.jit(
          make_eval_step(self.graphdef, loss, self.objective.weight), in_shardings=(*shardings, _shardings(spec))
        )
        evaluate = eval_step.lower(state, frozen, spec).compile(options)
    return CompiledSteps(train, evaluate, train.memory_analysis(), time.perf_counter() - started)

  def _batch_specs(self) -> dict[Split, dict[str, jax.ShapeDtypeStruct]]:
    """The arrays of an update, and those of a step of evaluation where there is one."""
    mt = self.maxtext
    specs: dict[Split, dict[str, jax.ShapeDtypeStruct]] = {
      "train": self._batch_spec(mt.gradient_accumulation_steps, mt.micro_batch_size_to_train_on)
    }
    if mt.eval_interval > 0 and not self.objective.evaluates_itself:
      specs["eval"] = self._batch_spec(1, mt.micro_batch_size_to_eval_on)
    return specs

  def _batch_spec(self, micro_batches: int, batch: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays [micro-batches, batch, ...] of an update, each micro-batch placed as pre-training places it.

    Raises:
      ConfigError: the devices can't share out so many sequences evenly.
    """
    placed = maxtext_api.batch_sharding(self.maxtext, self.mesh).spec
    spec = {}
    for key, leaf in self.objective.batch_spec(self.config, self.maxtext, batch).items():
      # Pre-training's is of [batch, seq]; of arrays with other axes the batch alone is shared out.
      axes = placed if len(leaf.shape) == 2 and leaf.shape[1] == self.maxtext.max_target_length else placed[:1]
      sharding = NamedSharding(self.mesh, PartitionSpec(None, *axes))
      shape = (micro_batches, *leaf.shape)
      try:
        sharding.shard_shape(shape)
      except ValueError as error:
        raise ConfigError(
          f"per_device_batch_size={self.maxtext.per_device_batch_size}: micro-batches of {batch} sequences of"
          f" {self.maxtext.max_target_length} tokens can't be shared out evenly over the devices of ici_*_parallelism"
          f" and dcn_*_parallelism ({dict(self.mesh.shape)}); make it a multiple, or give another axis more devices"
        ) from error
      spec[key] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
    return spec

  def place(self, batch: Mapping[str, np.ndarray], split: Split = "train") -> dict[str, jax.Array]:
    """This process's rows (`held_rows`) of a [micro-batches, batch, ...] batch, as global arrays."""
    specs = self.batch_specs[split]
    if not hosts.several():
      return jax.device_put(dict(batch), {key: specs[key].sharding for key in batch})
    held = self.held_rows(split)
    return {
      key: hosts.global_array(value, specs[key].sharding, axis=_ROWS, rows=specs[key].shape[_ROWS], held=held)
      for key, value in batch.items()
    }

  def print_plan(self) -> None:
    """Prints what the run would do.

    Raises:
      ConfigError: it would not fit its devices.
    """
    for line in plan.describe(self):
      print(line)
    memory.check_fit(self.config, self.maxtext, self.fit)

  def train(self, stop: StopRequest) -> int:
    """Restores, trains, saves; returns the exit code."""
    config, mt = self.config, self.maxtext
    hosts.meet()
    with maxtext_api.mesh_context(mt, self.mesh):
      trainer, batches, manager = self._build_trainer()
      completed = trainer.train_steps
      if completed > mt.steps:
        raise CheckpointError(
          f"the checkpoint in {self.checkpoint_directory} is at step {completed}, beyond steps={mt.steps}; raise steps"
        )
      self.objective.before_training(self, completed)
      reporter = Reporter(
        self.run_directory if hosts.is_first() else None,
        total_steps=mt.steps,
        completed_steps=completed,
        tensorboard_directory=mt.tensorboard_dir if mt.enable_tensorboard and hosts.is_first() else None,
        loggers=wandb_loggers(self),
        log_every=config.log_every,
      )
      budget = StepBudgetedIterator(
        batches,
        steps=mt.steps,
        gradient_accumulation_steps=mt.gradient_accumulation_steps,
        completed_steps=completed,
        stop=hosts.AgreedStop(stop, self.mesh) if hosts.several() else stop,
      )
      frozen = self.load_frozen(self.frozen, completed)
      if not (completed or mt.load_parameters_path or mt.load_full_state_path):
        self.objective.init_weights(trainer.model, self.frozen.merge(frozen), config, mt)
      trainer.prepare(
        objective=self.objective,
        steps=self.steps,
        frozen=frozen,
        place=self.place,
        budget=budget,
        groups=group_batches(budget, mt.gradient_accumulation_steps),
        batch_metrics=batches.metrics,
        reporter=reporter,
        save_on_completion=mt.save_checkpoint_on_completion,
      )
      reporter.line(
        f"{self.objective.name}: step {completed} of {mt.steps}, ready after {time.perf_counter() - self.started:.1f} s"
      )
      report = leaving_report(self, reporter, completed=completed, stop=stop)
      with report, contextlib.closing(manager), contextlib.closing(batches), contextlib.closing(reporter):
        if hosts.is_first():
          save_config(config, self.run_directory)
        trainer.run(self._evaluation_pass())
      done = trainer.train_steps
      if done < mt.steps and not (budget.exhausted or stop()):
        raise TrainingError(f"training ended at step {done} of {mt.steps} although neither its data nor a signal did")
      plan.print_end(self, reporter, done=done, exhausted=budget.exhausted, stopped=stop())
    return stop.exit_code

  def _build_trainer(self) -> tuple[PostTrainer, TrainBatches, MaxTextLayoutCheckpointManager]:
    """The trainer with its weights, optimizer and data position: restored, loaded, or fresh."""
    config, mt = self.config, self.maxtext
    model = self.model
    assert model is not None
    tflops = maxtext_api.tflops_per_device(mt) * self.objective.passes(config)
    peak = config.get("peak_tflops") or peak_tflops(jax.devices()[0].device_kind)
    trainer = PostTrainer(
      model,
      self.tx,
      self._tunix_config(),
      accumulation_steps=mt.gradient_accumulation_steps,
      nonfinite_policy=config.nonfinite_gradients,
      max_skipped_steps=config.max_skipped_steps,
      throughput=throughput_metrics(tflops, peak, self.mesh.size),
    )
    self.trainer = trainer
    batches = self.objective.batches(self, self.datasets.train.iterator())
    manager = install(
      trainer,
      self.checkpoint_directory,
      _Merged(config, mt),
      target=self.pretraining,
      data_iterator=batches,
      adapter=self.adapter,
    )
    if trainer.train_steps:
      if not manager.restore_data_position():
        print("this checkpoint holds no data position: the data starts from its beginning", flush=True)
    elif self.adapter is not None:
      if mt.lora.lora_restore_path:
        manager.load_parameters(mt.lora.lora_restore_path, model, release=True)
    elif mt.load_parameters_path:
      manager.load_parameters(mt.load_parameters_path, model, release=True)
    elif mt.load_full_state_path:
      trainer._train_steps, _ = manager.restore_path(mt.load_full_state_path, model, trainer.optimizer, release=True)
    self._place_state(trainer)
    return trainer, batches, manager

  def load_frozen(self, models: FrozenModels, completed: int) -> dict[str, nnx.State]:
    """Loads the weights of frozen models; `completed` updates lie behind the run."""
    return models.load(_Merged(self.config, self.maxtext), functools.partial(self.starting_weights, completed))

  def starting_weights(self, completed: int) -> str | None:
    """The weights the run started from, as `load_parameters_path` names them; None for fresh ones.

    Raises:
      CheckpointError: nothing tells them any more.
    """
    mt = self.maxtext
    if mt.load_parameters_path or mt.load_full_state_path:
      return mt.load_parameters_path or mt.load_full_state_path
    if completed:
      fresh = False
      with contextlib.suppress(ReportError):
        record = RunRecord.read(self.run_directory)
        fresh = record is not None and (record.trainer, record.first_step) == (self.objective.name, 0)
      # Only the first process wrote a record, which may lie on its host alone.
      if hosts.from_first(np.bool_(fresh)):
        return None
      raise CheckpointError(
        f"{self.run_directory}: goes on at step {completed}, and nothing says which weights it started from; the"
        f" {self.objective.name} trainer compares with them: name them with load_parameters_path"
      )
    return None

  def _place_state(self, trainer: PostTrainer) -> None:
    """Every leaf where the compiled update takes it; scalars made one by one lie on one device until here."""
    for node, part in ((trainer.model, "model"), (trainer.optimizer, "optimizer")):
      shardings = jax.tree.map(lambda leaf: leaf.sharding, self.pretraining.state[part])
      live = nnx.state(node, nnx.Not(nnx.Intermediate))
      nnx.update(node, hosts.placed(live, shardings))

  def _tunix_config(self) -> peft_trainer.TrainingConfig:
    mt = self.maxtext
    profiling = None
    if mt.profiler:
      profiling = profiler.ProfilerOptions(
        log_dir=mt.tensorboard_dir,
        skip_first_n_steps=mt.skip_first_n_steps_for_profiler,
        profiler_steps=mt.profiler_steps,
      )
    return peft_trainer.TrainingConfig(
      eval_every_n_steps=mt.eval_interval,
      max_steps=None,
      profiler_options=profiling,
      data_sharding_axis=tuple(mt.data_sharding),
    )

  def _evaluation_pass(self) -> _EvaluationPass | Callable[[], dict[str, float]] | None:
    if self.objective.evaluates_itself:
      return self.objective.evaluation(self) if self.maxtext.eval_interval > 0 else None
    dataset = self.datasets.evaluation
    return None if dataset is None or self.steps.evaluate is None else _EvaluationPass(dataset, self.maxtext.eval_steps)


def _shardings(tree: Any) -> Any:
  return jax.tree.map(lambda leaf: leaf.sharding, tree)


class _EvaluationPass:
  """Iterates over the evaluation data from its start each time, at most `limit` batches where that is above 0."""

  def __init__(self, dataset: RowDataset | PromptDataset, limit: int):
    self._dataset = dataset
    self._limit = limit

  def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
    iterator = self._dataset.iterator()
    try:
      for index, group in enumerate(group_batches(iterator, 1)):
        if 0 < self._limit <= index:
          return
        yield group
    finally:
      iterator.close()


class _Merged:
  """One view of our keys and MaxText's derived ones, for the checkpoint manager."""

  def __init__(self, config: Config, maxtext: MaxTextConfig):
    self._config = config
    self._maxtext = maxtext

  def __getattr__(self, key: str) -> Any:
    if key in self._config:
      return self._config[key]
    return getattr(self._maxtext, key)
