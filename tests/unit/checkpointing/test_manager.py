"""The manager on toy models: what it writes, and that everything comes back to the bit."""

from __future__ import annotations

import json
import resource
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from flax import nnx
from orbax.checkpoint import v1 as ocp
from tunix.sft import checkpoint_manager as tunix_checkpoint_manager
from tunix.sft import peft_trainer

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.checkpointing import layout, reader
from maxtext_posttrain.checkpointing.manager import MaxTextLayoutCheckpointManager, install
from maxtext_posttrain.checkpointing.metadata import (
  STEP_METADATA,
  describe_checkpoint,
  flatten_tree,
  load_step_metadata,
)
from maxtext_posttrain.checkpointing.storage import StorageOptions
from maxtext_posttrain.errors import CheckpointError
from tests.support import toys


def stored_paths(root: Path, step: int) -> list[str]:
  return sorted("/".join(map(str, path)) for path in describe_checkpoint(root / str(step)).arrays())


def read_items(root: Path, step: int) -> dict:
  return flatten_tree(ocp.load_checkpointables(root / str(step))["items"])


def build(model_name: str, wrapper: str, optimizer_name: str = "adamw", *, adapter: bool = False, seed: int = 0):
  model = toys.MODELS[model_name](nnx.Rngs(seed))
  if adapter:
    model = toys.TunixMaxTextAdapter(model)
  return model, nnx.Optimizer(model, toys.WRAPPERS[wrapper](optimizer_name), wrt=nnx.Param)


@pytest.mark.parametrize("wrapper", ["bare", "clipped_accumulated"])
def test_what_is_replaced_is_released_before_it_is_read(tmp_path: Path, wrapper: str, monkeypatch: pytest.MonkeyPatch):
  model, optimizer = build("plain", wrapper)
  toys.train(model, optimizer, 2)
  before = toys.leaves(model, optimizer)
  manager = MaxTextLayoutCheckpointManager(str(tmp_path / "c"))
  manager.save(1, model, optimizer, force=True)
  manager.wait_until_finished()
  deleted_at_read: list[int] = []
  old: list[jax.Array] = []
  load = ocp.load_checkpointables

  def counting(*args, **kwargs):
    deleted_at_read.append(sum(leaf.is_deleted() for leaf in old))
    return load(*args, **kwargs)

  monkeypatch.setattr(ocp, "load_checkpointables", counting)
  fresh, fresh_optimizer = build("plain", wrapper, seed=9)
  weights = len(jax.tree.leaves(nnx.state(fresh, nnx.Param)))
  old = jax.tree.leaves(nnx.state((fresh, fresh_optimizer)))
  manager.maybe_restore(fresh, fresh_optimizer, release=True)
  # Weights and both moments; an accumulation's sums are no part of a checkpoint and stay.
  assert deleted_at_read == [3 * weights]
  toys.assert_same_leaves(toys.leaves(fresh, fresh_optimizer), before)

  again, _ = build("plain", wrapper, seed=9)
  old = jax.tree.leaves(nnx.state(again))
  manager.load_parameters(str(tmp_path / "c" / "1"), again, release=True)
  assert deleted_at_read[1:] == [weights]
  same = (jax.tree.leaves(nnx.state(node, nnx.Param)) for node in (again, model))
  assert all(np.array_equal(loaded, trained) for loaded, trained in zip(*same, strict=True))
  manager.close()


