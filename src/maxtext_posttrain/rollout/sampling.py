"""Choosing tokens from logits, as pure functions that compile once for every temperature, top-k and top-p."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_BLOCK = 128
_SUM_PRECISION = 1e-5
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
  batch, vocab = weights.shape
  # Floats from 0 on sort as their bits do.
  ranks = jax.lax.bitcast_convert_type(weights, jnp.int32)
  everything = jnp.zeros(batch, jnp.int32)

  def most_probable() -> jax.Array:
    return _threshold(ranks, None, top_k, everything)

  low = jax.lax.cond((top_k > 0) & (top_k < vocab), most_probable, lambda: everything)
  kept = jnp.where(ranks >= low[:, None], weights, 0.0)

  def nucleus() -> jax.Array:
    return _threshold(ranks, kept, top_p * jnp.sum(kept, axis=-1), low)

  return jnp.where(ranks >= jax.lax.cond(top_p < 1.0, nucleus, lambda: low)[:, None], kept, 0.0)


def _threshold(ranks: jax.Array, amounts: jax.Array | None, target: jax.Array, low: jax.Array) -> jax.Array:
  """A rank such that the amounts at it and above reach the target, and without its lowest tokens do not.

  By bisection over the rank's bits, until one token is left to decide on: an exact answer without a sort.

  Args:
    ranks: [batch, vocab] int32, the bits of the weights.
    amounts: [batch, vocab] float32, weights, zero where they do not count; None counts tokens.
    target: scalar or [batch].
    low: [batch] int32, the smallest rank that is looked at; it is the answer where all amounts do not reach the target.

  Returns:
    [batch] int32.
  """
  target = jnp.broadcast_to(target, low.shape)

  def from_rank(rank: jax.Array) -> jax.Array:
    inside = ranks >= rank[:, None]
    if amounts is None:
      return jnp.sum(inside, axis=-1, dtype=jnp.int32)
    return jnp.sum(jnp.where(inside, amounts, 0.0), axis=-1)

  def narrow(state: _Bisection) -> _Bisection:
    middle = state.low + (state.high - state.low + 1) // 2
    amount = from_rank(middle)
    reached = amount >= target
    return _Bisection(
      low=jnp.where(reached, middle, state.low),
      high=jnp.where(reached, state.high, middle - 1),
      from_low=jnp.where(reached, amount, state.from_low),
      above_high=jnp.where(reached, state.above_high, amount),
    )

  def unsettled(state: _Bisection) -> jax.Array:
    between = state.from_low - state.above_high
    if amounts is None:
      several = between > 1
    else:
      # Each token between weighs at least this; sums are not told apart below their rounding.
      least = jax.lax.bitcast_convert_type(state.low, jnp.float32)
      several = (between > 1.5 * least) | (least < _SUM_PRECISION * whole)
    return jnp.any((state.low < state.high) & several)

  whole = from_rank(low)
  start = _Bisection(low, jnp.max(ranks, axis=-1), whole, jnp.zeros_like(whole))
  return jax.lax.while_loop(unsettled, narrow, start).low


class _Bisection(NamedTuple):
  """The ranks, [batch], between which the threshold lies, and the amounts from the lower on and above the higher."""

  low: jax.Array
  high: jax.Array
  from_low: jax.Array
  above_high: jax.Array


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
