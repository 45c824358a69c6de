"""Tiny LoRA runs over an imported model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxtext_posttrain import cli, maxtext_api
from tests.support import families

RANK, ALPHA = 4, 8.0
LORA = ("lora.enable_lora=true", f"lora.lora_rank={RANK}", f"lora.lora_alpha={ALPHA}")
LENGTH = 24


def import_base(name: str, folder: Path, *options: str) -> Path:
  """A tiny model of `tests/data/families` as MaxText's items; returns their folder."""
  assert cli.main(["import", str(families.FOLDER / name), str(folder), *options]) == 0
  return folder / "0" / "items"


def arguments(base: Path, output: Path, run_name: str, *extra: str) -> list[str]:
  """Of an SFT with an adapter over a base that `import_base` wrote, on synthetic data."""
  config = output / f"{base.parent.parent.name}.yml"
  config.parent.mkdir(parents=True, exist_ok=True)
  lines = [
    f"base_config: [sft.yml, {base.parent.parent / 'model.yml'}]",
    "hardware: cpu",
    "attention: dot_product",
    "remat_policy: minimal",
    "skip_jax_distributed_system: true",
    "enable_goodput_recording: false",
    "enable_tensorboard: false",
    "async_checkpointing: false",
    "dataset_type: synthetic",
    f"max_target_length: {LENGTH}",
    "per_device_batch_size: 2",
    "learning_rate: 1.e-2",
    "steps: 4",
    "checkpoint_period: 2",
    "learning_rate_schedule_steps: 4",
    "log_every: 1",
  ]
  config.write_text("\n".join(lines) + "\n", encoding="utf-8")
  return [str(config), f"base_output_directory={output}", f"run_name={run_name}", *LORA, *extra]


def random_batch(vocab: int = 128, rows: int = 2) -> dict[str, jax.Array]:
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, vocab, (rows, LENGTH)), jnp.int32)
  ones = jnp.ones_like(tokens)
  positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
  return {
    "inputs": tokens,
    "inputs_position": positions,
    "inputs_segmentation": ones,
    "targets": tokens,
    "targets_position": positions,
    "targets_segmentation": ones,
  }


def logits(
  config: Any, mesh: Any, model: nnx.Module, change: Any = lambda model: model, *, batch: Any = None
) -> np.ndarray:
  """Logits of a batch, by a model or what `change` makes of it inside the trace."""
  graphdef, state = nnx.split(model)

  @jax.jit
  def compute(state: nnx.State, batch: Any) -> jax.Array:
    return maxtext_api.forward(config, change(nnx.merge(graphdef, state)), batch, is_train=False)

  with maxtext_api.mesh_context(config, mesh):
    return np.asarray(compute(state, batch or random_batch(config.vocab_size)))
