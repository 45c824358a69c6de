"""Preference losses against their formulas in NumPy float64, against TRL's, and by hand."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_posttrain.losses.dpo import PairLogProbs, PreferenceSettings, preference_losses, sum_by_segment
from maxtext_posttrain.losses.sft import token_log_probs

TRL = np.load(Path(__file__).parents[2] / "data" / "preference_losses.npz")
NUMBERS = {
  "beta": float(TRL["beta"]),
  "gamma": float(TRL["gamma"]),
  "orpo_lambda": float(TRL["orpo_lambda"]),
}
SMOOTHING = float(TRL["smoothing"])
PAIRS = TRL["reference"].shape[1]
CASES = {
  "sigmoid": PreferenceSettings("sigmoid", **NUMBERS),
  "sigmoid_norm": PreferenceSettings("sigmoid_norm", **NUMBERS),
  "hinge": PreferenceSettings("hinge", **NUMBERS),
  "ipo": PreferenceSettings("ipo", **NUMBERS),
  "sigmoid_smoothed": PreferenceSettings("sigmoid", label_smoothing=SMOOTHING, **NUMBERS),
  "simpo": PreferenceSettings("simpo", **NUMBERS),
  "simpo_smoothed": PreferenceSettings("simpo", label_smoothing=SMOOTHING, **NUMBERS),
  "orpo": PreferenceSettings("orpo", **NUMBERS),
}


def unpacked() -> dict[str, np.ndarray]:
  """TRL's sequences as a batch [pairs, 2, length - 1], one pair a row: each position predicts the next token."""
  halves = {key: TRL[key].reshape(2, PAIRS, *TRL[key].shape[1:]).swapaxes(0, 1) for key in ("ids", "completion_mask")}
  logits = TRL["logits"].reshape(2, PAIRS, *TRL["logits"].shape[1:]).swapaxes(0, 1)
  return {
    "logits": logits[:, :, :-1],
    "targets": halves["ids"][:, :, 1:],
    "segments": halves["completion_mask"][:, :, 1:],
    "reference": TRL["reference"].T[:, :, None],
  }


