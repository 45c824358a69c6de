"""Losses on pairs of completions: DPO and its variants, SimPO, ORPO; from log-probabilities to one number a pair.

Let, for a pair, c and r be the log-probabilities of the chosen and the rejected completion given their prompt, summed
over the completion's tokens, c_ref and r_ref the same under the reference, and |c|, |r| the numbers of those tokens.
What a loss compares is each completion's score:

  name           score of a completion             loss of a pair, with margin m = score(chosen) - score(rejected)
  sigmoid        c - c_ref                         -(1 - s) log σ(β m) - s log σ(-β m)
  sigmoid_norm   (c - c_ref) / |c|                 the same
  hinge          c - c_ref                         max(0, 1 - β m)
  ipo            (c - c_ref) / |c|                 (m - 1 / (2 β))²
  simpo          c / |c|                           that of sigmoid, of β m - γ
  orpo           c / |c|                           -c / |c| + λ · (that of sigmoid, of the log odds ratio)

s is the label smoothing. All is float32.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from maxtext_posttrain.config.preferences import REFERENCE_FREE, LossName

_NORMALISED = frozenset({"sigmoid_norm", "ipo", "simpo", "orpo"})
_LARGEST_MEAN_LOG_PROB = -1e-7
"""Where a completion is certain its odds are infinite; a mean log-probability above this counts as this."""


@dataclasses.dataclass(frozen=True)
class PreferenceSettings:
  """Which loss, with what numbers; the names in brackets are the configuration's.

  Attributes:
    loss: which, by the table above.
    beta: strength of the preference, above 0 [dpo.dpo_beta].
    label_smoothing: share of pairs taken to be labelled the wrong way round, for the losses that take it
      [dpo.dpo_label_smoothing].
    gamma: SimPO's target margin between rewards [dpo.simpo_gamma].
    orpo_lambda: weight of ORPO's odds ratio beside the likelihood [dpo.orpo_lambda].
  """

  loss: LossName = "sigmoid"
  beta: float = 0.1
  label_smoothing: float = 0.0
  gamma: float = 0.5
  orpo_lambda: float = 0.1


@dataclasses.dataclass(frozen=True)
class PairLogProbs:
  """Summed log-probabilities of pairs, each float32 [..., 2, pairs]: index 0 is the chosen, 1 the rejected completion.

  Attributes:
    sums: log-probability of each completion.
    lengths: its number of trained tokens; 0 in a slot that holds no pair.
  """

  sums: jax.Array
  lengths: jax.Array

  @property
  def present(self) -> jax.Array:
    """Bool [..., pairs]: slots that hold a pair."""
    return jnp.all(self.lengths > 0, axis=-2)


@dataclasses.dataclass(frozen=True)
class PairLosses:
  """What a loss makes of pairs, float32 [..., pairs]; 0 in slots without one.

  Attributes:
    losses: of each pair.
    chosen_rewards: the chosen completion's implicit reward, β times its score (ORPO: λ times); without a gradient.
    rejected_rewards: the rejected completion's.
  """

  losses: jax.Array
  chosen_rewards: jax.Array
  rejected_rewards: jax.Array


def sum_by_segment(token_log_probs: jax.Array, segments: jax.Array, pairs: int) -> PairLogProbs:
  """Sums the log-probabilities of each completion's tokens.

  Args:
    token_log_probs: [batch, 2, seq] float.
    segments: [batch, 2, seq] int: a token's pair, from 1 on, in both halves of axis 1; 0 where it doesn't count. What
      stands in `token_log_probs` there, NaN included, reaches neither value nor gradient.
    pairs: most pairs of a row.

  Returns:
    Sums and lengths [batch, 2, pairs]; pair p stands at p - 1.
  """
  token_log_probs = jnp.where(segments != 0, token_log_probs.astype(jnp.float32), 0.0)
  # Compare and sum instead of a scatter: it is deterministic everywhere and fuses.
  member = segments[..., None, :] == jnp.arange(1, pairs + 1)[:, None]
  sums = jnp.sum(jnp.where(member, token_log_probs[..., None, :], 0.0), axis=-1)
  return PairLogProbs(sums, jnp.sum(member, axis=-1).astype(jnp.float32))


def preference_losses(
  policy: PairLogProbs, reference_sums: jax.Array | None, settings: PreferenceSettings
) -> PairLosses:
  """The loss and the implicit rewards of each pair; see the module's table.

  Args:
    policy: of the trained model.
    reference_sums: the reference's sums for the same completions, [..., 2, pairs]; None for a loss in REFERENCE_FREE.
    settings: which loss.

  Raises:
    ValueError: the loss needs a reference and there is none.
  """
  present = policy.present
  slots = present[..., None, :]
  scores = jnp.where(slots, policy.sums, 0.0)
  lengths = jnp.where(slots, policy.lengths, 1.0)
  if settings.loss not in REFERENCE_FREE:
    if reference_sums is None:
      raise ValueError(f"the loss {settings.loss} needs the reference's log-probabilities")
    scores = scores - jax.lax.stop_gradient(jnp.where(slots, reference_sums, 0.0))
  if settings.loss in _NORMALISED:
    scores = scores / lengths
  chosen, rejected = scores[..., 0, :], scores[..., 1, :]
  losses = _pair_losses(chosen, rejected, settings)
  scale = settings.orpo_lambda if settings.loss == "orpo" else settings.beta
  chosen_rewards, rejected_rewards = (
    jax.lax.stop_gradient(jnp.where(present, scale * each, 0.0)) for each in (chosen, rejected)
  )
  return PairLosses(jnp.where(present, losses, 0.0), chosen_rewards, rejected_rewards)


def _pair_losses(chosen: jax.Array, rejected: jax.Array, settings: PreferenceSettings) -> jax.Array:
  margin = chosen - rejected
  match settings.loss:
    case "sigmoid" | "sigmoid_norm":
      return sigmoid_loss(settings.beta * margin, settings.label_smoothing)
    case "hinge":
      return hinge_loss(settings.beta * margin)
    case "ipo":
      return ipo_loss(margin, settings.beta)
    case "simpo":
      return sigmoid_loss(settings.beta * margin - settings.gamma, settings.label_smoothing)
    case "orpo":
      return orpo_loss(chosen, rejected, settings.orpo_lambda, settings.label_smoothing)


def sigmoid_loss(reward_margin: jax.Array, label_smoothing: float = 0.0) -> jax.Array:
  """DPO: -(1 - s) log σ(m) - s log σ(-m), of the margin m between rewards.

  With s = 0: "Direct Preference Optimization", https://arxiv.org/abs/2305.18290, equation 7; the smoothing is
  conservative DPO, https://ericmitchell.ai/cdpo.pdf, equation 3. With m = β (c/|c| - r/|r|) - γ it is SimPO,
  https://arxiv.org/abs/2405.14734, equation 6.
  """
  losses = -(1.0 - label_smoothing) * jax.nn.log_sigmoid(reward_margin)
  if label_smoothing:
    losses -= label_smoothing * jax.nn.log_sigmoid(-reward_margin)
  return losses


def hinge_loss(reward_margin: jax.Array) -> jax.Array:
  """max(0, 1 - m): SLiC's (https://arxiv.org/abs/2305.10425) on DPO's margin, as RSO has it (arXiv 2309.06657, 5)."""
  return jax.nn.relu(1.0 - reward_margin)


def ipo_loss(margin: jax.Array, beta: float) -> jax.Array:
  """IPO: (m - 1 / (2 β))², https://arxiv.org/abs/2310.12036, equation 17, where β is called τ.

  `margin` is that of means over tokens, not of sums: so the paper's own results were made, by its authors' word to TRL.
  """
  return jnp.square(margin - 1.0 / (2.0 * beta))


def orpo_loss(
  chosen_mean: jax.Array, rejected_mean: jax.Array, orpo_lambda: float, label_smoothing: float = 0.0
) -> jax.Array:
  """ORPO: -log P(chosen) - λ log σ(log odds(chosen) - log odds(rejected)), https://arxiv.org/abs/2403.07691, eq. 6, 7.

  log P is the mean over a completion's tokens, odds = P / (1 - P).

  Args:
    chosen_mean: mean log-probability of the chosen completion's tokens.
    rejected_mean: likewise of the rejected one's.
    orpo_lambda: λ.
    label_smoothing: as for `sigmoid_loss`, for the second term.
  """
  ratio = _log_odds(chosen_mean) - _log_odds(rejected_mean)
  return -chosen_mean + orpo_lambda * sigmoid_loss(ratio, label_smoothing)


def _log_odds(log_prob: jax.Array) -> jax.Array:
  """log(p / (1 - p)) of log p."""
  log_prob = jnp.minimum(log_prob, _LARGEST_MEAN_LOG_PROB)
  return log_prob - jnp.log(-jnp.expm1(log_prob))
