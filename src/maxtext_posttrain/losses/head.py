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

    def body(index: jax.Array, gradients: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
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

  def part_of(logits: jax.Array, targets: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    log_probs, log_z, *_ = logit_outputs(logits, targets)
    losses = z_loss_multiplier * jnp.square(log_z) - log_probs
    return jnp.sum(jnp.where(counts, losses, 0.0)), log_z

  @jax.custom_vjp
  def loss(weights: Any, hidden: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    rows = _Compacted.of(mask, chunk)
    ordered, ordered_targets, counts = rows.take(hidden), rows.take(targets), rows.counts()

    def body(index: jax.Array, total: jax.Array) -> jax.Array:
      logits = project(weights, rows.part(ordered, index))
      return total + part_of(logits, rows.part(ordered_targets, index), rows.part(counts, index))[0]

    return rows.loop(body, jnp.float32(0.0))

  def forward(weights: Any, hidden: jax.Array, targets: jax.Array, mask: jax.Array) -> tuple[jax.Array, Any]:
    rows = _Compacted.of(mask, chunk)
    ordered, ordered_targets, counts = rows.take(hidden), rows.take(targets), rows.counts()

    def body(index: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
      total, gradients = carry
      logits, pull = jax.vjp(project, weights, rows.part(ordered, index))
      some_targets, some_counts = rows.part(ordered_targets, index), rows.part(counts, index)
      part, log_z = part_of(logits, some_targets, some_counts)
      ones = some_counts.astype(jnp.float32)
      of_all = ones * (1.0 + 2.0 * z_loss_multiplier * log_z)
      of_logits = _logit_gradients(logits, some_targets, log_z, -ones, of_all)
      return total + part, _accumulate(rows, index, gradients, pull(of_logits))

    total, gradients = rows.loop(body, (jnp.float32(0.0), _zero_gradients(weights, ordered)))
    return total, _finish(rows, weights, hidden, gradients)

  def backward(gradients: tuple[Any, jax.Array], cotangent: jax.Array) -> tuple[Any, jax.Array, None, None]:
    return *jax.tree.map(lambda gradient: (cotangent * gradient).astype(gradient.dtype), gradients), None, None

  loss.defvjp(forward, backward)
  return loss(weights, hidden, targets, mask)


def weighed_sums(
  project: Project,
  weights: Any,
  hidden: jax.Array,
  others: Any,
  mask: jax.Array,
  part: Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any]],
  *,
  chunk: int,
) -> tuple[jax.Array, Any]:
  """The sums over chunks of what `part` says of their logits; where the first is differentiated, the forward pass
  makes the gradients too.

  Differentiate it inside `jax.jit`, not a jitted function around it: `part` may close over values that are traced.

  Args:
    project: as of `token_outputs`.
    weights: the same.
    hidden: [batch, seq, emb].
    others: pytree of arrays [batch, seq, ...] that `part` reads too.
    mask: [batch, seq] bool, the positions that count.
    part: (logits [batch, chunk, vocab], chunk of `others`, mask [batch, chunk]) to (float32 scalar, pytree of such); it
      leaves out what its mask does. What it closes over is not differentiated.
    chunk: positions of each row at a time.

  Returns:
    The sum that is differentiated, in weights and hidden, and those that are not.
  """

  def parts(rows: _Compacted) -> Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]]:
    ordered, counts = jax.tree.map(rows.take, others), rows.counts()

    def of_chunk(weights: Any, hidden: jax.Array, index: jax.Array) -> tuple[jax.Array, Any]:
      some = jax.tree.map(lambda values: rows.part(values, index), ordered)
      return part(project(weights, hidden), some, rows.part(counts, index))

    return of_chunk

  def zeros(rows: _Compacted, ordered: jax.Array) -> Any:
    shapes = jax.eval_shape(parts(rows), weights, rows.part(ordered, jnp.int32(0)), jnp.int32(0))
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

  @jax.custom_vjp
  def sums(weights: Any, hidden: jax.Array) -> tuple[jax.Array, Any]:
    rows = _Compacted.of(mask, chunk)
    ordered, of_chunk = rows.take(hidden), parts(rows)

    def body(index: jax.Array, totals: Any) -> Any:
      return jax.tree.map(jnp.add, totals, of_chunk(weights, rows.part(ordered, index), index))

    return rows.loop(body, zeros(rows, ordered))

  def forward(weights: Any, hidden: jax.Array) -> tuple[tuple[jax.Array, Any], Any]:
    rows = _Compacted.of(mask, chunk)
    ordered, of_chunk = rows.take(hidden), parts(rows)

    def body(index: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
      totals, gradients = carry

      def of_here(weights: Any, hidden: jax.Array) -> tuple[jax.Array, Any]:
        return of_chunk(weights, hidden, index)

      loss, pull, more = jax.vjp(of_here, weights, rows.part(ordered, index), has_aux=True)
      gradients = _accumulate(rows, index, gradients, pull(jnp.ones_like(loss)))
      return jax.tree.map(jnp.add, totals, (loss, more)), gradients

    totals, gradients = rows.loop(body, (zeros(rows, ordered), _zero_gradients(weights, ordered)))
    return totals, _finish(rows, weights, hidden, gradients)

  def backward(gradients: tuple[Any, jax.Array], cotangents: tuple[jax.Array, Any]) -> tuple[Any, jax.Array]:
    return jax.tree.map(lambda gradient: (cotangents[0] * gradient).astype(gradient.dtype), gradients)

  sums.defvjp(forward, backward)
  return sums(weights, hidden)


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
  return jnp.arange(logits.shape[-1]) == targets[..., None]


def _logit_gradients(
  logits: jax.Array, targets: jax.Array, log_z: jax.Array, of_target: jax.Array, of_all: jax.Array
) -> jax.Array:
  """The gradient of Σ of_target · logit of the target + of_all · log Z, in the logits' dtype."""
  probabilities = jnp.exp(logits.astype(jnp.float32) - log_z[..., None])
  gradients = of_all[..., None] * probabilities
  return jnp.where(_is_target(logits, targets), gradients + of_target[..., None], gradients).astype(logits.dtype)


def _zero_gradients(weights: Any, ordered: jax.Array) -> tuple[Any, jax.Array]:
  """The sums over chunks start here: the weights' in float32, the hidden states' in their own dtype."""
  return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), weights), jnp.zeros_like(ordered)


def _accumulate(
  rows: _Compacted, index: jax.Array, gradients: tuple[Any, jax.Array], part: tuple[Any, jax.Array]
) -> tuple[Any, jax.Array]:
  weights = jax.tree.map(lambda total, more: total + more.astype(jnp.float32), gradients[0], part[0])
  return weights, rows.put(index, gradients[1], part[1])


def _finish(
  rows: _Compacted, weights: Any, hidden: jax.Array, gradients: tuple[Any, jax.Array]
) -> tuple[Any, jax.Array]:
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
