"""Distillation's losses against their formulas in NumPy float64, and against TRL's GKD."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_posttrain.losses import distillation as losses
from tests.conftest import REPOSITORY

CASES: tuple[tuple[Any, float], ...] = (
  ("forward_kl", 0.5),
  ("reverse_kl", 0.5),
  ("jsd", 0.0),
  ("jsd", 0.1),
  ("jsd", 0.5),
  ("jsd", 0.9),
  ("jsd", 1.0),
)


def example(seed: int = 0, shape: tuple[int, ...] = (3, 5, 11)):
  rng = np.random.default_rng(seed)
  student = rng.normal(scale=3.0, size=shape).astype(np.float32)
  teacher = rng.normal(scale=3.0, size=shape).astype(np.float32)
  mask = rng.random(shape[:-1]) < 0.6
  mask[0] = False
  return student, teacher, mask


def log_softmax64(logits: np.ndarray, temperature: float) -> np.ndarray:
  logits = logits.astype(np.float64) / temperature
  logits = logits - logits.max(-1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def divergence64(log_q: np.ndarray, log_p: np.ndarray, name: str, beta: float) -> np.ndarray:
  """Of a student's log-probabilities and a teacher's, by the formulas of the papers."""
  q, p = np.exp(log_q), np.exp(log_p)
  forward, reverse = (p * (log_p - log_q)).sum(-1), (q * (log_q - log_p)).sum(-1)
  if name == "forward_kl" or (name == "jsd" and beta == 0):
    return forward
  if name == "reverse_kl" or (name == "jsd" and beta == 1):
    return reverse
  log_m = np.log(beta * p + (1 - beta) * q)
  return beta * (p * (log_p - log_m)).sum(-1) + (1 - beta) * (q * (log_q - log_m)).sum(-1)


def gradient64(log_q: np.ndarray, log_p: np.ndarray, name: str, beta: float, temperature: float) -> np.ndarray:
  """d/dlogits of the student: J = dD/dlog q, then (J − q ΣJ) / T."""
  q, p = np.exp(log_q), np.exp(log_p)
  if name == "forward_kl" or (name == "jsd" and beta == 0):
    slope = -p
  elif name == "reverse_kl" or (name == "jsd" and beta == 1):
    slope = q * (log_q - log_p + 1)
  else:
    m = beta * p + (1 - beta) * q
    # d/dq of β Σ p log(p/m) + (1 − β) Σ q log(q/m), where dm/dq = 1 − β.
    slope = q * (-beta * p * (1 - beta) / m + (1 - beta) * (log_q - np.log(m) + 1 - q * (1 - beta) / m))
  return (slope - q * slope.sum(-1, keepdims=True)) / temperature


@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.7])
@pytest.mark.parametrize(("name", "beta"), CASES)
def test_value_and_gradient_by_formula(name: Any, beta: float, temperature: float):
  student, teacher, mask = example()

  def total(logits: jax.Array) -> jax.Array:
    return jnp.sum(
      losses.distillation_losses(logits, jnp.asarray(teacher), jnp.asarray(mask), name=name, beta=beta,
                                 temperature=temperature)
    )  # fmt: skip

  value, gradient = jax.value_and_grad(total)(jnp.asarray(student))
  log_q, log_p = log_softmax64(student, temperature), log_softmax64(teacher, temperature)
  expected = temperature**2 * (divergence64(log_q, log_p, name, beta) * mask).sum()
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  expected_gradient = temperature**2 * gradient64(log_q, log_p, name, beta, temperature) * mask[..., None]
  np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-5 * np.abs(expected_gradient).max())


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_as_trl_has_it(beta: float, temperature: float):
  """TRL 1.16.0's GKD; it has no factor T²."""
  with np.load(REPOSITORY / "tests/data/trl_distillation.npz", allow_pickle=False) as reference:
    student, teacher, mask = (jnp.asarray(reference[name]) for name in ("student", "teacher", "mask"))
    loss, gradient = (reference[f"{what}_{beta}_{temperature}"] for what in ("loss", "gradient"))

  def total(logits: jax.Array) -> jax.Array:
    each = losses.distillation_losses(logits, teacher, mask, name="jsd", beta=beta, temperature=temperature)
    return jnp.sum(each) / temperature**2

  value, have = jax.value_and_grad(total)(student)
  np.testing.assert_allclose(value, loss, rtol=1e-5)
  np.testing.assert_allclose(have, gradient, rtol=1e-5, atol=1e-5 * np.abs(gradient).max())


def test_worked_by_hand():
  """Student (1/2, 1/2) and teacher softmax(2, 0): each direction has its own value, and T = 2, 4 theirs."""
  student, teacher, mask = jnp.zeros((1, 2)), jnp.array([[2.0, 0.0]]), jnp.array([True])

  def value(name: Any, temperature: float = 1.0) -> float:
    return float(losses.distillation_losses(student, teacher, mask, name=name, temperature=temperature)[0])

  assert value("forward_kl") == pytest.approx(0.327813, rel=1e-5)
  assert value("reverse_kl") == pytest.approx(0.433781, rel=1e-5)
  assert value("jsd") == pytest.approx(0.089541, rel=1e-4)
  assert value("forward_kl", 2.0) == pytest.approx(0.443777, rel=1e-5)
  assert value("forward_kl", 4.0) == pytest.approx(0.484798, rel=1e-5)