@pytest.mark.parametrize("model_name", toys.MODELS)
@pytest.mark.parametrize("adapter", [False, True], ids=["bare", "adapter"])
@pytest.mark.parametrize("wrapper", ["bare", "clipped", "clipped_accumulated"])
def test_round_trip_restores_every_bit(tmp_path: Path, model_name: str, adapter: bool, wrapper: str):
  model, optimizer = build(model_name, wrapper, adapter=adapter)
  toys.train(model, optimizer, 4)
  before = toys.leaves(model, optimizer)
  manager = MaxTextLayoutCheckpointManager(str(tmp_path / "c"))
  assert manager.save(2, model, optimizer, force=True)
  manager.close()

  model, optimizer = build(model_name, wrapper, adapter=adapter, seed=1)
  manager = MaxTextLayoutCheckpointManager(str(tmp_path / "c"))
  step, _ = manager.maybe_restore(model, optimizer)
  manager.close()
  assert step == (4 if wrapper in ("bare", "clipped") else 2)
  toys.assert_same_leaves(toys.leaves(model, optimizer), before)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer_name", toys.OPTIMIZERS)
def test_wrappers_and_adapter_leave_no_trace_on_disk(tmp_path: Path, optimizer_name: str):
  """Every wrapping of the same model and optimizer writes the same paths as the bare one."""
  written = {}
  for wrapper in toys.WRAPPERS:
    for adapter in (False, True):
      model, optimizer = build("base_with_siblings", wrapper, optimizer_name, adapter=adapter)
      toys.train(model, optimizer, 2)
      root = tmp_path / f"{wrapper}-{adapter}"
      manager = MaxTextLayoutCheckpointManager(str(root))
      manager.save(1, model, optimizer, force=True)
      manager.close()
      written[wrapper, adapter] = stored_paths(root, 1)
  for key, paths in written.items():
    assert paths == written["bare", False], key


def test_layout_on_disk_worked_by_hand(tmp_path: Path):
  """The tree that facts.md gives for pre-training with AdamW, on a model of one linear layer behind the adapter."""
  model = toys.TunixMaxTextAdapter(toys.Leaf(nnx.Rngs(0)))
  optimizer = nnx.Optimizer(
    model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(toys.schedule)), wrt=nnx.Param
  )
  toys.train(model, optimizer, 3)
  manager = MaxTextLayoutCheckpointManager(str(tmp_path))
  manager.save(3, model, optimizer, force=True)
  manager.close()
  assert stored_paths(tmp_path, 3) == [
    "nnx_aux/model/dropout/rngs/count",
    "nnx_aux/model/dropout/rngs/key",
    "opt_state/0/count",
    "opt_state/0/mu/params/linear/bias",
    "opt_state/0/mu/params/linear/kernel",
    "opt_state/0/nu/params/linear/bias",
    "opt_state/0/nu/params/linear/kernel",
    "opt_state/2/count",
    "params/params/linear/bias",
    "params/params/linear/kernel",
    "step",
  ]
  items = ocp.load_checkpointables(tmp_path / "3")["items"]
  assert isinstance(items["opt_state"], list)
  assert len(items["opt_state"]) == 3
  assert items["opt_state"][1] is None
  assert items["step"] == 3
  assert items["step"].dtype == np.int32
  assert items["opt_state"][0]["count"] == 3
  assert items["opt_state"][2]["count"] == 3


def test_accumulation_writes_updates_not_micro_steps(tmp_path: Path):
  model, optimizer = build("plain", "accumulated")
  toys.train(model, optimizer, 6)
  assert int(optimizer.step.get_value()) == 6
  manager = MaxTextLayoutCheckpointManager(str(tmp_path))
  manager.save(3, model, optimizer, force=True)
  manager.close()
  items = read_items(tmp_path, 3)
  assert items[("step",)] == 3
  assert items[("opt_state", 0, "count")] == 3
  assert items[("opt_state", 2, "count")] == 3
  restored, restored_optimizer = build("plain", "accumulated", seed=1)
  manager = MaxTextLayoutCheckpointManager(str(tmp_path))
  assert manager.maybe_restore(restored, restored_optimizer)[0] == 3
  manager.close()
  toys.assert_same_leaves(toys.leaves(restored, restored_optimizer), toys.leaves(model, optimizer))


