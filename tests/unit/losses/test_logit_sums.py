"""Sums over chunks of the head against the head applied at once: values, gradients, and what must not reach them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_posttrain.losses import head
from maxtext_posttrain.losses.distillation import distillation_losses

ROWS, SEQ, EMB, VOCAB = 3, 7, 5, 11


def example(mask_share: float = 0.5) -> dict[str, Any]:
  rng = np.random.default_rng(0)
  mask = rng.random((ROWS, SEQ)) < mask_share
  mask[1] = False
  return {
    "weights": rng.normal(size=(EMB, VOCAB)).astype(np.float32),
    "hidden": rng.normal(size=(ROWS, SEQ, EMB)).astype(np.float32),
    "teacher": rng.normal(size=(ROWS, SEQ, VOCAB)).astype(np.float32),
    "mask": mask,
  }


def project(weights: jax.Array, hidden: jax.Array) -> jax.Array:
  return hidden @ weights


def part(logits: jax.Array, others: dict[str, jax.Array], mask: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
  far = distillation_losses(logits, others["teacher"], mask, name="jsd", beta=0.3, temperature=2.0)
  return jnp.sum(far), {"positions": jnp.sum(mask).astype(jnp.float32)}


def by_chunks(data: dict[str, Any], chunk: int) -> Any:
  def loss(weights: jax.Array, hidden: jax.Array) -> tuple[jax.Array, Any]:
    others, mask = {"teacher": jnp.asarray(data["teacher"])}, jnp.asarray(data["mask"])
    total, more = head.logit_sums(project, weights, hidden, others, mask, part, chunk=chunk)
    return 3.0 * total, more  # As a share of a loss would be.

  arguments = (jnp.asarray(data["weights"]), jnp.asarray(data["hidden"]))
  (value, more), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*arguments)
  alone, _ = jax.jit(loss)(*arguments)
  np.testing.assert_allclose(alone, value, rtol=1e-6)
  return value, more, gradients


@pytest.mark.parametrize("chunk", [1, 3, SEQ, 10])
def test_chunks_give_what_the_whole_head_gives(chunk: int):
  data = example()

  def whole(weights: jax.Array, hidden: jax.Array) -> jax.Array:
    return 3.0 * part(project(weights, hidden), {"teacher": data["teacher"]}, jnp.asarray(data["mask"]))[0]

  arguments = (jnp.asarray(data["weights"]), jnp.asarray(data["hidden"]))
  value, gradients = jax.jit(jax.value_and_grad(whole, argnums=(0, 1)))(*arguments)
  have, more, have_gradients = by_chunks(data, chunk)
  np.testing.assert_allclose(have, value, rtol=1e-6)
  assert float(more["positions"]) == data["mask"].sum()
  for one, other in zip(have_gradients, gradients, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_what_is_masked_reaches_nothing():
  data = example()
  value, _, gradients = by_chunks(data, 2)
  poisoned = {name: np.where(data["mask"][..., None], data[name], np.nan) for name in ("hidden", "teacher")}
  same, _, same_gradients = by_chunks(data | poisoned, 2)
  np.testing.assert_array_equal(same, value)
  for one, other in zip(same_gradients, gradients, strict=True):
    np.testing.assert_array_equal(one, other)


def test_nothing_that_counts_is_zero():
  data = example(mask_share=0.0)
  value, more, gradients = by_chunks(data, 2)
  assert float(value) == 0.0
  assert float(more["positions"]) == 0.0
  assert not any(np.any(gradient) for gradient in gradients)
