"""GRPO's loss and advantages: by formula in NumPy float64, against TRL's, and at the edges."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_posttrain.losses.grpo import (
  GrpoSettings,
  aggregate,
  group_advantages,
  importance_ratio,
  kl_k3,
  loss_weights,
  metric_sum,
  token_losses,
  truncated_importance_weights,
  zero_spread,
)
from maxtext_posttrain.losses.head import logit_outputs
from tests.conftest import REPOSITORY

AGGREGATIONS = ("token-mean", "sequence-mean-token-mean", "sequence-mean", "sequence-mean-token-scale")
TRL_NAMES = {
  "dapo": "token-mean",
  "grpo": "sequence-mean-token-mean",
  "luspo": "sequence-mean",
  "dr_grpo": "sequence-mean-token-scale",
}


def batch(seed: int = 0, rows: int = 5, seq: int = 7) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, seq + 1, rows)
  lengths[0] = 1
  policy = -rng.gamma(2.0, 0.8, (rows, seq))
  return {
    "log_probs": policy.astype(np.float32),
    "old": (policy + rng.normal(scale=0.4, size=policy.shape)).astype(np.float32),
    "engine": (policy + rng.normal(scale=0.4, size=policy.shape)).astype(np.float32),
    "reference": (policy + rng.normal(scale=0.5, size=policy.shape)).astype(np.float32),
    "advantages": rng.normal(size=rows).astype(np.float32),
    "mask": np.arange(seq) < lengths[:, None],
  }


def our_loss(settings: GrpoSettings, data: dict[str, Any], *, cap: float | None = None) -> jax.Array:
  return our_sum(settings, data, cap) / weight_of(data["mask"], settings.aggregation)


def weight_of(mask: Any, aggregation: Any) -> float:
  return float(loss_weights(np.asarray(mask), np.ones(len(mask), bool), aggregation).sum())


def formula(settings: GrpoSettings, data: dict[str, np.ndarray], *, cap: float | None = None):
  """Loss and its gradient by the policy's log-probabilities, in float64, sequence by sequence."""
  total, gradient, weight = 0.0, np.zeros(data["mask"].shape), 0.0
  for row in range(len(data["mask"])):
    count = int(data["mask"][row].sum())
    policy, old, engine, reference = (
      data[key][row, :count].astype(np.float64) for key in ("log_probs", "old", "engine", "reference")
    )
    advantage = float(data["advantages"][row])
    ratio = np.exp(policy - old)
    if settings.algorithm == "gspo-token":
      ratio = np.full(count, np.exp((policy - old).mean()))
    values, slopes = np.zeros(count), np.zeros(count)
    for place, each in enumerate(ratio):
      clipped = min(max(each, 1 - settings.epsilon_low), 1 + settings.epsilon_high)
      values[place] = -min(each * advantage, clipped * advantage)
      slopes[place] = -each * advantage if each * advantage <= clipped * advantage else 0.0
    if cap is not None:
      correction = np.minimum(np.exp(old - engine), cap)
      values, slopes = values * correction, slopes * correction
    distance = reference - policy
    values = values + settings.beta * (np.exp(distance) - distance - 1)
    slopes = slopes + settings.beta * (1 - np.exp(distance))
    divisor = {"sequence-mean-token-mean": count, "sequence-mean-token-scale": settings.token_scale}.get(
      settings.aggregation, 1
    )
    total += values.sum() / divisor
    gradient[row, :count] = slopes / divisor
    weight += count if settings.aggregation == "token-mean" else 1
  return total / weight, gradient / weight


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("algorithm", ["grpo", "gspo-token"])
@pytest.mark.parametrize(
  ("low", "high", "beta", "cap"), [(0.2, 0.2, 0.0, None), (0.1, 0.4, 0.3, None), (0.1, 0.4, 0.3, 1.2)]
)
def test_loss_and_gradient_by_formula(aggregation: Any, algorithm: Any, low: float, high: float, beta: float, cap: Any):
  settings = GrpoSettings(algorithm, aggregation, low, high, beta, token_scale=9)
  data = batch()
  value, gradient = jax.value_and_grad(lambda policy: our_loss(settings, {**data, "log_probs": policy}, cap=cap))(
    jnp.asarray(data["log_probs"])
  )
  expected, expected_gradient = formula(settings, data, cap=cap)
  assert float(value) == pytest.approx(expected, abs=1e-5)
  np.testing.assert_allclose(gradient, expected_gradient, atol=1e-5)