def test_a_save_inside_an_accumulation_is_refused(tmp_path: Path):
  model, optimizer = build("plain", "accumulated")
  toys.train(model, optimizer, 3)
  manager = MaxTextLayoutCheckpointManager(str(tmp_path))
  with pytest.raises(CheckpointError, match="inside an accumulation"):
    manager.save(1, model, optimizer, force=True)
  manager.close()


@pytest.mark.parametrize("learning_rate", [1e-2, toys.schedule], ids=["float", "schedule"])
@pytest.mark.parametrize("accumulated", [False, True])
def test_injected_hyperparameters_restore_exactly(tmp_path: Path, learning_rate, accumulated: bool):
  def make(seed: int):
    model = toys.Plain(nnx.Rngs(seed))
    tx = optax.inject_hyperparams(optax.adamw)(learning_rate=learning_rate)
    return model, nnx.Optimizer(model, optax.MultiSteps(tx, 2) if accumulated else tx, wrt=nnx.Param)

  model, optimizer = make(0)
  toys.train(model, optimizer, 4)
  inner = optimizer.opt_state.inner_opt_state if accumulated else optimizer.opt_state
  if learning_rate == 1e-2:
    inner.hyperparams["learning_rate"].set_value(jnp.float32(0.123))
  before = toys.leaves(model, optimizer)
  manager = MaxTextLayoutCheckpointManager(str(tmp_path))
  manager.save(2, model, optimizer, force=True)
  manager.close()
  items = ocp.load_checkpointables(tmp_path / "2")["items"]
  updates = 2 if accumulated else 4
  assert len(items["opt_state"]) == 3
  assert items["opt_state"][2]["count"] == updates
  assert items["step"] == updates

  model, optimizer = make(1)
  manager = MaxTextLayoutCheckpointManager(str(tmp_path))
  manager.maybe_restore(model, optimizer)
  manager.close()
  toys.assert_same_leaves(toys.leaves(model, optimizer), before)


class _LinearTarget:
  """Pre-training's view of `toys.Leaf` with AdamW, as a configuration would give it."""

  def __init__(self, model: nnx.Module, tx: optax.GradientTransformation):
    from maxtext_posttrain.maxtext_api import TrainStateNNX

    state = TrainStateNNX(model, nnx.Optimizer(model, tx, wrt=nnx.Param))
    self.state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), nnx.state(state))
    self.opt_state = nnx.as_pure(state.optimizer.opt_state)


@pytest.mark.parametrize(
  ("live_tx", "message"),
  [
    (lambda: optax.sgd(1e-2, momentum=0.9), "ScaleByAdamState here, the live one has TraceState"),
    (lambda: optax.chain(optax.adamw(toys.schedule), optax.ema(0.9)), "EmaState has no place"),
  ],
  ids=["other_optimizer", "surplus_state"],
)
def test_an_optimizer_that_does_not_fit_is_named(tmp_path: Path, live_tx, message: str):
  model = toys.Leaf(nnx.Rngs(0))
  target = _LinearTarget(model, optax.adamw(toys.schedule))
  optimizer = nnx.Optimizer(model, live_tx(), wrt=nnx.Param)
  manager = MaxTextLayoutCheckpointManager(str(tmp_path), target=target)
  with pytest.raises(CheckpointError, match=message):
    manager.save(1, model, optimizer, force=True)
  manager.close()
  assert not (tmp_path / "1").exists()


def test_weights_that_do_not_fit_are_all_named_with_both_shapes(tmp_path: Path):
  target = _LinearTarget(toys.Leaf(nnx.Rngs(0), width=5), optax.adamw(toys.schedule))
  model = toys.Leaf(nnx.Rngs(0))
  model.extra = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.adamw(toys.schedule), wrt=nnx.Param)
  manager = MaxTextLayoutCheckpointManager(str(tmp_path), target=target)
  with pytest.raises(CheckpointError) as error:
    manager.save(1, model, optimizer, force=True)
  manager.close()
  message = str(error.value)
  assert "\n" not in message
  assert "extra/kernel" in message


