"""What a loss reads of the output head, without ever holding the logits of all positions.

The logits of a batch, [batch, seq, vocab] in float32, are the largest array of a training step, and most losses want
three numbers of each position from them, at masked positions only. Here the positions that count are moved to the
front, and the head is applied to one chunk of them after the other, as many as there are: work follows the number of
positions that count, shapes stay static, and memory holds one chunk's logits.

`token_outputs` recomputes a chunk's logits for the gradient. `nll_sum` knows already in the forward pass what the
gradient will be and needs no second product; it is only differentiated where its value is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Project = Callable[[Any, jax.Array], jax.Array]
"""(weights, hidden [..., emb]) to logits [..., vocab]; pure, each position by itself."""

Sums = tuple[jax.Array, Any]
"""A loss, a float32 scalar, and a pytree of other such scalars, each summed over positions."""

Gradients = tuple[Any, jax.Array]
"""Of the head's weights, a pytree, and of hidden [batch, positions, emb]."""


class TokenOutputs(NamedTuple):
  """Of each position; 0 and False where the mask is.

  Attributes:
    log_probs: [batch, seq] float32, log-probability of the target.
    log_z: [batch, seq] float32, logsumexp over the vocabulary.
    correct: [batch, seq] bool, whether the target is the most probable token; all False unless it was asked for.
    entropy: [batch, seq] float32, of the distribution, without a gradient; all 0 unless it was asked for.
  """

  log_probs: jax.Array
  log_z: jax.Array
  correct: jax.Array
  entropy: jax.Array


def logit_outputs(
  logits: jax.Array, targets: jax.Array, *, with_correct: bool = False, with_entropy: bool = False
) -> TokenOutputs:
  """From logits [..., vocab] of any float dtype and targets [...] int, everything in float32."""
  logits = logits.astype(jnp.float32)
  log_z = jax.nn.logsumexp(logits, axis=-1)
  # A compare and a sum work where the vocabulary is sharded and, unlike a gather, leave no scatter behind.
  target_logits = jnp.sum(jnp.where(_is_target(logits, targets), logits, 0.0), axis=-1)
  correct = jnp.argmax(logits, axis=-1) == targets if with_correct else jnp.zeros(targets.shape, bool)
  entropy = jnp.zeros(targets.shape)
  if with_entropy:
    fixed, fixed_z = jax.lax.stop_gradient((logits, log_z))
    entropy = fixed_z - jnp.sum(jnp.exp(fixed - fixed_z[..., None]) * fixed, axis=-1)
  return TokenOutputs(target_logits - log_z, log_z, correct, entropy)


