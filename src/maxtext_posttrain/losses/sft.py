"""The loss of supervised fine-tuning: cross-entropy of the next token, summed over the trained tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def token_log_probs(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """Log-probability of each target token.

  Args:
    logits: [batch, seq, vocab], any float dtype.
    targets: [batch, seq] int, ids below `vocab`.

  Returns:
    [batch, seq] float32: logit of the target − logsumexp over the vocabulary.
  """
  logits = logits.astype(jnp.float32)
  # A compare and a sum fuse with the logsumexp and, unlike a gather, leave no scatter over the vocabulary behind.
  is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
  target_logits = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
  return target_logits - jax.nn.logsumexp(logits, axis=-1)


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
  loss = masked_sum(-token_log_probs(logits, targets), targets_mask)
  if z_loss_multiplier > 0.0:
    log_z = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    loss += z_loss_multiplier * masked_sum(jnp.square(log_z), targets_mask)
  return loss