def test_restoring_names_each_misfit_on_disk(tmp_path: Path):
  model = toys.Leaf(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.adamw(toys.schedule), wrt=nnx.Param)
  manager = MaxTextLayoutCheckpointManager(str(tmp_path))
  manager.save(1, model, optimizer, force=True)
  wide = toys.Leaf(nnx.Rngs(0), width=5)
  with pytest.raises(CheckpointError) as error:
    manager.maybe_restore(wide, nnx.Optimizer(wide, optax.adamw(toys.schedule), wrt=nnx.Param))
  assert "params/params/linear/kernel: shape (3, 3) on disk, (5, 5) wanted" in str(error.value)
  assert "params/params/linear/bias: shape (3,) on disk, (5,) wanted" in str(error.value)
  other = toys.Plain(nnx.Rngs(0))
  with pytest.raises(CheckpointError, match="params/params/first/linear/kernel: not in the checkpoint"):
    manager.maybe_restore(other, nnx.Optimizer(other, optax.adamw(toys.schedule), wrt=nnx.Param))
  manager.close()


def test_only_what_fits_whole_is_read_without_a_description(tmp_path: Path):
  model, optimizer = build("base_with_siblings", "bare")
  toys.train(model, optimizer, 2)
  manager = MaxTextLayoutCheckpointManager(str(tmp_path))
  manager.save(2, model, optimizer, force=True)
  manager.close()
  target = nnx.state(maxtext_api.TrainStateNNX(model, optimizer))
  root, make_context = epath.Path(tmp_path / "2"), StorageOptions().context

  def read(target: nnx.State) -> reader.RestoredState | None:
    return reader.read_fitting_train_state(root, target, make_context)

  fitting = read(target)
  assert fitting is not None
  assert fitting.updates == 2
  wanted = layout.flatten_state(target)
  assert fitting.leaves.keys() == wanted.keys()
  for path, leaf in fitting.leaves.items():
    assert bool(jnp.all(leaf == wanted[path])), path
  path = next(path for path, leaf in wanted.items() if leaf.ndim == 2)
  wider = jax.ShapeDtypeStruct((wanted[path].shape[0], wanted[path].shape[1] + 1), wanted[path].dtype)
  assert read(layout.replace_leaves(target, {path: wider})) is None
  assert read(nnx.state(maxtext_api.TrainStateNNX(model, None))) is None
  (tmp_path / "2" / STEP_METADATA).write_text("[]")
  assert read(target) is None


def test_missing_aux_keeps_fresh_values_and_missing_weights_do_not(tmp_path: Path):
  model = toys.Leaf(nnx.Rngs(0))
  with_bias = {"params": {"params": nnx.state(model, nnx.Param).to_pure_dict()}}
  ocp.save_checkpointables(tmp_path / "1", {"items": with_bias})
  fresh = toys.Leaf(nnx.Rngs(7))
  key = jax.random.key_data(fresh.dropout.rngs.key.get_value())
  manager = MaxTextLayoutCheckpointManager(str(tmp_path))
  manager.maybe_restore(fresh)
  np.testing.assert_array_equal(fresh.linear.kernel.get_value(), model.linear.kernel.get_value())
  np.testing.assert_array_equal(jax.random.key_data(fresh.dropout.rngs.key.get_value()), key)
  del with_bias["params"]["params"]["linear"]["bias"]
  ocp.save_checkpointables(tmp_path / "2", {"items": with_bias})
  manager.close()
  manager = MaxTextLayoutCheckpointManager(str(tmp_path))
  with pytest.raises(CheckpointError, match="linear/bias: not in the checkpoint"):
    manager.maybe_restore(fresh)
  manager.close()


