"""MaxText's optimizer with gradient clipping inside, so that its state tree stays MaxText's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def global_norm(tree: Any) -> jax.Array:
  """The L2 norm over all leaves, computed in float32 whatever their dtype; a float32 scalar."""
  squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
  return jnp.sqrt(sum(squares, start=jnp.float32(0.0)))


def clip_by_global_norm(updates: Any, threshold: float) -> Any:
  """Scales `updates` to the global norm `threshold` where theirs is larger; leaves keep their dtypes.

  g ← g · threshold / ‖g‖ if ‖g‖ ≥ threshold (Pascanu et al. 2013, https://arxiv.org/abs/1211.5063, algorithm 1).
  """
  norm = global_norm(updates)

  def clip(leaf: jax.Array) -> jax.Array:
    # The order of optax.clip_by_global_norm: divide, then multiply, so that the updates agree with the chained form.
    scaled = ((leaf / norm.astype(leaf.dtype)) * threshold).astype(leaf.dtype)
    return jnp.where(norm < threshold, leaf, scaled)

  return jax.tree.map(clip, updates)


def add_gradient_clipping(tx: optax.GradientTransformation, threshold: float) -> optax.GradientTransformationExtraArgs:
  """`tx` with gradients clipped first: the updates of `chain(clip_by_global_norm(threshold), tx)`, the state of `tx`.

  A chain would put one more level into the optimizer's state, which pre-training's does not have.

  Args:
    tx: any optax transformation; extra arguments to `update` reach it.
    threshold: largest global norm let through; 0 or less clips nothing.
  """
  tx = optax.with_extra_args_support(tx)
  if threshold <= 0:
    return tx

  def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
    return tx.update(clip_by_global_norm(updates, threshold), state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(tx.init, update)