def token_outputs(
  project: Project,
  weights: Any,
  hidden: jax.Array,
  targets: jax.Array,
  mask: jax.Array,
  *,
  chunk: int,
  with_correct: bool = False,
  with_entropy: bool = False,
) -> TokenOutputs:
  """What `logit_outputs` gives for `project(weights, hidden)`, chunk by chunk; differentiable in weights and hidden.

  Args:
    project: the head; must not close over values being traced that the gradient would need.
    weights: its float arrays, a pytree.
    hidden: [batch, seq, emb].
    targets: [batch, seq] int.
    mask: [batch, seq] bool, the positions wanted; what stands elsewhere, NaN included, reaches no output and no
      gradient.
    chunk: positions of each row at a time.
    with_correct: whether `correct` is wanted.
    with_entropy: whether `entropy` is wanted.
  """

  @jax.custom_vjp
  def outputs(weights: Any, hidden: jax.Array, targets: jax.Array, mask: jax.Array) -> TokenOutputs:
    return forward(weights, hidden, targets, mask)[0]

  def forward(weights: Any, hidden: jax.Array, targets: jax.Array, mask: jax.Array) -> tuple[TokenOutputs, Any]:
    rows = _Compacted.of(mask, chunk)
    ordered, ordered_targets = rows.take(hidden), rows.take(targets)

    def body(index: jax.Array, found: TokenOutputs) -> TokenOutputs:
      logits = project(weights, rows.part(ordered, index))
      part = logit_outputs(
        logits, rows.part(ordered_targets, index), with_correct=with_correct, with_entropy=with_entropy
      )
      return jax.tree.map(functools.partial(rows.put, index), found, part)

    shape = ordered_targets.shape
    empty = TokenOutputs(jnp.zeros(shape), jnp.zeros(shape), jnp.zeros(shape, bool), jnp.zeros(shape))
    found = TokenOutputs(*map(rows.give_back, rows.loop(body, empty)))
    return found, (weights, hidden, targets, mask, found.log_z)

  def backward(residuals: Any, cotangents: TokenOutputs) -> tuple[Any, jax.Array, None, None]:
    weights, hidden, targets, mask, log_z = residuals
    rows = _Compacted.of(mask, chunk)
    ordered, ordered_targets, ordered_log_z = rows.take(hidden), rows.take(targets), rows.take(log_z)
    of_target = rows.take(cotangents.log_probs)
    of_all = rows.take(cotangents.log_z) - of_target

    def body(index: jax.Array, gradients: Gradients) -> Gradients:
      logits, pull = jax.vjp(project, weights, rows.part(ordered, index))
      of_logits = _logit_gradients(
        logits, *(rows.part(values, index) for values in (ordered_targets, ordered_log_z, of_target, of_all))
      )
      return _accumulate(rows, index, gradients, pull(of_logits))

    return *_finish(rows, weights, hidden, rows.loop(body, _zero_gradients(weights, ordered))), None, None

  outputs.defvjp(forward, backward)
  return outputs(weights, hidden, targets, mask)


