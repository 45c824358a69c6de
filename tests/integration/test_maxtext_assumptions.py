"""What this package assumes of MaxText, Tunix and Orbax; it fails first when a release moves one of them."""

from __future__ import annotations

import importlib.metadata
import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from maxtext.common import checkpointing, train_state_nnx
from maxtext.configs import pyconfig
from maxtext.trainers.post_train.distillation import distillation_utils
from maxtext.trainers.pre_train import train as pre_train
from orbax.checkpoint import v1 as ocp
from tunix.sft import checkpoint_manager, peft_trainer

from tests.support import toys

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
  ("package", "version"),
  [
    ("maxtext", "0.2.5"),
    ("google-tunix", "0.1.7"),
    ("jax", "0.11.2"),
    ("flax", "0.12.12"),
    ("optax", "0.2.8"),
    ("orbax-checkpoint", "0.12.8"),
  ],
)
def test_pinned_versions(package: str, version: str):
  assert importlib.metadata.version(package) == version


def test_pretraining_uses_unsafe_rbg_keys_of_four_words():
  assert 'jax.config.update("jax_default_prng_impl", "unsafe_rbg")' in inspect.getsource(pre_train.initialize)
  key = jax.random.key(0, impl="unsafe_rbg")
  assert jax.random.key_data(key).shape == (4,)


def test_checkpoint_dict_of_adamw():
  model = toys.Leaf(nnx.Rngs(0))
  state = train_state_nnx.TrainStateNNX(model, nnx.Optimizer(model, optax.adamw(toys.schedule), wrt=nnx.Param))
  tree = train_state_nnx.to_checkpoint_dict(state)
  assert set(tree) == {"params", "opt_state", "step", "nnx_aux"}
  assert set(tree["params"]) == {"params"}
  assert [type(link) for link in tree["opt_state"]] == [dict, type(None), dict]
  assert set(tree["opt_state"][0]) == {"count", "mu", "nu"}
  assert set(tree["opt_state"][0]["mu"]) == {"params"}
  assert tree["step"].dtype == jnp.int32
  back = train_state_nnx._opt_state_from_linen(tree["opt_state"])
  assert set(back) == {0, 2}


def test_optimizer_steps_count_micro_steps_under_accumulation():
  model = toys.Leaf(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.MultiSteps(optax.adamw(1e-3), 2), wrt=nnx.Param)
  toys.train(model, optimizer, 4)
  assert int(optimizer.step.get_value()) == 4
  assert int(optimizer.opt_state.gradient_step.get_value()) == 2
  assert isinstance(nnx.as_pure(optimizer.opt_state), optax.MultiStepsState)


def test_pretraining_names_its_folder_one_less_and_skips_a_taken_name():
  source = inspect.getsource(checkpointing.maybe_save_checkpoint)
  assert "state.optimizer.step) - 1" in source
  assert "already exists, skipping save" in source


def test_pretraining_reads_iter_only_by_that_name():
  source = inspect.getsource(checkpointing.load_state_if_possible)
  assert '"iter").exists()' in source


def test_configuration_is_built_without_leaving_the_process():
  parameters = inspect.signature(pyconfig._initialize_pydantic).parameters
  assert list(parameters) == ["argv", "config_class", "kwargs"]
  assert "sys.exit" not in inspect.getsource(pyconfig._initialize_pydantic)


def test_tunixs_loop_calls_what_the_trainer_overrides():
  loop = inspect.getsource(peft_trainer.PeftTrainer.train)
  for call in (
    "self.jit_train_and_eval_step(",
    "self._prepare_inputs(train_example)",
    "self._post_process_train_step(aux)",
    "self._write_train_metrics()",
    "self.checkpoint_manager.save(",
    "self._run_eval(eval_ds, eval_step)",
    "if not self.is_managed_externally",
  ):
    assert call in loop
  assert loop.index("self._write_train_metrics()") < loop.index("self.checkpoint_manager.save(")
  assert loop.index("self.checkpoint_manager.save(") < loop.rindex("self._run_eval(eval_ds, eval_step)")
  close = inspect.getsource(peft_trainer.PeftTrainer.close)
  assert close.index("_write_train_metrics") < close.index("_save_last_checkpoint")


def test_tunixs_manager_can_be_disabled_and_has_these_signatures():
  manager = checkpoint_manager.CheckpointManager(root_directory=None)
  assert manager.latest_step() is None
  assert list(inspect.signature(manager.save).parameters) == [
    "step",
    "model",
    "optimizer",
    "save_only_lora_params",
    "force",
    "custom_metadata",
  ]
  assert list(inspect.signature(manager.maybe_restore).parameters) == [
    "model",
    "optimizer",
    "step",
    "restore_only_lora_params",
  ]


def test_orbax_has_what_the_manager_calls():
  for name in ("save_checkpointables_async", "should_save", "is_saving_in_progress", "wait", "close", "checkpoints"):
    assert hasattr(ocp.training.Checkpointer, name)
  assert hasattr(ocp.Context().memory, "transfer_concurrent_bytes")


def test_maxtexts_own_distillation_can_not_start_on_this_tunix():
  # So the distillation benchmark compares with TRL's; where this fails, it can compare with MaxText's.
  manager = distillation_utils.MaxTextCheckpointManager(None, None, None)
  with pytest.raises(AttributeError, match="_checkpointer"):
    manager.maybe_restore(None)
