"""Small NNX models for layout tests: with rngs, with a module truly named `base`, behind the adapter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Leaf(nnx.Module):
  def __init__(self, rngs: nnx.Rngs, width: int = 3):
    self.linear = nnx.Linear(width, width, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.dropout(self.linear(x), deterministic=True)


class Plain(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.first = Leaf(rngs)
    self.second = Leaf(rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.second(self.first(x))


class OnlyBase(nnx.Module):
  """Its one child is truly named `base`, and so is that child's."""

  def __init__(self, rngs: nnx.Rngs):
    self.base = Inner(rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.base(x)


class Inner(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.base = Leaf(rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.base(x)


class BaseWithSiblings(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.base = Leaf(rngs)
    self.head = Leaf(rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.head(self.base(x))


class TunixMaxTextAdapter(nnx.Module):
  """Has the name and the one child of MaxText's adapter, which itself takes only models of a known name."""

  def __init__(self, base: nnx.Module):
    self.base = base

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.base(x)


MODELS: dict[str, Any] = {"plain": Plain, "only_base": OnlyBase, "base_with_siblings": BaseWithSiblings}


def schedule(step: Any) -> Any:
  return 1e-2 * 0.9**step


OPTIMIZERS: dict[str, Any] = {
  "adamw": lambda: optax.adamw(schedule),
  "sgd": lambda: optax.sgd(schedule),
  "muon": lambda: optax.contrib.muon(schedule),
}

WRAPPERS: dict[str, Any] = {
  "bare": lambda name: OPTIMIZERS[name](),
  "clipped": lambda name: optax.chain(optax.clip_by_global_norm(0.5), OPTIMIZERS[name]()),
  "accumulated": lambda name: optax.MultiSteps(OPTIMIZERS[name](), 2),
  "clipped_accumulated": lambda name: optax.MultiSteps(
    optax.chain(optax.clip_by_global_norm(0.5), OPTIMIZERS[name]()), 2
  ),
}


def train(model: nnx.Module, optimizer: nnx.Optimizer, updates: int, *, seed: int = 0) -> None:
  """`updates` calls of `optimizer.update` on random inputs."""
  rng = np.random.default_rng(seed)
  for _ in range(updates):
    x = jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)
    grads = nnx.grad(lambda model, x=x: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, grads)


def leaves(*nodes: nnx.Module) -> list[tuple[str, np.ndarray]]:
  """Every leaf of the nodes' states by path, rng keys as their words."""
  found = []
  for node in nodes:
    for path, variable in nnx.to_flat_state(nnx.state(node)):
      value = variable.get_value()
      if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
      found.append(("/".join(map(str, path)), np.asarray(value)))
  return found


def assert_same_leaves(have: list[tuple[str, np.ndarray]], want: list[tuple[str, np.ndarray]]) -> None:
  assert [name for name, _ in have] == [name for name, _ in want]
  for (name, left), (_, right) in zip(have, want, strict=True):
    np.testing.assert_array_equal(left, right, err_msg=name)