def nll_sum(
  project: Project,
  weights: Any,
  hidden: jax.Array,
  targets: jax.Array,
  mask: jax.Array,
  *,
  chunk: int,
  z_loss_multiplier: float = 0.0,
) -> jax.Array:
  """The sum over the masked positions of −log p(target) + z_loss_multiplier · log(Z)², a float32 scalar.

  Arguments as of `token_outputs`. Where it is differentiated, the forward pass makes the gradients too.
  """

  def loss_of(logits: jax.Array, targets: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    log_probs, log_z, *_ = logit_outputs(logits, targets)
    losses = z_loss_multiplier * jnp.square(log_z) - log_probs
    return jnp.sum(jnp.where(counts, losses, 0.0)), log_z

  def value(weights: Any, hidden: jax.Array, targets: jax.Array, counts: jax.Array) -> Sums:
    return loss_of(project(weights, hidden), targets, counts)[0], ()

  def value_and_gradients(
    weights: Any, hidden: jax.Array, targets: jax.Array, counts: jax.Array
  ) -> tuple[Sums, Gradients]:
    logits, pull = jax.vjp(project, weights, hidden)
    loss, log_z = loss_of(logits, targets, counts)
    ones = counts.astype(jnp.float32)
    of_all = ones * (1.0 + 2.0 * z_loss_multiplier * log_z)
    return (loss, ()), pull(_logit_gradients(logits, targets, log_z, -ones, of_all))

  return _sum_chunks(value, value_and_gradients, weights, hidden, targets, mask, chunk=chunk)[0]


def logit_sums(
  project: Project,
  weights: Any,
  hidden: jax.Array,
  others: Any,
  mask: jax.Array,
  part: Callable[[jax.Array, Any, jax.Array], Sums],
  *,
  chunk: int,
) -> Sums:
  """The sums over chunks of what `part` says of their logits; where the first is differentiated, the forward pass
  makes the gradients too.

  Differentiate it inside `jax.jit`, not a jitted function around it: `part` may close over values that are traced.

  Args:
    project: as of `token_outputs`.
    weights: the same.
    hidden: [batch, seq, emb].
    others: pytree of arrays [batch, seq, ...] that `part` reads too; not differentiated.
    mask: [batch, seq] bool, the positions that count.
    part: (logits [batch, chunk, vocab], chunk of `others`, mask [batch, chunk]) to (float32 scalar, pytree of such); it
      leaves out what its mask does. What it closes over is not differentiated.
    chunk: positions of each row at a time.

  Returns:
    The sum that is differentiated, in weights and hidden, and those that are not.
  """

  def value(weights: Any, hidden: jax.Array, others: Any, counts: jax.Array) -> Sums:
    return part(project(weights, hidden), others, counts)

  def value_and_gradients(weights: Any, hidden: jax.Array, others: Any, counts: jax.Array) -> tuple[Sums, Gradients]:
    loss, pull, more = jax.vjp(
      lambda weights, hidden: value(weights, hidden, others, counts), weights, hidden, has_aux=True
    )
    return (loss, more), pull(jnp.ones_like(loss))

  return _sum_chunks(value, value_and_gradients, weights, hidden, others, mask, chunk=chunk)


def _sum_chunks(
  value: Callable[[Any, jax.Array, Any, jax.Array], Sums],
  value_and_gradients: Callable[[Any, jax.Array, Any, jax.Array], tuple[Sums, Gradients]],
  weights: Any,
  hidden: jax.Array,
  others: Any,
  mask: jax.Array,
  *,
  chunk: int,
) -> Sums:
  """The sums over chunks of `value`, whose first has the gradients that `value_and_gradients` says.

  Args:
    value: (weights, hidden [batch, chunk, emb], chunk of `others`, [batch, chunk] bool, which positions count) to sums.
    value_and_gradients: the same, with the gradients of the first sum in weights and hidden beside it.
    weights: pytree of float arrays.
    hidden: [batch, seq, emb].
    others: pytree of arrays [batch, seq, ...].
    mask: [batch, seq] bool.
    chunk: positions of each row at a time.
  """

  def ordered_rows(hidden: jax.Array, others: Any, mask: jax.Array) -> tuple[_Compacted, Any]:
    rows = _Compacted.of(mask, chunk)
    return rows, (rows.take(hidden), jax.tree.map(rows.take, others), rows.counts())

  def parts(rows: _Compacted, ordered: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda values: rows.part(values, index), ordered)

  def zeros(weights: Any, rows: _Compacted, ordered: Any) -> Sums:
    shapes = jax.eval_shape(value, weights, *parts(rows, ordered, jnp.int32(0)))
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

  @jax.custom_vjp
  def sums(weights: Any, hidden: jax.Array, others: Any, mask: jax.Array) -> Sums:
    rows, ordered = ordered_rows(hidden, others, mask)

    def body(index: jax.Array, totals: Sums) -> Sums:
      return jax.tree.map(jnp.add, totals, value(weights, *parts(rows, ordered, index)))

    return rows.loop(body, zeros(weights, rows, ordered))

  def forward(weights: Any, hidden: jax.Array, others: Any, mask: jax.Array) -> tuple[Sums, Gradients]:
    rows, ordered = ordered_rows(hidden, others, mask)

    def body(index: jax.Array, carry: tuple[Sums, Gradients]) -> tuple[Sums, Gradients]:
      totals, gradients = carry
      more, of_chunk = value_and_gradients(weights, *parts(rows, ordered, index))
      return jax.tree.map(jnp.add, totals, more), _accumulate(rows, index, gradients, of_chunk)

    totals, gradients = rows.loop(body, (zeros(weights, rows, ordered), _zero_gradients(weights, ordered[0])))
    return totals, _finish(rows, weights, hidden, gradients)

  def backward(gradients: Gradients, cotangents: Sums) -> tuple[Any, jax.Array, None, None]:
    return *jax.tree.map(lambda gradient: (cotangents[0] * gradient).astype(gradient.dtype), gradients), None, None

  sums.defvjp(forward, backward)
  return sums(weights, hidden, others, mask)


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
  return jnp.arange(logits.shape[-1]) == targets[..., None]


def _logit_gradients(
  logits: jax.Array, targets: jax.Array, log_z: jax.Array, of_target: jax.Array, of_all: jax.Array
) -> jax.Array:
  """The gradient of Σ of_target · logit of the target + of_all · log Z, in the logits' dtype."""
  probabilities = jnp.exp(logits.astype(jnp.float32) - log_z[..., None])
  gradients = of_all[..., None] * probabilities
  return jnp.where(_is_target(logits, targets), gradients + of_target[..., None], gradients).astype(logits.dtype)


def _zero_gradients(weights: Any, ordered: jax.Array) -> Gradients:
  """The sums over chunks start here: the weights' in float32, the hidden states' in their own dtype."""
  return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), weights), jnp.zeros_like(ordered)