@pytest.mark.parametrize("wrapper", ["bare", "clipped"])
@pytest.mark.parametrize("adapter", [False, True], ids=["bare", "adapter"])
def test_tunix_layout_is_read_and_the_next_save_is_maxtexts(tmp_path: Path, wrapper: str, adapter: bool):
  model, optimizer = build("base_with_siblings", wrapper, adapter=adapter)
  toys.train(model, optimizer, 5)
  old = tunix_checkpoint_manager.CheckpointManager(str(tmp_path))
  old.save(5, model, optimizer, force=True)
  old.close()
  weights = toys.leaves(model, optimizer)

  model, optimizer = build("base_with_siblings", "bare", seed=3)
  manager = MaxTextLayoutCheckpointManager(str(tmp_path))
  assert manager.maybe_restore(model, optimizer)[0] == 5
  if wrapper == "bare" and not adapter:
    same = {name: value for name, value in weights if "rngs" not in name}
    toys.assert_same_leaves(
      [leaf for leaf in toys.leaves(model, optimizer) if "rngs" not in leaf[0]], list(same.items())
    )
  assert int(optimizer.step.get_value()) == 5
  assert int(optimizer.opt_state[0].count.get_value()) == 5
  assert int(optimizer.opt_state[2].count.get_value()) == 5
  kernel = next(value for name, value in weights if name.endswith("base/linear/kernel") and "opt_state" not in name)
  np.testing.assert_array_equal(model.base.linear.kernel.get_value(), kernel)
  toys.train(model, optimizer, 1)
  manager.save(6, model, optimizer, force=True)
  manager.close()
  assert describe_checkpoint(tmp_path / "6").layout == "maxtext"


class Buffer(nnx.Variable):
  """State that is neither a weight nor an rng's, as a router's bias."""


class WithBuffer(toys.Leaf):
  def __init__(self, rngs: nnx.Rngs, value: float):
    super().__init__(rngs)
    self.bias = Buffer(jnp.full((2,), value))


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "not stored"])
def test_buffers_of_tunixs_layout_are_read_where_they_are_there(tmp_path: Path, stored: bool):
  old = tunix_checkpoint_manager.CheckpointManager(str(tmp_path))
  old.save(5, WithBuffer(nnx.Rngs(0), 1.0) if stored else toys.Leaf(nnx.Rngs(0)), None, force=True)
  old.close()
  fresh = WithBuffer(nnx.Rngs(1), 2.0)
  manager = MaxTextLayoutCheckpointManager(str(tmp_path))
  assert manager.maybe_restore(fresh)[0] == 5
  manager.close()
  np.testing.assert_array_equal(fresh.bias.get_value(), np.full(2, 1.0 if stored else 2.0))
  np.testing.assert_array_equal(fresh.linear.kernel.get_value(), toys.Leaf(nnx.Rngs(0)).linear.kernel.get_value())


def test_writing_is_not_one_transaction_and_no_array_is_too_large():
  bound = StorageOptions(device_host_gb=1).context().memory_options.write_concurrent_bytes
  assert bound is not None
  assert bound > 10**15


def test_a_disabled_manager_reads_and_writes_nothing(tmp_path: Path):
  model, optimizer = build("plain", "bare")
  manager = MaxTextLayoutCheckpointManager(None)
  assert not manager.save(1, model, optimizer, force=True)
  assert manager.maybe_restore(model, optimizer) == (0, {})
  assert manager.latest_step() is None
  assert manager.all_steps() == []
  manager.wait_until_finished()
  manager.close()


def test_interval_keep_and_saving_a_step_twice(tmp_path: Path):
  class Storage:
    checkpoint_period = 2
    max_num_checkpoints_to_keep = 2
    async_checkpointing = False
    scan_layers = False

  model, optimizer = build("plain", "bare")
  manager = MaxTextLayoutCheckpointManager(str(tmp_path), config=Storage())
  saved = [step for step in range(1, 8) if manager.save(step, model, optimizer)]
  assert saved == [2, 4, 6]
  assert manager.all_steps() == [4, 6]
  assert not manager.save(6, model, optimizer, force=True)
  assert not manager.should_save(6)
  manager.close()
  manager.close()
  assert load_step_metadata(tmp_path / "6" / "items") == {"scan_layers": False}
  assert load_step_metadata(tmp_path / "6") == {"scan_layers": False}