def trl_cases() -> list[str]:
  with np.load(REPOSITORY / "tests" / "data" / "trl_grpo.npz") as stored:
    return [name.removeprefix("loss/") for name in stored.files if name.startswith("loss/")]


@pytest.fixture(scope="module")
def trl() -> dict[str, np.ndarray]:
  with np.load(REPOSITORY / "tests" / "data" / "trl_grpo.npz") as stored:
    return dict(stored)


@pytest.mark.parametrize("case", trl_cases())
def test_loss_and_gradient_against_trl(trl: dict[str, np.ndarray], case: str):
  loss_type, level, low, high, beta, corrected = case.split("/")
  settings = GrpoSettings(
    "gspo-token" if level == "sequence" else "grpo",
    TRL_NAMES[loss_type],  # pyright: ignore[reportArgumentType]
    float(low),
    float(high),
    float(beta),
    token_scale=trl["mask"].shape[1],
  )
  cap = 1.5 if corrected == "1" else None

  def loss(logits: jax.Array) -> jax.Array:
    log_probs = logit_outputs(logits, jnp.asarray(trl["targets"])).log_probs
    return our_loss(settings, {**trl, "log_probs": log_probs}, cap=cap)

  value, gradient = jax.value_and_grad(loss)(jnp.asarray(trl["logits"]))
  assert float(value) == pytest.approx(float(trl[f"loss/{case}"]), abs=1e-5)
  if level == "token" or cap is None:
    # With a weight for each token the sequence's ratio and the token's (GSPO-token) part in the gradient.
    np.testing.assert_allclose(gradient, trl[f"grad/{case}"], atol=1e-5)


def test_metrics_against_trl(trl: dict[str, np.ndarray]):
  settings = GrpoSettings("grpo", "token-mean", 0.1, 0.5, 0.3)
  mask = jnp.asarray(trl["mask"])
  found = logit_outputs(jnp.asarray(trl["logits"]), jnp.asarray(trl["targets"]), with_entropy=True)
  losses = token_losses(
    settings,
    log_probs=found.log_probs,
    old_log_probs=jnp.asarray(trl["old"]),
    advantages=jnp.asarray(trl["advantages"]),
    mask=mask,
    reference=jnp.asarray(trl["reference"]),
  )
  have = [
    float(metric_sum(values, mask, "token-mean")) / mask.sum()
    for values in (losses.kl, found.entropy, losses.clipped_low, losses.clipped_high)
  ]
  np.testing.assert_allclose(have, trl["metrics/dapo/token/0.1/0.5/0.3/0"], atol=1e-5)


class TestAdvantages:
  def test_values_worked_by_hand(self):
    np.testing.assert_allclose(
      group_advantages([1, 1, 1, 0], 4, epsilon=1e-4), [0.4999, 0.4999, 0.4999, -1.4997], atol=1e-4
    )
    np.testing.assert_allclose(group_advantages([1, 1, 1, 0], 4), [0.499999] * 3 + [-1.499997], atol=1e-6)
    np.testing.assert_allclose(group_advantages([1, 1, 1, 0], 4, scale="mean"), [0.25, 0.25, 0.25, -0.75])
    np.testing.assert_allclose(group_advantages([1, 2, 3, 4], 2, scale="none"), [1, 2, 3, 4])

  @pytest.mark.parametrize("scale", ["std", "mean"])
  @pytest.mark.parametrize("reward", [0.0, 0.35, 1e30, -7.1])
  def test_equal_rewards_give_exact_zeros(self, scale: Any, reward: float):
    assert not group_advantages([reward] * 7, 7, scale=scale).any()
    assert zero_spread([reward] * 7, 7).tolist() == [True]

  def test_each_group_by_itself(self):
    have = group_advantages([1, 1, 0, 0, 5, 5, 4, 4], 4)
    np.testing.assert_allclose(have[:4], have[4:])
    assert zero_spread([1, 1, 0, 0, 2, 2, 2, 2], 4).tolist() == [False, True]

  def test_a_group_of_one_has_none(self):
    assert group_advantages([3.0, 4.0], 1).tolist() == [0.0, 0.0]

  @pytest.mark.parametrize("rewards", [[1.0, 2.0, 3.0], [[1.0, 2.0]], [1.0, float("nan")], [float("inf"), 0.0]])
  def test_refuses_what_is_no_group(self, rewards: Any):
    with pytest.raises(ValueError, match="reward"):
      group_advantages(rewards, 2)