def _accumulate(rows: _Compacted, index: jax.Array, gradients: Gradients, part: Gradients) -> Gradients:
  weights = jax.tree.map(lambda total, more: total + more.astype(jnp.float32), gradients[0], part[0])
  return weights, rows.put(index, gradients[1], part[1])


def _finish(rows: _Compacted, weights: Any, hidden: jax.Array, gradients: Gradients) -> Gradients:
  of_weights = jax.tree.map(lambda gradient, leaf: gradient.astype(leaf.dtype), gradients[0], weights)
  return of_weights, rows.give_back(gradients[1]).astype(hidden.dtype)


@dataclasses.dataclass(frozen=True)
class _Compacted:
  """Rows with their masked positions moved to the front, in chunks of columns.

  Attributes:
    mask: [rows, columns] bool.
    order: [rows, chunks · chunk] int32, which column stands at each place; padded with 0.
    place: [rows, columns] int32, at which place each column stands.
    chunk: columns of a chunk.
    filled: int32 scalar, chunks that hold a masked position of any row.
  """

  mask: jax.Array
  order: jax.Array
  place: jax.Array
  chunk: int
  filled: jax.Array

  @classmethod
  def of(cls, mask: jax.Array, chunk: int) -> _Compacted:
    order = jnp.argsort(~mask, axis=1, stable=True)
    padding = -mask.shape[1] % chunk
    return cls(
      mask=mask,
      order=jnp.pad(order, ((0, 0), (0, padding))),
      place=jnp.argsort(order, axis=1),
      chunk=chunk,
      filled=-(-jnp.max(jnp.sum(mask, axis=1)) // chunk),
    )

  def counts(self) -> jax.Array:
    """[rows, chunks · chunk] bool: the first places of each row, as many as it has masked positions."""
    return jnp.arange(self.order.shape[1]) < jnp.sum(self.mask, axis=1, keepdims=True)

  def take(self, values: jax.Array) -> jax.Array:
    """[rows, columns, ...] in order, 0 at places that do not count."""
    trailing = (1,) * (values.ndim - 2)
    ordered = jnp.take_along_axis(values, self.order.reshape(*self.order.shape, *trailing), axis=1)
    return jnp.where(self.counts().reshape(*self.order.shape, *trailing), ordered, 0)

  def give_back(self, ordered: jax.Array) -> jax.Array:
    """The inverse of `take`: [rows, columns, ...], 0 where the mask is not."""
    trailing = (1,) * (ordered.ndim - 2)
    values = jnp.take_along_axis(ordered, self.place.reshape(*self.place.shape, *trailing), axis=1)
    return jnp.where(self.mask.reshape(*self.mask.shape, *trailing), values, 0)

  def part(self, ordered: jax.Array, index: jax.Array) -> jax.Array:
    """Chunk `index` of an array in order."""
    return jax.lax.dynamic_slice_in_dim(ordered, index * self.chunk, self.chunk, axis=1)

  def put(self, index: jax.Array, ordered: jax.Array, part: jax.Array) -> jax.Array:
    """An array in order with chunk `index` replaced."""
    return jax.lax.dynamic_update_slice_in_dim(ordered, part.astype(ordered.dtype), index * self.chunk, axis=1)

  def loop[Carry](self, body: Callable[[jax.Array, Carry], Carry], start: Carry) -> Carry:
    """`body` over the chunks that are filled."""
    return jax.lax.fori_loop(0, self.filled, body, start)