def test_metadata_warns_only_when_both_places_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture):
  model, optimizer = build("plain", "bare")
  manager = MaxTextLayoutCheckpointManager(str(tmp_path / "c"))
  manager.save(1, model, optimizer, force=True, custom_metadata={"global_step": 7})
  manager.close()
  assert load_step_metadata(tmp_path / "c" / "1" / "items") == {"global_step": 7}
  assert not caplog.records
  assert load_step_metadata(tmp_path / "nothing" / "here") == {}
  assert len(caplog.records) == 1


def save_and_go_on(manager: MaxTextLayoutCheckpointManager, model: nnx.Module, optimizer: nnx.Optimizer) -> None:
  """A save in the background, and then steps as a trainer's loop makes them."""
  manager.save(2, model, optimizer, force=True)
  for _ in range(50):
    time.sleep(0.1)
    manager.save(3, model, optimizer)


def test_a_failed_background_write_is_an_error_at_the_next_step(tmp_path: Path):
  """A disk that takes no more (here: a limit on file size): the next call says so, with the path."""
  model, optimizer = build("plain", "bare")
  manager = MaxTextLayoutCheckpointManager(str(tmp_path / "c"))
  manager.save(1, model, optimizer, force=True)
  manager.wait_until_finished()
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
  try:
    with pytest.raises(CheckpointError, match=r"checkpoint .*/c/2 could not be written") as error:
      save_and_go_on(manager, model, optimizer)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert "\n" not in str(error.value)
  manager.close()
  fresh, fresh_optimizer = build("plain", "bare", seed=4)
  manager = MaxTextLayoutCheckpointManager(str(tmp_path / "c"))
  assert manager.all_steps() == [1]
  manager.maybe_restore(fresh, fresh_optimizer)
  toys.assert_same_leaves(toys.leaves(fresh, fresh_optimizer), toys.leaves(model, optimizer))
  manager.close()


def test_install_replaces_closes_and_restores(tmp_path: Path):
  model, optimizer = build("plain", "bare")
  toys.train(model, optimizer, 4)
  manager = MaxTextLayoutCheckpointManager(str(tmp_path / "new"))
  manager.save(4, model, optimizer, force=True)
  manager.close()

  threads = threading.active_count()
  for _ in range(3):
    fresh = toys.Plain(nnx.Rngs(5))
    trainer = peft_trainer.PeftTrainer(
      fresh,
      toys.OPTIMIZERS["adamw"](),
      peft_trainer.TrainingConfig(eval_every_n_steps=10, checkpoint_root_directory=str(tmp_path / "tunix")),
    )
    closed = []
    first = trainer.checkpoint_manager
    original = first.close
    first.close = lambda original=original, closed=closed: (closed.append(True), original())
    installed = install(trainer, str(tmp_path / "new"))
    assert closed == [True]
    assert trainer.checkpoint_manager is installed
    assert trainer.train_steps == 4
    assert trainer.iter_steps == 4
    np.testing.assert_array_equal(fresh.first.linear.kernel.get_value(), model.first.linear.kernel.get_value())
    installed.close()
  # Orbax's executors end on their own, shortly after what they did.
  deadline = time.monotonic() + 30
  while threading.active_count() > threads + 1 and time.monotonic() < deadline:
    time.sleep(0.05)
  assert threading.active_count() <= threads + 1