def test_aggregations_of_two_completions_worked_by_hand():
  # Lengths 2 and 6, advantages +1 and −1, ratios of 1.
  mask = jnp.asarray([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]], bool)
  log_probs = jnp.zeros((2, 6))
  expected = {
    "sequence-mean-token-mean": 0.0,
    "token-mean": 0.5,
    "sequence-mean-token-scale": 0.25,
    "sequence-mean": 2.0,
  }
  for aggregation, value in expected.items():
    settings = GrpoSettings(aggregation=aggregation, token_scale=8)  # pyright: ignore[reportArgumentType]
    data = {"log_probs": log_probs, "old": log_probs, "mask": mask, "advantages": jnp.asarray([1.0, -1.0])}
    assert float(our_loss(settings, data)) == pytest.approx(value), aggregation


@pytest.mark.parametrize(
  ("ratio", "advantage", "expected"), [(1.5, 1, -1.2), (0.5, 1, -0.5), (1.5, -1, 1.5), (0.5, -1, 0.8)]
)
def test_clipping_worked_by_hand(ratio: float, advantage: float, expected: float):
  data = {
    "log_probs": jnp.log(jnp.asarray([[ratio]])),
    "old": jnp.zeros((1, 1)),
    "mask": jnp.ones((1, 1), bool),
    "advantages": jnp.asarray([float(advantage)]),
  }
  assert float(our_loss(GrpoSettings(), data)) == pytest.approx(expected)


def test_k3_worked_by_hand():
  np.testing.assert_allclose(kl_k3(jnp.zeros(2), jnp.asarray([-0.5, 0.5])), [0.106531, 0.148721], atol=1e-6)


def test_a_policy_against_itself_has_ratio_one_and_a_gradient():
  data = batch()
  settings = GrpoSettings()

  def loss(policy: jax.Array) -> jax.Array:
    return our_loss(settings, {**data, "log_probs": policy, "old": policy})

  gradient = jax.grad(loss)(jnp.asarray(data["log_probs"]))
  policy = jnp.asarray(data["log_probs"])
  ratio = importance_ratio(policy, policy, jnp.asarray(data["mask"]), "grpo")
  assert (np.asarray(ratio) == 1.0).all()
  expected = -data["advantages"][:, None] * data["mask"] / data["mask"].sum(1, keepdims=True) / len(data["mask"])
  np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_without_advantage_the_penalty_still_pulls_to_the_reference():
  data = {**batch(), "advantages": np.zeros(5, np.float32)}
  settings = GrpoSettings(beta=0.1)
  gradient = jax.grad(lambda policy: our_loss(settings, {**data, "log_probs": policy}))(jnp.asarray(data["log_probs"]))
  above = (data["log_probs"] > data["reference"]) & data["mask"]
  assert (np.asarray(gradient)[above] > 0).all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("algorithm", ["grpo", "gspo-token"])