def test_the_generalised_divergence_tends_to_the_two_kls():
  student, teacher, mask = example()
  arguments = (jnp.asarray(student / 6), jnp.asarray(teacher / 6), jnp.asarray(mask))
  small = losses.distillation_losses(*arguments, name="jsd", beta=1e-3) / 1e-3
  np.testing.assert_allclose(small, losses.distillation_losses(*arguments, name="forward_kl"), rtol=0.05, atol=1e-3)
  large = losses.distillation_losses(*arguments, name="jsd", beta=1 - 1e-3) / 1e-3
  np.testing.assert_allclose(large, losses.distillation_losses(*arguments, name="reverse_kl"), rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("name", "beta"), CASES)
def test_masked_positions_reach_neither_value_nor_gradient(name: Any, beta: float, poison: float):
  student, teacher, mask = example()

  def total(logits: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.sum(losses.distillation_losses(logits, other, jnp.asarray(mask), name=name, beta=beta, temperature=2.0))

  value, gradient = jax.value_and_grad(total)(jnp.asarray(student), jnp.asarray(teacher))
  poisoned = (jnp.asarray(np.where(mask[..., None], each, poison)) for each in (student, teacher))
  same_value, same_gradient = jax.value_and_grad(total)(*poisoned)
  np.testing.assert_array_equal(same_value, value)
  np.testing.assert_array_equal(same_gradient, gradient)


@pytest.mark.parametrize(("name", "beta"), CASES)
def test_a_token_that_neither_gives_any_probability_counts_nothing(name: Any, beta: float):
  """As vocabularies padded with −inf have them."""
  student, teacher, mask = example()

  def total(logits: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.sum(losses.distillation_losses(logits, other, jnp.asarray(mask), name=name, beta=beta))

  value, gradient = jax.value_and_grad(total)(jnp.asarray(student), jnp.asarray(teacher))
  padded = (
    jnp.pad(jnp.asarray(each), ((0, 0), (0, 0), (0, 3)), constant_values=-jnp.inf) for each in (student, teacher)
  )
  padded_value, padded_gradient = jax.value_and_grad(total)(*padded)
  np.testing.assert_allclose(padded_value, value, rtol=1e-6)
  np.testing.assert_allclose(padded_gradient[..., :11], gradient, rtol=1e-5, atol=1e-7)
  assert not np.any(padded_gradient[..., 11:])


def test_padding_to_another_length_changes_nothing():
  student, teacher, mask = example()
  pad = ((0, 2), (0, 4))
  padded = [np.pad(each, (*pad, (0, 0)), constant_values=7.0) for each in (student, teacher)]
  value = losses.distillation_losses(*map(jnp.asarray, (student, teacher, mask)), name="jsd")
  longer = losses.distillation_losses(*map(jnp.asarray, (*padded, np.pad(mask, pad))), name="jsd")
  np.testing.assert_array_equal(longer[:3, :5], value)
  assert not np.any(longer[3:])
  assert not np.any(longer[:, 5:])


def test_no_gradient_goes_into_the_teacher():
  student, teacher, mask = map(jnp.asarray, example())
  gradient = jax.grad(lambda other: jnp.sum(losses.distillation_losses(student, other, mask, name="jsd")))(teacher)
  assert not np.any(gradient)


def test_bfloat16_logits_are_compared_in_float32():
  student, teacher, mask = example(shape=(4, 64, 300))
  low = [jnp.asarray(each, jnp.bfloat16) for each in (student, teacher)]
  value = losses.distillation_losses(*low, jnp.asarray(mask), name="forward_kl")
  assert value.dtype == jnp.float32
  log_q, log_p = (log_softmax64(np.asarray(each, np.float32), 1.0) for each in low)
  expected = divergence64(log_q, log_p, "forward_kl", 0.5) * mask
  np.testing.assert_allclose(jnp.sum(value), expected.sum(), rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize(("name", "beta"), CASES)
def test_all_tokens_of_the_vocabulary_are_as_full_logits(name: Any, beta: float, temperature: float):
  student, teacher, mask = map(jnp.asarray, example())
  ids, log_probs = losses.top_k_log_probs(teacher, teacher.shape[-1])

  def full(logits: jax.Array) -> jax.Array:
    each = losses.distillation_losses(logits, teacher, mask, name=name, beta=beta, temperature=temperature)
    return jnp.sum(each)

  def top_k(logits: jax.Array) -> jax.Array:
    options = {"name": name, "beta": beta, "temperature": temperature}
    return jnp.sum(losses.top_k_distillation_losses(logits, ids, log_probs, mask, **options))

  value, gradient = jax.value_and_grad(full)(student)
  same_value, same_gradient = jax.value_and_grad(top_k)(student)
  np.testing.assert_allclose(same_value, value, rtol=1e-5)
  np.testing.assert_allclose(same_gradient, gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(("name", "beta"), CASES)
def test_the_tail_is_one_outcome(name: Any, beta: float, temperature: float):
  """Both distributions gathered by hand into k + 1 outcomes, then tempered."""
  student, teacher, mask = example()
  k = 4
  ids, log_probs = losses.top_k_log_probs(jnp.asarray(teacher), k)
  order = np.argsort(-teacher, axis=-1)

  def gathered(logits: np.ndarray) -> np.ndarray:
    p = np.take_along_axis(np.exp(log_softmax64(logits, 1.0)), order, -1)
    p = np.concatenate([p[..., :k], p[..., k:].sum(-1, keepdims=True)], -1)
    return log_softmax64(np.log(p), temperature)

  np.testing.assert_array_equal(ids, order[..., :k])
  options = {"name": name, "beta": beta, "temperature": temperature}
  value = losses.top_k_distillation_losses(jnp.asarray(student), ids, log_probs, jnp.asarray(mask), **options)
  expected = temperature**2 * divergence64(gathered(student), gathered(teacher), name, beta) * mask
  np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
  if temperature == 1.0:
    full = losses.distillation_losses(jnp.asarray(student), jnp.asarray(teacher), jnp.asarray(mask), **options)
    assert np.all(value <= full + 1e-6)


def test_masked_positions_of_saved_logits_reach_nothing():
  student, teacher, mask = example()
  ids, log_probs = (np.asarray(each) for each in losses.top_k_log_probs(jnp.asarray(teacher), 4))

  def total(logits: jax.Array, ids: np.ndarray, log_probs: np.ndarray) -> jax.Array:
    saved = (jnp.asarray(ids), jnp.asarray(log_probs))
    return jnp.sum(losses.top_k_distillation_losses(logits, *saved, jnp.asarray(mask), name="reverse_kl"))

  value, gradient = jax.value_and_grad(total)(jnp.asarray(student), ids, log_probs)
  trained = mask[..., None]
  poisoned = (np.where(trained, ids, 10**6), np.where(trained, log_probs, np.nan))
  same_value, same_gradient = jax.value_and_grad(total)(jnp.where(trained, student, jnp.nan), *poisoned)
  np.testing.assert_array_equal(same_value, value)
  np.testing.assert_array_equal(same_gradient, gradient)


def test_features_by_formula():
  rng = np.random.default_rng(1)
  student, teacher = (rng.normal(size=(2, 3, 4, 6)).astype(np.float32) for _ in range(2))
  mask = rng.random((3, 4)) < 0.7
  square = losses.feature_losses(jnp.asarray(student), jnp.asarray(teacher), jnp.asarray(mask), "l2")
  np.testing.assert_allclose(square, ((student - teacher) ** 2).mean(-1).mean(0) * mask, rtol=1e-5)
  angle = losses.feature_losses(jnp.asarray(student), jnp.asarray(teacher), jnp.asarray(mask), "cosine")
  norms = np.linalg.norm(student, axis=-1) * np.linalg.norm(teacher, axis=-1)
  np.testing.assert_allclose(angle, (1 - (student * teacher).sum(-1) / norms).mean(0) * mask, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["cosine", "l2"])
def test_masked_features_reach_nothing_and_zero_features_are_finite(name: Any):
  rng = np.random.default_rng(1)
  student, teacher = (rng.normal(size=(2, 3, 4, 6)).astype(np.float32) for _ in range(2))
  student[:, 0, 0] = 0.0
  mask = np.ones((3, 4), bool)
  mask[1] = False

  def total(student: jax.Array, teacher: jax.Array) -> jax.Array:
    return jnp.sum(losses.feature_losses(student, teacher, jnp.asarray(mask), name))

  value, gradient = jax.value_and_grad(total)(jnp.asarray(student), jnp.asarray(teacher))
  assert np.all(np.isfinite(gradient))
  student[:, 1] = np.nan
  teacher[:, 1] = np.inf
  same_value, same_gradient = jax.value_and_grad(total)(jnp.asarray(student), jnp.asarray(teacher))
  np.testing.assert_array_equal(same_value, value)
  np.testing.assert_array_equal(same_gradient, gradient)


@pytest.mark.parametrize(
  ("name", "expected"),
  [
    ("constant", [1.0, 1.0, 1.0, 1.0, 1.0]),
    ("linear", [1.0, 1.5, 2.0, 3.0, 3.0]),
    ("cosine", [1.0, 1.0 + 2.0 * (0.5 - 0.5 * np.cos(np.pi / 4)), 2.0, 3.0, 3.0]),
  ],
)
def test_schedules(name: Any, expected: list[float]):
  values = [losses.scheduled(1.0, 3.0, name, jnp.int32(step), 100) for step in (0, 25, 50, 100, 130)]
  np.testing.assert_allclose(values, expected, rtol=1e-6)
  assert float(losses.scheduled(1.0, None, "linear", jnp.int32(50), 100)) == 1.0
