"""Preference optimisation on pairs of completions: DPO and its variants, SimPO, ORPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext_posttrain import maxtext_api, maxtext_lora
from maxtext_posttrain.config import Config
from maxtext_posttrain.config.preferences import loss_name, reference_kind
from maxtext_posttrain.data import BATCH_KEYS, PreparedData, prepare_preferences
from maxtext_posttrain.data.pairs import CHOSEN, HALVES, REJECTED, pairs_per_row
from maxtext_posttrain.data.reference_rows import REFERENCE_KEY
from maxtext_posttrain.losses.dpo import (
  PairLogProbs,
  PairLosses,
  PreferenceSettings,
  preference_losses,
  sum_by_segment,
)
from maxtext_posttrain.maxtext_api import MaxTextConfig
from maxtext_posttrain.trainers import outputs
from maxtext_posttrain.trainers.objective import Batch, BatchSpec, FrozenModel, LossContext, LossOutput, Objective
from maxtext_posttrain.trainers.reference import precompute

if TYPE_CHECKING:
  from maxtext_posttrain.trainers.base import Session

REFERENCE = "reference"


class DPO(Objective):
  """The mean loss of the pairs of the whole global batch.

  Chosen and rejected go through one forward, as two rows of one batch; several pairs share a row. Dropout is off, in
  the policy as in the reference: else they would differ before the first update.
  """

  name = "dpo"
  weight_name = "pairs"

  def prepare_data(self, config: Config) -> PreparedData:
    """Preference pairs; see `maxtext_posttrain.data.pairs`."""
    return prepare_preferences(config)

  def batch_spec(self, config: Config, maxtext: MaxTextConfig, batch: int) -> BatchSpec:
    """BATCH_KEYS int32 [batch, 2, seq] and, where the reference is precomputed, its sums float32 [batch, 2, pairs]."""
    shape = (batch, HALVES, maxtext.max_target_length)
    spec = {key: jax.ShapeDtypeStruct(shape, jnp.int32) for key in BATCH_KEYS}
    if reference_kind(config) == "precomputed":
      spec[REFERENCE_KEY] = jax.ShapeDtypeStruct((batch, HALVES, pairs_per_row(config)), jnp.float32)
    return spec

  def frozen_models(self, config: Config, maxtext: MaxTextConfig) -> Mapping[str, FrozenModel]:
    """The reference, where it is a model of its own: the weights the run starts from."""
    return {REFERENCE: FrozenModel(maxtext)} if reference_kind(config) == "frozen" else {}

  def loss(self, model: nnx.Module, batch: Batch, context: LossContext) -> LossOutput:
    """The preference loss summed over pairs, plus MaxText's MoE balance term where it is on."""
    pairs = pairs_per_row(context.config)
    policy = pair_log_probs(model, batch, context.maxtext, pairs)
    balance = maxtext_api.pop_load_balance_loss(model)
    result = preference_losses(policy, self._reference(model, batch, context), preference_settings(context.config))
    loss_sum = jnp.sum(result.losses)
    if balance is not None and context.is_train:
      # A mean over layers already: weighted by this micro-batch's pairs, it is a mean over the global batch too.
      loss_sum += balance * self.weight(batch)
    totals = {
      "tokens": jnp.sum(batch["inputs_segmentation"] != 0).astype(jnp.float32),
      "trained_tokens": jnp.sum(policy.lengths),
    }
    return LossOutput(loss_sum, totals=totals, means=_metrics(policy, result))

  def _reference(self, model: nnx.Module, batch: Batch, context: LossContext) -> jax.Array | None:
    """The reference's sums for the batch, wherever they come from; None for a loss that compares with none."""
    kind = reference_kind(context.config)
    if kind is None:
      return None
    if kind == "precomputed":
      return batch[REFERENCE_KEY]
    reference, config = context.frozen.get(REFERENCE), context.frozen_maxtext.get(REFERENCE, context.maxtext)
    if reference is None:
      reference = maxtext_lora.without_adapter(config, model)
    return jax.lax.stop_gradient(pair_log_probs(reference, batch, config, pairs_per_row(context.config)).sums)

  def weight(self, batch: Batch) -> jax.Array:
    """The number of pairs: numbers of segments that the chosen half trains, which ascend along a row."""
    segments = batch["targets_segmentation"][..., CHOSEN, :]
    before = jax.lax.cummax(segments, axis=segments.ndim - 1)
    before = jnp.pad(before, ((0, 0),) * (segments.ndim - 1) + ((1, 0),))[..., :-1]
    return jnp.sum(segments > before)

  def before_training(self, session: Session, completed: int) -> None:
    """Computes the reference's log-probabilities of all pairs, or reads those that the run computed before."""
    if reference_kind(session.config) == "precomputed":
      pairs = pairs_per_row(session.config)

      def sums(model: nnx.Module, batch: Batch) -> jax.Array:
        return pair_log_probs(model, batch, session.maxtext, pairs).sums

      print(precompute(session, completed, sums), flush=True)

  def passes(self, config: Config) -> float:
    """Two rows a pair, and the reference's forward where it is run beside the policy's forward and backward."""
    beside = 0.0 if reference_kind(config) in (None, "precomputed") else 1 / 3
    return HALVES * (1.0 + beside)


def preference_settings(config: Config) -> PreferenceSettings:
  """The loss with its numbers, from the keys below `dpo`."""
  return PreferenceSettings(
    loss=loss_name(config),
    beta=config.dpo.dpo_beta,
    label_smoothing=config.dpo.dpo_label_smoothing,
    gamma=config.dpo.simpo_gamma,
    orpo_lambda=config.dpo.orpo_lambda,
  )


def pair_log_probs(model: nnx.Module, batch: Batch, config: MaxTextConfig, pairs: int) -> PairLogProbs:
  """Sums of the completions' log-probabilities by one forward over both halves.

  Args:
    model: a MaxText model.
    batch: BATCH_KEYS, each [batch, 2, seq].
    config: the model's.
    pairs: most pairs of a row.
  """
  rows = {key: batch[key].reshape(-1, batch[key].shape[-1]) for key in BATCH_KEYS}
  log_probs = outputs.token_outputs(config, model, rows, is_train=False).log_probs
  segments = batch["targets_segmentation"]
  return sum_by_segment(log_probs.reshape(segments.shape), segments, pairs)


def _metrics(policy: PairLogProbs, result: PairLosses) -> dict[str, jax.Array]:
  """Sums over pairs. Accuracies count the pairs whose chosen completion has the larger reward, or log-probability."""
  present = policy.present
  chosen, rejected = (jnp.where(present, policy.sums[..., half, :], 0.0) for half in (CHOSEN, REJECTED))
  sums = {
    "rewards/chosen": result.chosen_rewards,
    "rewards/rejected": result.rejected_rewards,
    "rewards/margins": result.chosen_rewards - result.rejected_rewards,
    "rewards/accuracies": result.chosen_rewards > result.rejected_rewards,
    "logps/chosen": chosen,
    "logps/rejected": rejected,
    "logps/accuracies": chosen > rejected,
  }
  return {name: jnp.sum(values.astype(jnp.float32)) for name, values in sums.items()}
