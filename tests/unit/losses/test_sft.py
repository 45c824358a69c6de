"""The SFT loss against its formula in NumPy float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_posttrain.losses.sft import sft_loss_sum, token_log_probs


def example(seed: int = 0, batch: int = 3, seq: int = 5, vocab: int = 11):
  rng = np.random.default_rng(seed)
  logits = rng.normal(scale=4.0, size=(batch, seq, vocab)).astype(np.float32)
  targets = rng.integers(0, vocab, size=(batch, seq)).astype(np.int32)
  mask = rng.random((batch, seq)) < 0.6
  mask[0] = False
  return logits, targets, mask


def log_probs_float64(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
  logits = logits.astype(np.float64)
  shifted = logits - logits.max(-1, keepdims=True)
  log_softmax = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
  return np.take_along_axis(log_softmax, targets[..., None], -1)[..., 0]


def gradient_float64(logits: np.ndarray, targets: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """d/dlogits of the summed negative log-likelihood: softmax − one-hot where trained, 0 elsewhere."""
  logits = logits.astype(np.float64)
  exp = np.exp(logits - logits.max(-1, keepdims=True))
  probabilities = exp / exp.sum(-1, keepdims=True)
  return (probabilities - np.eye(logits.shape[-1])[targets]) * mask[..., None]


def test_value_and_gradient_by_formula():
  logits, targets, mask = example()
  value, gradient = jax.value_and_grad(sft_loss_sum)(jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(mask))
  expected = -(log_probs_float64(logits, targets) * mask).sum()
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  np.testing.assert_allclose(gradient, gradient_float64(logits, targets, mask), atol=1e-6)


def test_worked_by_hand():
  """Two logits, 0 and ln 3: the second token has probability 3/4."""
  logits = jnp.array([[[0.0, np.log(3.0)]]])
  np.testing.assert_allclose(token_log_probs(logits, jnp.array([[1]])), [[np.log(0.75)]], rtol=1e-6)
  np.testing.assert_allclose(token_log_probs(logits, jnp.array([[0]])), [[np.log(0.25)]], rtol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_positions_reach_neither_value_nor_gradient(poison: float):
  logits, targets, mask = example()
  loss = jax.value_and_grad(sft_loss_sum)
  value, gradient = loss(jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(mask))
  poisoned = np.where(mask[..., None], logits, poison)
  poisoned_targets = np.where(mask, targets, 10**6)
  same_value, same_gradient = loss(jnp.asarray(poisoned), jnp.asarray(poisoned_targets), jnp.asarray(mask))
  np.testing.assert_array_equal(same_value, value)
  np.testing.assert_array_equal(same_gradient, gradient)


def test_nothing_trained_is_zero_with_zero_gradient():
  logits, targets, mask = example()
  value, gradient = jax.value_and_grad(sft_loss_sum)(jnp.asarray(logits), jnp.asarray(targets), jnp.zeros_like(mask))
  assert float(value) == 0.0
  assert not np.any(gradient)


def test_padding_to_another_length_changes_nothing():
  logits, targets, mask = example()
  pad = ((0, 0), (0, 4))
  padded = (np.pad(logits, (*pad, (0, 0)), constant_values=7.0), np.pad(targets, pad), np.pad(mask, pad))
  value = sft_loss_sum(*map(jnp.asarray, (logits, targets, mask)))
  np.testing.assert_allclose(sft_loss_sum(*map(jnp.asarray, padded)), value, rtol=1e-6)


def test_z_loss_by_formula():
  logits, targets, mask = example()
  value = sft_loss_sum(*map(jnp.asarray, (logits, targets, mask)), z_loss_multiplier=0.1)
  log_z = np.log(np.exp(logits.astype(np.float64)).sum(-1))
  expected = -(log_probs_float64(logits, targets) * mask).sum() + 0.1 * (log_z**2 * mask).sum()
  np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_bfloat16_logits_are_summed_in_float32():
  logits, targets, mask = example(batch=8, seq=512, vocab=16)
  logits = jnp.asarray(logits, jnp.bfloat16)
  value = sft_loss_sum(logits, jnp.asarray(targets), jnp.asarray(mask))
  assert value.dtype == jnp.float32
  expected = -(log_probs_float64(np.asarray(logits, np.float32), targets) * mask).sum()
  np.testing.assert_allclose(value, expected, rtol=1e-5)
