"""The checkpoint manager Tunix's trainers save through, in the layout that pre-training resumes from."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp_v0
from etils import epath
from flax import nnx
from orbax.checkpoint import v1 as ocp
from tunix.sft import checkpoint_manager as tunix_checkpoint_manager

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.checkpointing import layout, reader
from maxtext_posttrain.checkpointing.data_position import DATA_POSITION, DataPosition, PositionedIterator
from maxtext_posttrain.checkpointing.metadata import DamagedCheckpointError, describe_checkpoint, reason, step_root
from maxtext_posttrain.checkpointing.storage import StorageOptions
from maxtext_posttrain.checkpointing.target import PlainTarget, Target, live_target, without_base
from maxtext_posttrain.errors import CheckpointError
from maxtext_posttrain.lora.record import LORA, AdapterRecord, refuse_adapter

logger = logging.getLogger(__name__)

_WRAPPERS_KEY = "optimizer_wrappers"
_AFTER_FAILED_SAVE = "make room there and run again: it goes on from the newest checkpoint"


class MaxTextLayoutCheckpointManager(tunix_checkpoint_manager.CheckpointManager):
  """Saves and restores `<root>/<step>/items` exactly as MaxText's pre-training does.

  A drop-in for Tunix's manager. The written tree is built from the abstract state that pre-training would build; live
  leaves are mapped onto it path by path. Restoring also reads Tunix's own layout; the next save is in MaxText's.
  """

  def __init__(
    self,
    root_directory: str | None = None,
    options: ocp_v0.CheckpointManagerOptions | None = None,
    config: Any = None,
    *,
    target: Target | None = None,
    micro_steps_per_update: int = 1,
    adapter: AdapterRecord | None = None,
  ):
    """Opens `root_directory`, making it if needed.

    Args:
      root_directory: the run's `checkpoints` folder; None makes a manager that does nothing.
      options: as Tunix's manager takes them.
      config: an object with MaxText's keys, for the storage options and the step's metadata.
      target: pre-training's abstract state; without it the layout is taken from the live state itself.
      micro_steps_per_update: accumulation steps where the optimizer is inside `optax.MultiSteps`.
      adapter: of a run that trains an adapter over a frozen base. Then the adapter's parameters are all that is
        written and read of the model's, and only checkpoints of the same adapter over the same base are read.

    Raises:
      CheckpointError: the folder can't be made or read.
    """
    super().__init__(root_directory=None)
    self._config = config
    self._target = target
    self._micro_steps_per_update = micro_steps_per_update
    self._adapter = adapter
    self._storage = StorageOptions.of(options, config)
    self._checkpointer: ocp.training.Checkpointer | None = None
    self._save_in_flight: int | None = None
    self.data_iterator: PositionedIterator | None = None
    self.save_seconds = 0.0
    if root_directory is not None:
      self._checkpointer = self._open(str(root_directory))

  def _open(self, root_directory: str) -> ocp.training.Checkpointer:
    storage = self._storage
    # Orbax's own policies do not quite follow its own protocols' types.
    save_decision: Any = storage.save_decision_policy or ocp.training.save_decision_policies.FixedIntervalPolicy(
      storage.save_interval_steps
    )
    preservation: Any = None
    if storage.max_to_keep is not None:
      preservation = ocp.training.preservation_policies.LatestN(storage.max_to_keep)
    with _one_line_errors(
      f"checkpoint folder {root_directory} can't be used", "set base_output_directory to a folder that can be written"
    ):
      # Every folder is tried before hours of training rest on it.
      epath.Path(root_directory).mkdir(parents=True, exist_ok=True)
      return ocp.training.Checkpointer(
        root_directory,
        context=storage.context(),
        save_decision_policy=save_decision,
        preservation_policy=preservation,
        cleanup_tmp_directories=jax.process_count() == 1,
      )

  @property
  def enabled(self) -> bool:
    """Whether this manager reads and writes anything at all."""
    return self._checkpointer is not None

  def all_steps(self) -> list[int]:
    """Committed steps, oldest first."""
    return [] if self._checkpointer is None else [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

  def latest_step(self) -> int | None:
    """The newest committed step, or None."""
    steps = self.all_steps()
    return steps[-1] if steps else None

  def should_save(self, step: int) -> bool:
    """Whether `save(step, ...)` without `force` would write a checkpoint."""
    if self._checkpointer is None or step in self.all_steps():
      return False
    return self._checkpointer.should_save(step)

  def save(
    self,
    step: int,
    model: nnx.Module,
    optimizer: nnx.Optimizer | None = None,
    save_only_lora_params: bool = False,
    force: bool = False,
    custom_metadata: dict[str, Any] | None = None,
  ) -> bool:
    """Writes `<root>/<step>/items`, and the data position beside it.

    Args:
      step: optimizer updates made; the folder's name.
      model: the live model, bare or behind the adapter.
      optimizer: its optimizer; without it only weights and `nnx_aux` are written.
      save_only_lora_params: not for full training; with an adapter nothing else is written anyway.
      force: write even where the interval says no.
      custom_metadata: added to the step's metadata; wins over what the configuration says.

    Returns:
      Whether a checkpoint was written (or started, where writing is asynchronous). A step that is there is not
      written again.

    Raises:
      CheckpointError: the state does not fit pre-training's layout, or it, or the save before it, could not be written.
    """
    if self._checkpointer is None:
      return False
    self._raise_failed_save()
    if not force and not self._checkpointer.should_save(step):
      return False
    if step in self.all_steps():
      logger.info("checkpoint %d is there already", step)
      return False
    if save_only_lora_params and self._adapter is None:
      raise CheckpointError(f"checkpoint {step}: adapter-only checkpoints are not written by full training")
    start = time.perf_counter()
    live, plan, target = self._plan(model, optimizer)
    items = maxtext_api.to_checkpoint_dict(layout.to_pretraining(plan, live, target.state))
    metadata = self._metadata_from_config()
    kept = layout.kept_wrapper_values(plan, live)
    if kept:
      metadata[_WRAPPERS_KEY] = kept
    checkpointables: dict[str, Any] = {"items": items}
    if self.data_iterator is not None:
      checkpointables[DATA_POSITION] = DataPosition(self.data_iterator)
    # Orbax would wait for the save before this one too, and its failure would be told as this one's.
    self.wait_until_finished()
    with _one_line_errors(f"checkpoint {self._step_path(step)} could not be written", _AFTER_FAILED_SAVE):
      response = self._checkpointer.save_checkpointables_async(
        step, checkpointables, force=force, custom_metadata={**metadata, **(custom_metadata or {})}
      )
    self._save_in_flight = step if response is not None else None
    if not self._storage.use_async:
      self.wait_until_finished()
    self.save_seconds += time.perf_counter() - start
    return response is not None

  def maybe_restore(
    self,
    model: nnx.Module,
    optimizer: nnx.Optimizer | None = None,
    step: int | None = None,
    restore_only_lora_params: bool = False,
    *,
    release: bool = False,
  ) -> tuple[int, dict[str, Any]]:
    """Restores `model` and `optimizer` in place from the newest checkpoint, or from `step`.

    Args:
      model: the live model, bare or behind the adapter.
      optimizer: its optimizer; without it only weights and `nnx_aux` are read.
      step: None for the newest.
      restore_only_lora_params: not for full training; with an adapter nothing else is read anyway.
      release: give back the memory of what is replaced before its replacement is read, so that the two are not held at
        once. A read that then fails leaves a model without arrays; so not where an older checkpoint is to be tried.

    Returns:
      The number of updates made and the step's metadata; `(0, {})` where there is no checkpoint.

    Raises:
      CheckpointError: the checkpoint is damaged, or does not fit the model; each path that does not is named.
    """
    if restore_only_lora_params and self._adapter is None:
      raise CheckpointError("adapter-only checkpoints are not read by full training")
    self.wait_until_finished()  # A save that is under way is listed already.
    candidates = self.all_steps()[::-1] if step is None else [step]
    for index, candidate in enumerate(candidates):
      path = self._step_path(candidate)
      try:
        return self.restore_path(str(path), model, optimizer, release=release and not self._storage.restore_fallback)
      except DamagedCheckpointError as error:
        older = candidates[index + 1] if index + 1 < len(candidates) else None
        if self._storage.restore_fallback and older is not None:
          kept_at = self._set_aside(candidate)
          logger.warning("%s; it is kept at %s, going back to checkpoint %d", error, kept_at, older)
          continue
        advice = "there is no older checkpoint"
        if older is not None:
          advice = f"set restore_fallback=true to use checkpoint {older}"
        raise CheckpointError(f"{error}; {advice}, or remove that folder") from error
    return 0, {}

  def _set_aside(self, step: int) -> epath.Path:
    """Moves a damaged step's folder out of the way, so that training on from an older one can use its name."""
    assert self._checkpointer is not None
    root = epath.Path(self._checkpointer.directory)
    aside = root.parent / f"{root.name}.damaged"
    aside.mkdir(parents=True, exist_ok=True)
    place = aside / f"{step}-{time.time_ns()}"
    with _one_line_errors(f"damaged checkpoint {root / str(step)} can't be moved to {place}", "move it yourself"):
      if jax.process_index() == 0:
        (root / str(step)).rename(place)
      # Orbax remembers which steps there are from when it was opened.
      self._checkpointer.close()
      self._checkpointer = self._open(str(root))
    return place

  def restore_path(
    self, path: str, model: nnx.Module, optimizer: nnx.Optimizer | None = None, *, release: bool = False
  ) -> tuple[int, dict[str, Any]]:
    """Restores in place from any step's folder, in MaxText's layout or Tunix's; see `maybe_restore`."""
    start = time.perf_counter()
    root = step_root(path)
    live, plan, target = self._plan(model, optimizer)
    restored = None
    if optimizer is not None:
      flat = layout.flatten_state(live)
      released = [flat[path] for path in plan.moved.values()] if release else []
      restored = reader.read_fitting_train_state(
        root, target.state, self._storage.context, functools.partial(_release, released)
      )
    if restored is not None:
      self._check_adapter(root, restored.custom_metadata)
    else:
      stored = describe_checkpoint(root)
      self._check_adapter(root, stored.custom_metadata)
      restored = reader.read_train_state(
        stored,
        target.state,
        target.opt_state,
        self._storage.context,
        with_optimizer=optimizer is not None,
      )
    kept: Mapping[str, Any] = restored.custom_metadata.get(_WRAPPERS_KEY, {})
    state = layout.from_pretraining(
      plan, restored.leaves, live, kept, micro_steps_per_update=self._micro_steps_per_update
    )
    nnx.update(model, state["model"])
    if optimizer is not None:
      nnx.update(optimizer, state["optimizer"])
    for note in restored.notes:
      logger.warning("%s: %s", root, note)
    logger.info("restored %s in %.1f s", root, time.perf_counter() - start)
    return restored.updates, dict(restored.custom_metadata)

  def load_parameters(self, path: str, model: nnx.Module, *, release: bool = False) -> None:
    """Loads the weights alone into `model`, as `load_parameters_path` means it; works for a disabled manager too.

    A manager of an adapter loads the adapter's, as `lora.lora_restore_path` means it.

    Args:
      path: a step's folder, its `items`, or Tunix's `model_params`.
      model: the live model.
      release: see `maybe_restore`.

    Raises:
      CheckpointError: no checkpoint is there, it is damaged, or it does not fit the model.
    """
    stored = describe_checkpoint(path)
    self._check_adapter(stored.root, stored.custom_metadata)
    live, plan, target = self._plan(model, None)
    released = jax.tree.leaves(nnx.filter_state(live, nnx.Param)) if release else []
    restored = reader.read_parameters(
      stored, target.state, self._storage.context, functools.partial(_release, released)
    )
    nnx.update(model, layout.from_pretraining(plan, restored.leaves, live)["model"])

  def restore_data_position(self, step: int | None = None) -> bool:
    """Puts `data_iterator` where it stood at the step's save; False where the step holds no position for it."""
    step = self.latest_step() if step is None else step
    if self._checkpointer is None or self.data_iterator is None or step is None:
      return False
    return DataPosition(self.data_iterator).restore(self._step_path(step) / DATA_POSITION)

  def wait_until_finished(self) -> None:
    """Blocks until background writing is done.

    Raises:
      CheckpointError: it failed.
    """
    if self._checkpointer is not None:
      with self._save_errors():
        self._checkpointer.wait()

  def close(self) -> None:
    """Finishes background writing and releases every thread; a second call does nothing."""
    super().close()
    checkpointer, self._checkpointer = self._checkpointer, None
    if checkpointer is not None:
      with self._save_errors():
        try:
          checkpointer.wait()
        finally:
          checkpointer.close()

  def _raise_failed_save(self) -> None:
    """A background save that failed is an error at the next step, not at the next save."""
    if self._checkpointer is not None and self._save_in_flight is not None:
      if self._checkpointer.is_saving_in_progress():
        return
      self.wait_until_finished()

  @contextlib.contextmanager
  def _save_errors(self) -> Iterator[None]:
    step, self._save_in_flight = self._save_in_flight, None
    where = "a checkpoint" if step is None or self._checkpointer is None else f"checkpoint {self._step_path(step)}"
    with _one_line_errors(f"{where} could not be written", _AFTER_FAILED_SAVE):
      yield

  def _step_path(self, step: int) -> epath.Path:
    if self._checkpointer is None:
      raise CheckpointError("this run does not use checkpoints (enable_checkpointing or post_train_skip_checkpointing)")
    return epath.Path(self._checkpointer.directory) / str(step)

  def _plan(self, model: nnx.Module, optimizer: nnx.Optimizer | None) -> tuple[nnx.State, layout.LayoutPlan, Target]:
    live = nnx.state(maxtext_api.TrainStateNNX(model, optimizer), nnx.Not(nnx.Any(nnx.Cache, nnx.Intermediate)))
    if self._adapter is not None:
      live = without_base(live)
    live_opt_state = None if optimizer is None else nnx.as_pure(optimizer.opt_state)
    target = self._target or live_target(model, live, live_opt_state)
    if self._adapter is not None:
      target = PlainTarget(without_base(target.state), target.opt_state)
    if optimizer is None:
      target = PlainTarget(nnx.State({"model": target.state["model"]}), None)
    return live, layout.plan_layout(live, live_opt_state, target.state, target.opt_state), target

  def _metadata_from_config(self) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    scan_layers = getattr(self._config, "scan_layers", None)
    if scan_layers is not None:
      metadata["scan_layers"] = bool(scan_layers)
    if self._adapter is not None:
      metadata[LORA] = self._adapter.metadata()
    return metadata

  def _check_adapter(self, root: epath.Path, custom_metadata: Mapping[str, Any]) -> None:
    """Refuses full weights where an adapter is trained, an adapter where none is, and another adapter or base."""
    where = str(root)
    if self._adapter is None:
      refuse_adapter(custom_metadata, where)
      return
    record = AdapterRecord.of(custom_metadata, where)
    if record is None:
      raise CheckpointError(
        f"checkpoint {where} holds full weights, and lora.enable_lora=true reads adapters: name it with"
        " load_parameters_path to train an adapter over it, under another run_name"
      )
    record.check_same(self._adapter, where)