@pytest.mark.parametrize(
  "settings", [{"enable_checkpointing": False}, {"post_train_skip_checkpointing": True}], ids=["off", "skip"]
)
def test_install_leaves_a_skipped_directory_alone(tmp_path: Path, settings: dict):
  broken = tmp_path / "checkpoints" / "3"
  broken.mkdir(parents=True)
  (broken / "items").write_text("broken")
  trainer = peft_trainer.PeftTrainer(
    toys.Plain(nnx.Rngs(0)), toys.OPTIMIZERS["adamw"](), peft_trainer.TrainingConfig(eval_every_n_steps=10)
  )
  config = type("Settings", (), settings)()
  manager = install(trainer, str(tmp_path / "checkpoints"), config)
  assert not manager.enabled
  assert not manager.save(4, trainer.model, trainer.optimizer, force=True)
  manager.close()
  assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3"]
  assert (broken / "items").read_text() == "broken"


@pytest.mark.parametrize("damage", ["truncate", "remove_manifest", "remove_metadata"])
def test_a_damaged_newest_checkpoint_is_reported_and_passed_over_only_when_asked(tmp_path: Path, damage: str):
  model, optimizer = build("plain", "bare")
  manager = MaxTextLayoutCheckpointManager(str(tmp_path / "c"))
  toys.train(model, optimizer, 1)
  manager.save(1, model, optimizer, force=True)
  before = toys.leaves(model, optimizer)
  toys.train(model, optimizer, 1)
  manager.save(2, model, optimizer, force=True)
  manager.close()
  items = tmp_path / "c" / "2" / "items"
  if damage == "truncate":
    for file in items.rglob("d/*"):
      file.write_bytes(file.read_bytes()[:10])
  elif damage == "remove_manifest":
    for file in items.rglob("manifest.ocdbt"):
      file.unlink()
  else:
    (items / "_METADATA").unlink()

  fresh, fresh_optimizer = build("plain", "bare", seed=9)
  untouched = toys.leaves(fresh, fresh_optimizer)
  manager = MaxTextLayoutCheckpointManager(str(tmp_path / "c"))
  with pytest.raises(CheckpointError, match="restore_fallback=true to use checkpoint 1") as error:
    manager.maybe_restore(fresh, fresh_optimizer)
  assert "\n" not in str(error.value)
  toys.assert_same_leaves(toys.leaves(fresh, fresh_optimizer), untouched)
  manager.close()

  config = type("Fallback", (), {"restore_fallback": True})()
  manager = MaxTextLayoutCheckpointManager(str(tmp_path / "c"), config=config)
  assert manager.maybe_restore(fresh, fresh_optimizer)[0] == 1
  toys.assert_same_leaves(toys.leaves(fresh, fresh_optimizer), before)
  # The damaged folder is kept, and its name is free for the step that is made again.
  assert manager.all_steps() == [1]
  assert [path.name.split("-")[0] for path in (tmp_path / "c.damaged").iterdir()] == ["2"]
  toys.train(fresh, fresh_optimizer, 1)
  assert manager.save(2, fresh, fresh_optimizer, force=True)
  manager.close()
  assert describe_checkpoint(tmp_path / "c" / "2").arrays()


def test_data_position_is_saved_beside_the_items(tmp_path: Path):
  class Position:
    def __init__(self, at: int):
      self.at = at

    def get_state(self):
      return {"position": self.at}

    def set_state(self, state):
      self.at = state["position"]

  model, optimizer = build("plain", "bare")
  manager = MaxTextLayoutCheckpointManager(str(tmp_path))
  manager.data_iterator = Position(17)
  manager.save(1, model, optimizer, force=True)
  manager.data_iterator.at = 99
  manager.close()
  assert json.loads((tmp_path / "1" / "post_train_iter" / "process_0-of-1.json").read_text()) == {"position": 17}
  manager = MaxTextLayoutCheckpointManager(str(tmp_path))
  manager.data_iterator = Position(0)
  assert manager.restore_data_position()
  assert manager.data_iterator.at == 17
  manager.close()
