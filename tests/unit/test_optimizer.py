"""Clipping against optax's chained form, and by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxtext_posttrain.optimizer import add_gradient_clipping, clip_by_global_norm, global_norm


def tree(scale: float, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  return {
    "a": jnp.asarray(scale * rng.normal(size=(3, 4)), dtype),
    "b": {"c": jnp.asarray(scale * rng.normal(size=(5,)), dtype)},
  }


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("make", [lambda: optax.adamw(1e-2), lambda: optax.sgd(1e-2, momentum=0.9)])
def test_updates_equal_the_chained_form_and_state_equals_the_bare_one(scale: float, make):
  params = tree(1.0)
  inline, chained = add_gradient_clipping(make(), 1.0), optax.chain(optax.clip_by_global_norm(1.0), make())
  state, chained_state = inline.init(params), chained.init(params)
  assert jax.tree.structure(state) == jax.tree.structure(make().init(params))
  for step in range(3):
    grads = tree(scale * (step + 1))
    updates, state = inline.update(grads, state, params)
    expected, chained_state = chained.update(grads, chained_state, params)
    jax.tree.map(np.testing.assert_array_equal, updates, expected)


def test_clip_by_hand():
  grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
  assert float(global_norm(grads)) == 5.0
  clipped = clip_by_global_norm(grads, 1.0)
  np.testing.assert_allclose(clipped["a"], [0.6], rtol=1e-6)
  np.testing.assert_allclose(clipped["b"], [0.8], rtol=1e-6)
  jax.tree.map(np.testing.assert_array_equal, clip_by_global_norm(grads, 5.5), grads)


def test_the_norm_is_computed_in_float32():
  """256 entries of 256 in bfloat16: squares summed in bfloat16 would stop growing long before 256 · 256²."""
  grads = {"a": jnp.full((256,), 256.0, jnp.bfloat16), "b": jnp.full((256,), 256.0, jnp.bfloat16)}
  assert float(global_norm(grads)) == pytest.approx(256.0 * np.sqrt(512.0), rel=1e-6)
  assert clip_by_global_norm(grads, 1.0)["a"].dtype == jnp.bfloat16


@pytest.mark.parametrize("threshold", [0.0, -1.0])
def test_no_threshold_clips_nothing(threshold: float):
  params, grads = tree(1.0), tree(1000.0)
  inline = add_gradient_clipping(optax.sgd(1.0), threshold)
  updates, _ = inline.update(grads, inline.init(params), params)
  jax.tree.map(lambda update, grad: np.testing.assert_array_equal(update, -grad), updates, grads)


def test_a_tiny_threshold_bounds_the_step():
  """maxtext #2942: with SGD the weights move by at most learning rate times threshold."""
  params, grads = tree(1.0), tree(10.0)
  inline = add_gradient_clipping(optax.sgd(0.5), 1e-9)
  updates, _ = inline.update(grads, inline.init(params), params)
  assert float(global_norm(updates)) <= 0.5e-9 * (1 + 1e-6)


def test_extra_arguments_reach_the_optimizer():
  seen = {}

  def update(updates, state, params=None, **extra):
    seen.update(extra)
    return updates, state

  inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
  inline = add_gradient_clipping(inner, 1.0)
  inline.update(tree(1.0), inline.init(tree(1.0)), None, loss=1.5, grad_norm=2.0)
  assert seen == {"loss": 1.5, "grad_norm": 2.0}
