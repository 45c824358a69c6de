"""Supervised fine-tuning on chats: next-token cross-entropy over the assistant's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.data import PreparedData, prepare_chats
from maxtext_posttrain.maxtext_api import MaxTextConfig
from maxtext_posttrain.trainers import base, outputs
from maxtext_posttrain.trainers.objective import Objective
from maxtext_posttrain.trainers.train_step import Batch


class SFT(Objective):
  """The mean negative log-likelihood of the trained tokens of the whole global batch."""

  name = "sft"

  def prepare_data(self, config: Any) -> PreparedData:
    """Chats; see `maxtext_posttrain.data`."""
    return prepare_chats(config)

  def loss(
    self, config: MaxTextConfig, model: nnx.Module, batch: Batch, is_train: bool
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Cross-entropy summed over trained tokens, plus MaxText's z-loss and MoE balance terms where they are on.

    Evaluation also counts the trained tokens that were the most probable ones.
    """
    trained = batch["targets_segmentation"] != 0
    metrics = {"tokens": jnp.sum(batch["inputs_segmentation"] != 0).astype(jnp.float32)}
    if is_train:
      loss_sum = outputs.nll_sum(config, model, batch, is_train=True)
    else:
      found = outputs.token_outputs(config, model, batch, is_train=False, with_correct=True)
      loss_sum = jnp.sum(config.z_loss_multiplier * jnp.square(found.log_z) - found.log_probs)
      metrics["correct"] = jnp.sum(found.correct).astype(jnp.float32)
    balance = maxtext_api.pop_load_balance_loss(model)
    if balance is not None and is_train:
      # A mean over layers already: weighted by this micro-batch's tokens, it is a mean over the global batch too.
      loss_sum += balance * jnp.sum(trained)
    return loss_sum, metrics

  def weight(self, batch: Batch) -> jax.Array:
    """The number of trained tokens."""
    return jnp.sum(batch["targets_segmentation"] != 0)


def main(config: Any, *, dry_run: bool = False, prepared: Callable[[], PreparedData] | None = None) -> int:
  """Runs SFT as configured; returns the process's exit code. See `base.run`."""
  return base.run(SFT(), config, dry_run=dry_run, prepared=prepared)