def packed(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """The same pairs in one row, one behind the other."""
  pairs = len(batch["targets"])
  numbers = np.arange(1, pairs + 1)[:, None, None]
  segments = batch["segments"] * numbers
  row = {key: np.concatenate(list(batch[key]), axis=1)[None] for key in ("logits", "targets")}
  return row | {
    "segments": np.concatenate(list(segments), axis=1)[None],
    "reference": np.concatenate(list(batch["reference"]), axis=1)[None],
  }


def mean_loss(logits: jax.Array, batch: dict[str, np.ndarray], settings: PreferenceSettings) -> jax.Array:
  segments = jnp.asarray(batch["segments"])
  mask = segments != 0
  safe_logits = jnp.where(mask[..., None], logits, 0.0)
  log_probs = token_log_probs(safe_logits, jnp.where(mask, batch["targets"], 0))
  policy = sum_by_segment(log_probs, segments, batch["reference"].shape[-1])
  result = preference_losses(policy, jnp.asarray(batch["reference"]), settings)
  return jnp.sum(result.losses) / jnp.sum(policy.present)


value_and_gradient = jax.jit(jax.value_and_grad(mean_loss), static_argnums=2)


def in_trl_order(gradient: np.ndarray) -> np.ndarray:
  """[pairs, 2, length - 1, vocab] as [2 * pairs, length, vocab]; the last position predicts nothing."""
  gradient = np.asarray(gradient).swapaxes(0, 1).reshape(2 * PAIRS, -1, gradient.shape[-1])
  return np.pad(gradient, ((0, 0), (0, 1), (0, 0)))


def assert_close(have: np.ndarray, want: np.ndarray, tolerance: float = 1e-5) -> None:
  """Within `tolerance` of the largest value: single entries of a gradient are differences of larger numbers."""
  np.testing.assert_allclose(have, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_trls(name: str):
  batch = unpacked()
  value, gradient = value_and_gradient(jnp.asarray(batch["logits"]), batch, CASES[name])
  np.testing.assert_allclose(value, TRL[f"{name}_loss"], rtol=1e-5)
  assert np.abs(TRL[f"{name}_gradient"]).max() > 1e-3
  assert_close(in_trl_order(gradient), TRL[f"{name}_gradient"])


def formula(name: str, logits: np.ndarray, batch: dict[str, np.ndarray]) -> float:
  """The mean loss from the papers' formulas, in float64."""
  settings = CASES[name]
  logits = logits.astype(np.float64)
  log_softmax = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  tokens = np.take_along_axis(log_softmax, batch["targets"][..., None], -1)[..., 0]
  beta, smoothing = settings.beta, settings.label_smoothing
  losses = []
  for log_probs, mask, reference in zip(tokens, batch["segments"] == 1, batch["reference"], strict=True):
    (c, r), (c_ref, r_ref) = (log_probs[half][mask[half]].sum() for half in (0, 1)), reference[:, 0].astype(np.float64)
    c_len, r_len = mask.sum(-1)

    def smooth(margin: float) -> float:
      log_sigmoid = lambda x: -np.log(1 + np.exp(-x))  # noqa: E731
      return -(1 - smoothing) * log_sigmoid(margin) - smoothing * log_sigmoid(-margin)

    kind = name.removesuffix("_smoothed")
    if kind == "sigmoid":
      losses.append(smooth(beta * ((c - c_ref) - (r - r_ref))))
    elif kind == "sigmoid_norm":
      losses.append(smooth(beta * ((c - c_ref) / c_len - (r - r_ref) / r_len)))
    elif kind == "hinge":
      losses.append(max(0.0, 1 - beta * ((c - c_ref) - (r - r_ref))))
    elif kind == "ipo":
      losses.append(((c - c_ref) / c_len - (r - r_ref) / r_len - 1 / (2 * beta)) ** 2)
    elif kind == "simpo":
      losses.append(smooth(beta / c_len * c - beta / r_len * r - settings.gamma))
    else:
      p, q = np.exp(c / c_len), np.exp(r / r_len)
      losses.append(-c / c_len + settings.orpo_lambda * smooth(np.log(p / (1 - p)) - np.log(q / (1 - q))))
  return float(np.mean(losses))


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_the_formulas(name: str):
  """The gradient as a difference quotient of the float64 formula, along a few random directions."""
  batch = unpacked()
  value, gradient = value_and_gradient(jnp.asarray(batch["logits"]), batch, CASES[name])
  np.testing.assert_allclose(value, formula(name, batch["logits"], batch), rtol=1e-5)
  rng = np.random.default_rng(3)
  logits, step = batch["logits"].astype(np.float64), 1e-5
  for _ in range(3):
    direction = rng.normal(size=logits.shape)
    up, down = (formula(name, logits + sign * step * direction, batch) for sign in (1, -1))
    slope = (up - down) / (2 * step)
    scale = np.linalg.norm(gradient) * np.sqrt(direction.size / 100)
    np.testing.assert_allclose(np.sum(np.asarray(gradient) * direction), slope, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("poison", [np.nan, -np.inf])
def test_masked_positions_reach_neither_value_nor_gradient(name: str, poison: float):
  batch = unpacked()
  value, gradient = value_and_gradient(jnp.asarray(batch["logits"]), batch, CASES[name])
  masked = batch["segments"] == 0
  logits = np.where(masked[..., None], poison, batch["logits"])
  targets = np.where(masked, 10**6, batch["targets"])
  same_value, same_gradient = value_and_gradient(jnp.asarray(logits), batch | {"targets": targets}, CASES[name])
  np.testing.assert_array_equal(same_value, value)
  np.testing.assert_array_equal(same_gradient, gradient)


def test_masked_log_probs_reach_neither_sum_nor_gradient():
  segments = jnp.array([[[0, 1, 1, 0, 2, 0]] * 2])
  log_probs = jnp.where(segments == 0, jnp.nan, -2.0)

  def total(log_probs: jax.Array) -> jax.Array:
    return jnp.sum(sum_by_segment(log_probs, segments, 3).sums)

  value, gradient = jax.value_and_grad(total)(log_probs)
  assert float(value) == -12.0
  np.testing.assert_array_equal(gradient, segments != 0)


@pytest.mark.parametrize("name", CASES)
def test_padding_to_another_length_changes_nothing(name: str):
  batch = unpacked()
  value, gradient = value_and_gradient(jnp.asarray(batch["logits"]), batch, CASES[name])
  pad = ((0, 0), (0, 0), (0, 3))
  longer = batch | {key: np.pad(batch[key], pad) for key in ("targets", "segments")}
  longer["logits"] = np.pad(batch["logits"], (*pad, (0, 0)), constant_values=5.0)
  same_value, same_gradient = value_and_gradient(jnp.asarray(longer["logits"]), longer, CASES[name])
  np.testing.assert_allclose(same_value, value, rtol=1e-6)
  assert_close(np.asarray(same_gradient)[:, :, :-3], np.asarray(gradient), 1e-6)
  assert not np.asarray(same_gradient)[:, :, -3:].any()


@pytest.mark.parametrize("name", CASES)
def test_pairs_that_share_a_row_give_what_each_gives_alone(name: str):
  alone, row = unpacked(), packed(unpacked())
  value, gradient = value_and_gradient(jnp.asarray(alone["logits"]), alone, CASES[name])
  same_value, same_gradient = value_and_gradient(jnp.asarray(row["logits"]), row, CASES[name])
  np.testing.assert_allclose(same_value, value, rtol=1e-6)
  assert_close(np.asarray(same_gradient), packed({**alone, "logits": np.asarray(gradient)})["logits"], 1e-6)


@pytest.mark.parametrize("name", CASES)
def test_slots_and_rows_without_a_pair_count_nothing(name: str):
  batch = unpacked()
  value, gradient = value_and_gradient(jnp.asarray(batch["logits"]), batch, CASES[name])
  more = {key: np.concatenate([values, np.zeros_like(values[:1])]) for key, values in batch.items()}
  more["reference"] = np.pad(more["reference"], ((0, 0), (0, 0), (0, 2)), constant_values=np.nan)
  same_value, same_gradient = value_and_gradient(jnp.asarray(more["logits"]), more, CASES[name])
  np.testing.assert_allclose(same_value, value, rtol=1e-6)
  assert_close(np.asarray(same_gradient)[:-1], np.asarray(gradient), 1e-6)
  assert not np.asarray(same_gradient)[-1].any()


def one_pair(chosen: float, rejected: float, lengths: tuple[float, float] = (1.0, 1.0)) -> PairLogProbs:
  return PairLogProbs(jnp.array([[chosen], [rejected]]), jnp.array([[lengths[0]], [lengths[1]]]))


@pytest.mark.parametrize(
  ("settings", "expected"),
  [
    (PreferenceSettings("sigmoid"), 0.554355),
    (PreferenceSettings("sigmoid", label_smoothing=0.1), 0.584355),
    (PreferenceSettings("ipo"), 4.0),
    (PreferenceSettings("hinge"), 0.7),
  ],
)
def test_worked_by_hand(settings: PreferenceSettings, expected: float):
  """-9 and -12 against a reference of -10 and -10, with β = 0.1: the margin of rewards is 0.3."""
  result = preference_losses(one_pair(-9.0, -12.0), jnp.array([[-10.0], [-10.0]]), settings)
  np.testing.assert_allclose(result.losses, [expected], rtol=1e-5)
  np.testing.assert_allclose(result.chosen_rewards - result.rejected_rewards, [0.3], rtol=1e-5)


def test_lengths_count_only_where_the_loss_is_normalised():
  reference = jnp.array([[-10.0], [-10.0]])
  short, long = one_pair(-9.0, -12.0, (2.0, 6.0)), one_pair(-9.0, -12.0, (2.0, 2.0))
  for loss, same in (("sigmoid", True), ("hinge", True), ("sigmoid_norm", False), ("ipo", False)):
    one, other = (preference_losses(pair, reference, PreferenceSettings(loss)).losses for pair in (short, long))
    assert bool(one == other) is same, loss


@pytest.mark.parametrize("loss", ["sigmoid", "sigmoid_norm"])
def test_a_policy_that_is_its_reference_has_loss_ln_2_and_no_margin(loss):
  pair = one_pair(-37.25, -41.5, (5.0, 7.0))
  result = preference_losses(pair, pair.sums, PreferenceSettings(loss))
  np.testing.assert_allclose(result.losses, [np.log(2)], rtol=1e-6)
  assert float(result.chosen_rewards[0]) == float(result.rejected_rewards[0]) == 0.0


def test_orpo_stays_finite_where_a_completion_is_certain():
  def loss(chosen: jax.Array) -> jax.Array:
    pair = PairLogProbs(jnp.stack([chosen, jnp.array([-3.0])]), jnp.ones((2, 1)))
    return jnp.sum(preference_losses(pair, None, PreferenceSettings("orpo")).losses)

  for chosen in (0.0, -1e-9, -1e-4, -200.0):
    value, gradient = jax.value_and_grad(loss)(jnp.array([chosen]))
    assert np.isfinite(value), chosen
    assert np.isfinite(gradient).all(), chosen


def test_a_loss_that_compares_with_a_reference_needs_one():
  with pytest.raises(ValueError, match="ipo needs the reference"):
    preference_losses(one_pair(-1.0, -2.0), None, PreferenceSettings("ipo"))
