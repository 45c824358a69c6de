"""Outputs of the head chunk by chunk, and their gradients, against NumPy float64 and the head applied at once."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_posttrain.losses.head import logit_outputs, nll_sum, token_outputs

ROWS, COLUMNS, EMB, VOCAB = 3, 13, 8, 50
CHUNKS = (1, 4, 13)


def example() -> tuple[Any, ...]:
  rng = np.random.default_rng(0)
  weights = {
    "kernel": rng.normal(size=(EMB, VOCAB)).astype(np.float32),
    "bias": rng.normal(size=VOCAB).astype(np.float32),
  }
  hidden = rng.normal(size=(ROWS, COLUMNS, EMB)).astype(np.float32)
  targets = rng.integers(0, VOCAB, (ROWS, COLUMNS))
  mask = rng.random((ROWS, COLUMNS)) < 0.5
  mask[1] = False
  return weights, hidden, targets, mask


def project(weights: Any, hidden: jax.Array) -> jax.Array:
  """With a soft cap, so that the head is not linear."""
  return 5.0 * jnp.tanh((hidden @ weights["kernel"] + weights["bias"]) / 5.0)


def float64_outputs(weights: Any, hidden: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, ...]:
  wide = {name: leaf.astype(np.float64) for name, leaf in weights.items()}
  logits = 5.0 * np.tanh((hidden.astype(np.float64) @ wide["kernel"] + wide["bias"]) / 5.0)
  log_z = np.log(np.exp(logits).sum(-1))
  log_probs = logits - log_z[..., None]
  chosen = np.take_along_axis(log_probs, targets[..., None], -1)[..., 0]
  return chosen, log_z, logits.argmax(-1) == targets, -(np.exp(log_probs) * log_probs).sum(-1)


def mixed_loss(outputs: Any, mask: jax.Array) -> jax.Array:
  """A loss that reads log-probabilities and log Z of each position differently."""
  factors = jnp.cos(jnp.arange(mask.size, dtype=jnp.float32)).reshape(mask.shape)
  values = jnp.exp(outputs.log_probs) * factors + 0.1 * jnp.square(outputs.log_z)
  return jnp.sum(jnp.where(mask, values, 0.0))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_outputs_by_formula(chunk: int):
  weights, hidden, targets, mask = example()
  targets[0] = np.asarray(project(weights, hidden)).argmax(-1)[0]
  arguments = map(jnp.asarray, (hidden, targets, mask))
  compiled = jax.jit(functools.partial(token_outputs, project, chunk=chunk, with_correct=True, with_entropy=True))
  outputs = compiled(weights, *arguments)
  for have, want in zip(outputs, float64_outputs(weights, hidden, targets), strict=True):
    np.testing.assert_allclose(have, np.where(mask, want, 0), rtol=1e-5, atol=1e-5)
  assert outputs.correct.any()


@pytest.mark.parametrize("chunk", CHUNKS)
def test_gradients_equal_those_of_the_head_at_once(chunk: int):
  weights, hidden, targets, mask = example()
  targets, mask = jnp.asarray(targets), jnp.asarray(mask)

  @jax.jit
  def chunked(weights: Any, hidden: jax.Array) -> jax.Array:
    return mixed_loss(token_outputs(project, weights, hidden, targets, mask, chunk=chunk), mask)

  def at_once(weights: Any, hidden: jax.Array) -> jax.Array:
    return mixed_loss(logit_outputs(project(weights, hidden), targets), mask)

  have, want = (jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(weights, hidden) for loss in (chunked, at_once))
  jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5), have, want)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("z_loss_multiplier", [0.0, 0.1])
def test_nll_sum_and_its_gradients(chunk: int, z_loss_multiplier: float):
  weights, hidden, targets, mask = example()
  targets, mask = jnp.asarray(targets), jnp.asarray(mask)

  @jax.jit
  def chunked(weights: Any, hidden: jax.Array) -> jax.Array:
    total = nll_sum(project, weights, hidden, targets, mask, chunk=chunk, z_loss_multiplier=z_loss_multiplier)
    return 3.0 * total

  def at_once(weights: Any, hidden: jax.Array) -> jax.Array:
    log_probs, log_z, *_ = logit_outputs(project(weights, hidden), targets)
    return 3.0 * jnp.sum(jnp.where(mask, z_loss_multiplier * log_z**2 - log_probs, 0.0))

  have, want = (jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(weights, hidden) for loss in (chunked, at_once))
  jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5), have, want)
  np.testing.assert_allclose(chunked(weights, hidden), want[0], rtol=1e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_masked_positions_reach_nothing(poison: float):
  weights, hidden, targets, mask = example()

  @jax.jit
  def both(weights: Any, hidden: jax.Array, targets: jax.Array) -> tuple[Any, Any]:
    def one(weights: Any, hidden: jax.Array) -> jax.Array:
      return mixed_loss(token_outputs(project, weights, hidden, targets, jnp.asarray(mask), chunk=4), jnp.asarray(mask))

    def other(weights: Any, hidden: jax.Array) -> jax.Array:
      return nll_sum(project, weights, hidden, targets, jnp.asarray(mask), chunk=4)

    return tuple(jax.value_and_grad(loss, argnums=(0, 1))(weights, hidden) for loss in (one, other))

  clean = both(weights, hidden, targets)
  poisoned = both(weights, np.where(mask[..., None], hidden, poison), np.where(mask, targets, 10**6))
  jax.tree.map(np.testing.assert_array_equal, poisoned, clean)


def test_gradient_of_a_compiled_loss_that_makes_its_own_mask():
  """Differentiated from outside, a compiled loss is traced before its gradient is: nothing may be left in between."""
  weights, hidden, targets, mask = example()

  def losses(weights: Any, hidden: jax.Array, numbers: jax.Array) -> jax.Array:
    arguments = (project, weights, hidden, jnp.where(numbers != 0, targets, 0), numbers != 0)
    return nll_sum(*arguments, chunk=4) + mixed_loss(token_outputs(*arguments, chunk=4), numbers != 0)

  numbers = jnp.asarray(mask, jnp.int32)
  have, want = (jax.grad(loss)(weights, hidden, numbers) for loss in (jax.jit(losses), losses))
  jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5), have, want)


def test_nothing_trained_is_zero_with_zero_gradient():
  weights, hidden, targets, mask = example()
  arguments = (jnp.asarray(targets), jnp.zeros_like(mask))

  def loss(weights: Any, hidden: jax.Array) -> jax.Array:
    return nll_sum(project, weights, hidden, *arguments, chunk=4)

  value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(weights, hidden)
  assert float(value) == 0.0
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_no_array_of_all_logits():
  """The largest array of the compiled gradient is one chunk's logits or a weight, not [positions, vocab]."""
  positions, vocab = 4096, 512
  weights = {"kernel": jnp.zeros((EMB, vocab)), "bias": jnp.zeros(vocab)}
  hidden = jnp.zeros((1, positions, EMB))
  targets, mask = jnp.zeros((1, positions), int), jnp.ones((1, positions), bool)
  all_logits = 4 * positions * vocab
  for loss in (nll_sum, lambda *arguments, **kw: mixed_loss(token_outputs(*arguments, **kw), mask)):
    gradient = jax.jit(jax.grad(lambda weights, loss=loss: loss(project, weights, hidden, targets, mask, chunk=128)))
    assert gradient.lower(weights).compile().memory_analysis().temp_size_in_bytes < all_logits / 2
