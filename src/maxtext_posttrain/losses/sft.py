"""The loss of supervised fine-tuning: cross-entropy of the next token, summed over the trained tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from maxtext_posttrain.losses.head import logit_outputs


def token_log_probs(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """Log-probability of each target token.

  Args:
    logits: [batch, seq, vocab], any float dtype.
    targets: [batch, seq] int, ids below `vocab`.

  Returns:
    [batch, seq] float32: logit of the target − logsumexp over the vocabulary.
  """
  return logit_outputs(logits, targets).log_probs


def masked_sum(values: jax.Array, mask: jax.Array) -> jax.Array:
  """Sum of `values` where `mask` is true; what stands elsewhere, NaN included, reaches neither value nor gradient."""
  return jnp.sum(jnp.where(mask, values, 0.0))


def sft_loss_sum(
  logits: jax.Array, targets: jax.Array, targets_mask: jax.Array, *, z_loss_multiplier: float = 0.0
) -> jax.Array:
  """Negative log-likelihood summed over the trained tokens, in nats.

  Args:
    logits: [batch, seq, vocab].
    targets: [batch, seq] int.
    targets_mask: [batch, seq] bool, true where the target token is trained on.
    z_loss_multiplier: adds multiplier · log(Z)² per trained token (PaLM, https://arxiv.org/abs/2204.02311, section 5).

  Returns:
    A float32 scalar. Divide by the number of trained tokens of the whole batch for the mean.
  """
  # Masked positions must not reach the gradient even where their logits are not finite.
  logits = jnp.where(targets_mask[..., None], logits, 0.0)
  targets = jnp.where(targets_mask, targets, 0)
  outputs = logit_outputs(logits, targets)
  loss = masked_sum(-outputs.log_probs, targets_mask)
  if z_loss_multiplier > 0.0:
    loss += z_loss_multiplier * masked_sum(jnp.square(outputs.log_z), targets_mask)
  return loss
