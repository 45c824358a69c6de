"""Choosing tokens from logits, as pure functions that compile once for every temperature, top-k and top-p."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_BLOCK = 128
_KEY_IMPL = "threefry2x32"


def request_key(seed: int) -> np.ndarray:
  """The words of a seed's key, [2] uint32; made on the host, so that a new seed compiles nothing."""
  return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def sequence_keys(words: jax.Array, prompt: jax.Array, sample: jax.Array) -> jax.Array:
  """A key for each sequence, from the seed's words [2], and the numbers of its prompt and sample, [batch] int32 each.

  Threefry whatever the default implementation is: pre-training's `unsafe_rbg` draws by the place in the batch.
  """
  key = jax.random.wrap_key_data(words, impl=_KEY_IMPL)
  fold = jax.vmap(jax.random.fold_in)
  return fold(fold(jnp.broadcast_to(key, prompt.shape), prompt), sample)


def uniforms(keys: jax.Array, steps: int) -> jax.Array:
  """Numbers in [0, 1) for each of `keys` [batch] and step, whatever the number of steps; [steps, batch] float32."""
  draw = jax.vmap(lambda key, step: jax.random.uniform(jax.random.fold_in(key, step)), in_axes=(0, None))
  return jax.vmap(draw, in_axes=(None, 0))(keys, jnp.arange(steps))


def choose(
  logits: jax.Array, draws: jax.Array, *, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array
) -> jax.Array:
  """A token for each row: the most probable at temperature 0, else a sample.

  Args:
    logits: [batch, vocab] float32.
    draws: [batch] float32 in [0, 1).
    temperature: scalar float32.
    top_k: scalar int32; 0 is all.
    top_p: scalar float32; 1 is all.

  Returns:
    [batch] int32.
  """
  vocab = logits.shape[-1]
  filtered = ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0)
  branch = jnp.where(temperature == 0.0, 0, jnp.where(filtered, 2, 1))

  def greedy() -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)

  def weights() -> jax.Array:
    scaled = logits / temperature
    return jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True))

  def plain() -> jax.Array:
    return _draw(weights(), draws)

  def truncated() -> jax.Array:
    return _draw(_truncate(weights(), top_k, top_p), draws)

  return jax.lax.switch(branch, (greedy, plain, truncated))


def _truncate(weights: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
  """Weights [batch, vocab] from 0 to 1, with zeros where top-k, then top-p, drop the token."""
  vocab = weights.shape[-1]
  count = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab).astype(jnp.float32)
  # Floats from 0 on sort as their bits do.
  ranks = jax.lax.bitcast_convert_type(weights, jnp.int32)
  kept = jnp.where(ranks >= _threshold(ranks, jnp.ones_like(weights), count)[:, None], weights, 0.0)
  mass = jnp.sum(kept, axis=-1)
  return jnp.where(ranks >= _threshold(ranks, kept, top_p * mass)[:, None], kept, 0.0)


def _threshold(ranks: jax.Array, amounts: jax.Array, target: jax.Array) -> jax.Array:
  """The largest rank such that the amounts at it and above reach the target; 0 where even all do not; [batch] int32.

  By bisection over the rank's bits: an exact answer without a sort.
  """
  target = jnp.broadcast_to(target, ranks.shape[:1])
  top = jnp.max(ranks, axis=-1)

  def narrow(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    low, high = bounds
    middle = low + (high - low + 1) // 2
    reached = jnp.sum(jnp.where(ranks >= middle[:, None], amounts, 0.0), axis=-1) >= target
    return jnp.where(reached, middle, low), jnp.where(reached, high, middle - 1)

  def unsettled(bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
    return jnp.any(bounds[0] < bounds[1])

  return jax.lax.while_loop(unsettled, narrow, (jnp.zeros_like(top), top))[0]


def _draw(weights: jax.Array, draws: jax.Array) -> jax.Array:
  """Inverts the cumulative weights [batch, vocab] at draws [batch]: first to a block of tokens, then inside it.

  Never a token of weight 0, whatever the sums round to.
  """
  batch, vocab = weights.shape
  blocks = jnp.pad(weights, ((0, 0), (0, -vocab % _BLOCK))).reshape(batch, -1, _BLOCK)
  sums = jnp.sum(blocks, axis=-1)
  target = draws * jnp.sum(sums, axis=-1)
  block, before = _first_above(sums, target)
  inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  token, _ = _first_above(inside, target - before)
  return block * _BLOCK + token


def _first_above(amounts: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The first positive amount at which the running sum exceeds the target, else the last; and the sum before it."""
  sums = jnp.cumsum(amounts, axis=-1)
  positive = amounts > 0
  above = positive & (sums > target[:, None])
  last = amounts.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
  index = jnp.where(jnp.any(above, axis=-1), jnp.argmax(above, axis=-1), last).astype(jnp.int32)
  taken = jnp.take_along_axis(sums - amounts, index[:, None], axis=-1)[:, 0]
  return index, taken