def _release(leaves: Sequence[Any]) -> None:
  """Gives back the memory of floating arrays; their shapes, dtypes and shardings can still be asked for."""
  for leaf in leaves:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.ndim:
      leaf.delete()


def checkpointing_enabled(config: Any) -> bool:
  """Whether the run's own directory is read and written at all."""
  return bool(getattr(config, "enable_checkpointing", True)) and not getattr(
    config, "post_train_skip_checkpointing", False
  )


def install(
  trainer: Any,
  checkpoint_dir: str | None,
  config: Any = None,
  *,
  target: Target | None = None,
  data_iterator: PositionedIterator | None = None,
  adapter: AdapterRecord | None = None,
) -> MaxTextLayoutCheckpointManager:
  """Puts the MaxText-layout manager in the place of the one Tunix's trainer built, and restores the trainer from it.

  The manager it replaces is closed. Call it once, after the trainer is built and before it trains.

  Args:
    trainer: a Tunix `PeftTrainer`.
    checkpoint_dir: the run's `checkpoints` folder; None, or a configuration that skips checkpoints, installs a manager
      that neither reads nor writes.
    config: see `MaxTextLayoutCheckpointManager`.
    target: see `MaxTextLayoutCheckpointManager`.
    data_iterator: its position is saved beside the items, and restored.
    adapter: see `MaxTextLayoutCheckpointManager`.

  Returns:
    The installed manager.
  """
  trainer.checkpoint_manager.close()
  accumulation = trainer.config.get_with_default("gradient_accumulation_steps", 1)
  manager = MaxTextLayoutCheckpointManager(
    checkpoint_dir if checkpoint_dir and checkpointing_enabled(config) else None,
    trainer.config.checkpointing_options,
    config,
    target=target,
    micro_steps_per_update=accumulation,
    adapter=adapter,
  )
  manager.data_iterator = data_iterator
  trainer.checkpoint_manager = manager
  trainer._train_steps, trainer._restored_custom_metadata = manager.maybe_restore(
    trainer.model, trainer.optimizer, release=True
  )
  trainer._iter_steps = trainer._train_steps * accumulation
  return manager


@contextlib.contextmanager
def _one_line_errors(title: str, remedy: str) -> Iterator[None]:
  """Orbax's and the file system's exceptions as one line; ours pass as they are."""
  try:
    yield
  except CheckpointError:
    raise
  except (OSError, ValueError, RuntimeError, TypeError, KeyError) as error:
    raise CheckpointError(f"{title}: {reason(error)}; {remedy}") from error
