"""GRPO and its kin: advantages within a group, the clipped objective, the KL penalty, and what they are summed to.

A micro-batch's loss is a sum, to be divided by a weight that adds up over micro-batches (`loss_weights`), so that an
update's loss is one mean over its whole batch however it is cut. Where this departs from the papers or from Tunix:

- A group whose rewards are all equal has advantages of exactly 0; rounding in its mean is not divided by ε.
- Sequences with no trained token (`mask_truncated_completions`) leave the denominators of the means over sequences, as
  in Tunix and unlike TRL; Dr. GRPO's constant counts them, as it counts every sequence, as in TRL and unlike Tunix.
- log-ratios are limited to ±20 before they are exponentiated, as in Tunix.
- GSPO is its token form (GSPO-token), whose value and gradient are GSPO's while a sequence has one advantage and its
  tokens no importance weights of their own.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from maxtext_posttrain.losses.sft import masked_sum

AdvantageScale = Literal["std", "mean", "none"]
LossAlgorithm = Literal["grpo", "gspo-token"]
Aggregation = Literal["token-mean", "sequence-mean-token-mean", "sequence-mean", "sequence-mean-token-scale"]

LOG_RATIO_LIMIT = 20.0


@dataclasses.dataclass(frozen=True)
class GrpoSettings:
  """The numbers of the objective.

  Attributes:
    algorithm: whose ratio is clipped: each token's (GRPO), or the sequence's (GSPO).
    aggregation: over what the loss is a mean; see `aggregate`.
    epsilon_low: ratios below 1 − this are clipped.
    epsilon_high: ratios above 1 + this are clipped ("clip-higher", https://arxiv.org/abs/2503.14476, section 3.1).
    beta: coefficient of the KL penalty; 0 has none.
    token_scale: the constant of `sequence-mean-token-scale`, the most tokens of a completion.
  """

  algorithm: LossAlgorithm = "grpo"
  aggregation: Aggregation = "sequence-mean-token-mean"
  epsilon_low: float = 0.2
  epsilon_high: float = 0.2
  beta: float = 0.0
  token_scale: int = 1


def group_advantages(
  rewards: npt.ArrayLike, num_generations: int, *, scale: AdvantageScale = "std", epsilon: float = 1e-6
) -> npt.NDArray[np.float32]:
  """How much better than its group each completion is.

  With r the rewards of the completions of one prompt:
    std: (r − mean r) / (std r + ε), std with n − 1 below (GRPO, https://arxiv.org/abs/2402.03300, section 4.1.2).
    mean: r − mean r (Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2).
    none: r.

  Args:
    rewards: [prompts · num_generations], finite, the completions of a prompt one after the other.
    num_generations: completions of a prompt.
    scale: which of the three.
    epsilon: of `std`.

  Returns:
    [prompts · num_generations] float32; computed in float64. 0 for a group of equal rewards, unless `scale` is none.

  Raises:
    ValueError: the rewards are not whole groups, or not finite.
  """
  values = np.asarray(rewards, np.float64)
  if values.ndim != 1 or num_generations < 1 or values.size % num_generations:
    raise ValueError(f"rewards of shape {values.shape} are not groups of {num_generations}")
  if not np.isfinite(values).all():
    raise ValueError("a reward is not finite")
  if scale == "none":
    return values.astype(np.float32)
  groups = values.reshape(-1, num_generations)
  centred = groups - groups.mean(axis=1, keepdims=True)
  centred[zero_spread(values, num_generations)] = 0.0
  if scale == "std" and num_generations > 1:
    centred /= groups.std(axis=1, ddof=1, keepdims=True) + epsilon
  return centred.reshape(-1).astype(np.float32)


def zero_spread(rewards: npt.ArrayLike, num_generations: int) -> npt.NDArray[np.bool_]:
  """For each group [prompts], whether its rewards are all equal."""
  groups = np.asarray(rewards, np.float64).reshape(-1, num_generations)
  return groups.max(axis=1) == groups.min(axis=1)


def kl_k3(log_probs: jax.Array, reference: jax.Array) -> jax.Array:
  """KL(policy ‖ reference) of each token by the k3 estimator: exp(d) − d − 1, d = reference − policy.

  Unbiased for samples of the policy, and never negative (http://joschu.net/blog/kl-approx.html; GRPO,
  https://arxiv.org/abs/2402.03300, eq. 4). d is limited to ±20 inside the exponential.

  Args:
    log_probs: [batch, seq] float32, of the policy.
    reference: [batch, seq] float32, of the frozen model.

  Returns:
    [batch, seq] float32.
  """
  difference = reference - log_probs
  return jnp.expm1(jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) - difference


def importance_ratio(
  log_probs: jax.Array, old_log_probs: jax.Array, mask: jax.Array, algorithm: LossAlgorithm
) -> jax.Array:
  """How much more probable the policy makes each token than the policy that wrote it.

  GRPO: π(token) / π_old(token) (https://arxiv.org/abs/2402.03300, eq. 3). GSPO-token (Group Sequence Policy
  Optimization, https://arxiv.org/abs/2507.18071): the geometric mean of a sequence's ratios, with each token's own
  gradient: sg[s] · π / sg[π], s = exp(mean of log π − log π_old).

  Args:
    log_probs: [batch, seq] float32, of the policy.
    old_log_probs: [batch, seq] float32; no gradient flows into it.
    mask: [batch, seq] bool, the completion's tokens.
    algorithm: which of the two.

  Returns:
    [batch, seq] float32.
  """
  log_ratio = jnp.where(mask, log_probs - jax.lax.stop_gradient(old_log_probs), 0.0)
  if algorithm == "gspo-token":
    count = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)
    sequence = jax.lax.stop_gradient(jnp.sum(log_ratio, axis=-1, keepdims=True) / count)
    log_ratio = sequence + jnp.where(mask, log_probs - jax.lax.stop_gradient(log_probs), 0.0)
  return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def truncated_importance_weights(
  old_log_probs: jax.Array, engine_log_probs: jax.Array, mask: jax.Array, cap: float
) -> jax.Array:
  """min(π_old / π_engine, cap) for each token, 0 outside the mask, without a gradient.

  Corrects for an engine whose probabilities are not quite the trainer's (truncated importance sampling: Yao et al.
  2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"); it multiplies the policy's loss, not
  the KL penalty.

  Args:
    old_log_probs: [batch, seq] float32, of the weights that wrote the completions, by the trainer.
    engine_log_probs: [batch, seq] float32, of the same weights, by the engine.
    mask: [batch, seq] bool, the completion's tokens.
    cap: above 0.
  """
  difference = jnp.where(mask, old_log_probs - engine_log_probs, 0.0)
  weights = jnp.minimum(jnp.exp(jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)), cap)
  return jax.lax.stop_gradient(jnp.where(mask, weights, 0.0))


@dataclasses.dataclass(frozen=True)
class TokenLosses:
  """What each token of a completion adds, [batch, seq] float32 each; what stands outside the mask means nothing.

  Attributes:
    loss: the clipped objective, negated, plus beta · KL.
    ratio: before clipping.
    kl: against the reference; zeros without one.
    clipped_low: 1 where the lower bound holds the token back, else 0.
    clipped_high: 1 where the upper bound does, else 0.
  """

  loss: jax.Array
  ratio: jax.Array
  kl: jax.Array
  clipped_low: jax.Array
  clipped_high: jax.Array


def token_losses(
  settings: GrpoSettings,
  *,
  log_probs: jax.Array,
  old_log_probs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  reference: jax.Array | None = None,
  weights: jax.Array | None = None,
) -> TokenLosses:
  """−min(ratio · A, clip(ratio, 1 − ε_low, 1 + ε_high) · A) · weight + β · KL of each token.

  Source: GRPO, https://arxiv.org/abs/2402.03300, eq. 3; two bounds, https://arxiv.org/abs/2503.14476, section 3.1.

  Args:
    settings: the numbers.
    log_probs: [batch, seq] float32, of the policy; the gradient flows through it.
    old_log_probs: [batch, seq] float32, of the policy that wrote the completions. The same array as `log_probs` gives
      ratios of 1 with the policy gradient.
    advantages: [batch] float32.
    mask: [batch, seq] bool, the tokens that are trained.
    reference: [batch, seq] float32, log-probabilities of the frozen model; None has no penalty.
    weights: [batch, seq] float32, from `truncated_importance_weights`, or None.
  """
  # What stands outside the mask, NaN included, must reach neither value nor gradient.
  log_probs = jnp.where(mask, log_probs, 0.0)
  old_log_probs = jnp.where(mask, old_log_probs, 0.0)
  advantage = advantages.astype(jnp.float32)[:, None]
  ratio = importance_ratio(log_probs, old_log_probs, mask, settings.algorithm)
  low, high = 1.0 - settings.epsilon_low, 1.0 + settings.epsilon_high
  loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, low, high) * advantage)
  if weights is not None:
    loss = loss * weights
  kl = jnp.zeros_like(loss)
  if reference is not None:
    kl = kl_k3(log_probs, jnp.where(mask, jax.lax.stop_gradient(reference), 0.0))
    loss = loss + settings.beta * kl
  return TokenLosses(
    loss=loss,
    ratio=ratio,
    kl=kl,
    clipped_low=((ratio < low) & (advantage < 0)).astype(jnp.float32),
    clipped_high=((ratio > high) & (advantage > 0)).astype(jnp.float32),
  )


def aggregate(values: jax.Array, mask: jax.Array, aggregation: Aggregation, *, token_scale: int = 1) -> jax.Array:
  """What a micro-batch adds to the numerator of the loss; `loss_weights` are what its sequences add to the denominator.

  token-mean: every token of the batch counts alike (DAPO, https://arxiv.org/abs/2503.14476, section 3.3).
  sequence-mean-token-mean: every sequence counts alike, by the mean of its tokens (GRPO's eq. 3).
  sequence-mean: every sequence counts by the sum of its tokens.
  sequence-mean-token-scale: the sum of a sequence's tokens over a constant, the same for all (Dr. GRPO,
    https://arxiv.org/abs/2503.20783, section 3.2).

  Args:
    values: [batch, seq] float32.
    mask: [batch, seq] bool.
    aggregation: which of the four.
    token_scale: the constant of the last.

  Returns:
    A float32 scalar.
  """
  if aggregation == "sequence-mean-token-mean":
    count = jnp.maximum(jnp.sum(mask, axis=-1), 1)
    return jnp.sum(jnp.sum(jnp.where(mask, values, 0.0), axis=-1) / count)
  total = masked_sum(values, mask)
  return total / token_scale if aggregation == "sequence-mean-token-scale" else total


def loss_weights(
  mask: npt.NDArray[np.bool_], present: npt.NDArray[np.bool_], aggregation: Aggregation
) -> npt.NDArray[np.float32]:
  """What each sequence adds to the divisor of an update's aggregated loss.

  Args:
    mask: [batch, seq], the tokens that are trained.
    present: [batch], false for rows that only fill the batch.
    aggregation: as in `aggregate`.

  Returns:
    [batch] float32: its trained tokens; or 1 where it has one, else 0; with Dr. GRPO's constant, 1 where it is there.
  """
  if aggregation == "token-mean":
    return mask.sum(axis=-1).astype(np.float32)
  return (present if aggregation == "sequence-mean-token-scale" else mask.any(axis=-1)).astype(np.float32)


def metric_sum(values: jax.Array, mask: jax.Array, aggregation: Aggregation) -> jax.Array:
  """What a micro-batch adds to a metric that is divided by the loss's weight: a mean over tokens, never a sum."""
  return aggregate(values, mask, "token-mean" if aggregation == "token-mean" else "sequence-mean-token-mean")