class TestEdges:
  def check_finite(self, settings: GrpoSettings, data: dict[str, Any]) -> tuple[float, np.ndarray]:
    weight = max(weight_of(data["mask"], settings.aggregation), 1.0)

    def loss(policy: jax.Array) -> jax.Array:
      return our_sum(settings, {**data, "log_probs": policy}, cap=2.0) / weight

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(data["log_probs"]))
    assert np.isfinite(float(value))
    assert np.isfinite(np.asarray(gradient)).all()
    return float(value), np.asarray(gradient)

  def test_all_masked(self, aggregation: Any, algorithm: Any):
    data = {**batch(), "mask": np.zeros((5, 7), bool)}
    value, gradient = self.check_finite(GrpoSettings(algorithm, aggregation, beta=0.1), data)
    assert value == 0.0
    assert not gradient.any()

  def test_what_is_masked_may_be_anything(self, aggregation: Any, algorithm: Any):
    data = batch()
    for key in ("log_probs", "old", "engine", "reference"):
      data[key] = np.where(data["mask"], data[key], np.nan)
    value, _ = self.check_finite(GrpoSettings(algorithm, aggregation, beta=0.1), data)
    clean, _ = self.check_finite(GrpoSettings(algorithm, aggregation, beta=0.1), batch())
    assert value == pytest.approx(clean)

  def test_zero_advantages_and_no_penalty_move_nothing(self, aggregation: Any, algorithm: Any):
    data = {**batch(), "advantages": np.zeros(5, np.float32)}
    value, gradient = self.check_finite(GrpoSettings(algorithm, aggregation), data)
    assert value == 0.0
    assert not gradient.any()

  @pytest.mark.parametrize("shift", [-200.0, 200.0])
  def test_policies_worlds_apart(self, aggregation: Any, algorithm: Any, shift: float):
    data = batch()
    self.check_finite(GrpoSettings(algorithm, aggregation, beta=0.1), {**data, "old": data["old"] + shift})
    self.check_finite(GrpoSettings(algorithm, aggregation, beta=0.1), {**data, "reference": data["reference"] + shift})

  def test_padding_changes_nothing(self, aggregation: Any, algorithm: Any):
    data = batch()
    longer = {key: values if key == "advantages" else np.pad(values, ((0, 0), (0, 4))) for key, values in data.items()}
    settings = GrpoSettings(algorithm, aggregation, beta=0.1, token_scale=7)
    assert float(our_loss(settings, longer)) == pytest.approx(float(our_loss(settings, data)), rel=1e-6)

  def test_micro_batches_add_up(self, aggregation: Any, algorithm: Any):
    data, settings = batch(rows=6), GrpoSettings(algorithm, aggregation, beta=0.1, token_scale=7)
    parts = [{key: values[part] for key, values in data.items()} for part in (slice(0, 2), slice(2, 6))]
    sums = sum(float(our_sum(settings, part)) for part in parts)
    weights = sum(weight_of(part["mask"], aggregation) for part in parts)
    assert sums / weights == pytest.approx(float(our_loss(settings, data)), rel=1e-5)


def our_sum(settings: GrpoSettings, data: dict[str, Any], cap: float | None = None) -> jax.Array:
  mask, old = jnp.asarray(data["mask"]), jnp.asarray(data["old"])
  losses = token_losses(
    settings,
    log_probs=jnp.asarray(data["log_probs"]),
    old_log_probs=old,
    advantages=jnp.asarray(data["advantages"]),
    mask=mask,
    reference=jnp.asarray(data["reference"]) if settings.beta else None,
    weights=None if cap is None else truncated_importance_weights(old, jnp.asarray(data["engine"]), mask, cap),
  )
  return aggregate(losses.loss, mask, settings.aggregation, token_scale=settings.token_scale)


def test_masked_sequences_leave_the_means_but_not_the_constant():
  mask = np.array([[1, 1, 0], [0, 0, 0], [0, 0, 0]], bool)
  present = np.array([True, True, False])
  weights = {name: int(loss_weights(mask, present, name).sum()) for name in AGGREGATIONS}  # pyright: ignore[reportArgumentType]
  assert weights == {
    "token-mean": 2,
    "sequence-mean-token-mean": 1,
    "sequence-mean": 1,
    "sequence-mean-token-scale": 2,
  }


def test_importance_weights_are_capped_and_have_no_gradient():
  old, engine, mask = (
    jnp.asarray([[0.0, -1.0, -9.0]]),
    jnp.asarray([[-3.0, -1.0, 0.0]]),
    jnp.asarray([[True, True, False]]),
  )
  np.testing.assert_allclose(truncated_importance_weights(old, engine, mask, 2.0), [[2.0, 1.0, 0.0]])
  gradient = jax.grad(lambda values: truncated_importance_weights(values, engine, mask, 2.0).sum())(old)
  assert not np.asarray(gradient).any()
