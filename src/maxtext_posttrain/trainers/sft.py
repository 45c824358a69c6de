"""Supervised fine-tuning on chats: next-token cross-entropy over the assistant's tokens."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.config import Config
from maxtext_posttrain.data import PreparedData, prepare_chats
from maxtext_posttrain.trainers import outputs
from maxtext_posttrain.trainers.objective import Batch, LossContext, LossOutput, Objective

_LARGEST_EXPONENT = 700.0


class SFT(Objective):
  """The mean negative log-likelihood of the trained tokens of the whole global batch."""

  name = "sft"

  def prepare_data(self, config: Config) -> PreparedData:
    """Chats; see `maxtext_posttrain.data`."""
    return prepare_chats(config)

  def loss(self, model: nnx.Module, batch: Batch, context: LossContext) -> LossOutput:
    """Cross-entropy summed over trained tokens, plus MaxText's z-loss and MoE balance terms where they are on.

    Evaluation also counts the trained tokens that were the most probable ones.
    """
    config, is_train = context.maxtext, context.is_train
    means = {}
    if is_train:
      loss_sum = outputs.nll_sum(config, model, batch, is_train=True)
    else:
      found = outputs.token_outputs(config, model, batch, is_train=False, with_correct=True)
      loss_sum = jnp.sum(config.z_loss_multiplier * jnp.square(found.log_z) - found.log_probs)
      means["token_accuracy"] = jnp.sum(found.correct).astype(jnp.float32)
    balance = maxtext_api.pop_load_balance_loss(model)
    if balance is not None and is_train:
      # A mean over layers already: weighted by this micro-batch's tokens, it is a mean over the global batch too.
      loss_sum += balance * self.weight(batch)
    tokens = jnp.sum(batch["inputs_segmentation"] != 0).astype(jnp.float32)
    return LossOutput(loss_sum, totals={"tokens": tokens}, means=means)

  def weight(self, batch: Batch) -> jax.Array:
    """The number of trained tokens."""
    return jnp.sum(batch["targets_segmentation"] != 0)

  def evaluation_metrics(self, loss: float) -> dict[str, float]:
    """The perplexity: e to the loss."""
    return {"perplexity": math.exp(min(loss, _LARGEST_EXPONENT))}
