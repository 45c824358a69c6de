"""The head by itself, a chunk at a time, against MaxText's own forward: loss and every gradient; sharded too."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import runs

pytestmark = pytest.mark.slow

HEADS = {
  "untied": ("logits_via_embedding=false",),
  "tied": ("logits_via_embedding=true",),
  "soft-capped": ("logits_via_embedding=true", "final_logits_soft_cap=5.0", "normalize_embedding_logits=true"),
  "bfloat16": ("logits_via_embedding=true", "dtype=bfloat16", "logits_dot_in_fp32=true"),
}
MESHES = {
  "fsdp": ("ici_fsdp_parallelism=4", "logits_via_embedding=true"),
  "tensor": ("ici_fsdp_parallelism=1", "ici_tensor_parallelism=4", "logits_via_embedding=false"),
}


def differences(folder: str, keys: tuple[str, ...]) -> Mapping[str, float]:
  """Relative differences, split head against full forward, of the loss and the worst gradient, for both functions."""
  import jax
  import jax.numpy as jnp
  from flax import nnx

  from maxtext_posttrain import maxtext_api
  from maxtext_posttrain.config import load_config
  from maxtext_posttrain.losses.sft import sft_loss_sum
  from maxtext_posttrain.trainers import outputs

  shape = ("steps=2", f"per_device_batch_size={4 // jax.device_count()}", "base_num_query_heads=4")
  argv = runs.arguments(Path(folder), "head", *shape, "base_num_kv_heads=4", "num_vocab_tiling=4", *keys)
  maxtext_api.use_pretraining_prng()
  config = maxtext_api.build_config(load_config(argv).maxtext_overrides())
  full_config = maxtext_api.MaxTextConfig(config._pydantic_config.model_copy(update={"num_vocab_tiling": 1}))
  mesh = maxtext_api.build_mesh(config)

  def split_model(config: Any) -> Any:
    model = maxtext_api.init_model(config, maxtext_api.pretraining_state(config, mesh), mesh)
    return nnx.split(model, nnx.Param, ...)

  graphdef, params, rest = split_model(config)
  full_graphdef, *_ = split_model(full_config)
  rng = np.random.default_rng(0)
  tokens = rng.integers(1, config.vocab_size, (4, config.max_target_length + 1), dtype=np.int32)
  trained = (rng.random((4, config.max_target_length)) < 0.5).astype(np.int32)
  trained[1] = 0
  arrays = {
    "inputs": tokens[:, :-1],
    "targets": tokens[:, 1:],
    "inputs_position": np.broadcast_to(np.arange(config.max_target_length, dtype=np.int32), trained.shape),
    "inputs_segmentation": np.ones_like(trained),
    "targets_segmentation": trained,
  }
  batch = jax.device_put(arrays, maxtext_api.batch_sharding(config, mesh))

  def full(params: Any) -> jax.Array:
    logits = maxtext_api.forward(full_config, nnx.merge(full_graphdef, params, rest, copy=True), batch, is_train=True)
    return sft_loss_sum(logits, batch["targets"], batch["targets_segmentation"] != 0)

  def nll_sum(params: Any) -> jax.Array:
    return outputs.nll_sum(config, nnx.merge(graphdef, params, rest, copy=True), batch, is_train=True)

  def log_probs(params: Any) -> jax.Array:
    model = nnx.merge(graphdef, params, rest, copy=True)
    return -jnp.sum(outputs.token_outputs(config, model, batch, is_train=True).log_probs)

  def difference(have: Any, want: Any) -> float:
    have, want = (np.asarray(leaf, np.float64) for leaf in (have, want))
    return float(np.linalg.norm(have - want) / np.linalg.norm(want))

  with maxtext_api.mesh_context(config, mesh):
    want, *others = (jax.jit(jax.value_and_grad(loss))(params) for loss in (full, nll_sum, log_probs))
  result = {}
  for name, have in zip(("nll_sum", "log_probs"), others, strict=True):
    result[f"{name} loss"] = difference(have[0], want[0])
    result[f"{name} gradient"] = max(map(difference, jax.tree.leaves(have[1]), jax.tree.leaves(want[1])))
  return result


def assert_equal(found: Mapping[str, float], *, gradient_tolerance: float = 2e-6) -> None:
  for name, difference in found.items():
    assert difference < (gradient_tolerance if name.endswith("gradient") else 2e-6), (name, difference)


@pytest.mark.parametrize("name", HEADS)
def test_equals_the_full_forward(name: str, tmp_path: Path):
  # In bfloat16 each chunk's part of the table's gradient is rounded, to 2⁻⁹ of it.
  tolerance = 4e-3 if name == "bfloat16" else 2e-6
  assert_equal(differences(str(tmp_path), HEADS[name]), gradient_tolerance=tolerance)


def _on_four_devices(folder: str, keys: tuple[str, ...]) -> Mapping[str, float]:
  os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
  return differences(folder, keys)


@pytest.mark.parametrize("name", MESHES)
def test_equals_the_full_forward_where_batch_or_vocabulary_is_sharded(name: str, tmp_path: Path):
  with multiprocessing.get_context("spawn").Pool(1) as pool:
    assert_equal(pool.apply(_on_four_devices, (str(tmp_path), MESHES[name])))
