"""What losses read of a model for a batch, the head applied where a token counts and a chunk at a time where that pays.

On one device all rows are one, and the head covers the positions that count, a chunk at a time. On several, rows stay
where they are, and the head is applied at once as in pre-training, or in MaxText's `num_vocab_tiling` chunks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.losses import head
from maxtext_posttrain.losses.head import TokenOutputs
from maxtext_posttrain.losses.sft import sft_loss_sum
from maxtext_posttrain.maxtext_api import MaxTextConfig
from maxtext_posttrain.performance import head_chunk
from maxtext_posttrain.trainers.objective import Batch


def token_outputs(
  config: MaxTextConfig,
  model: nnx.Module,
  batch: Batch,
  *,
  is_train: bool,
  with_correct: bool = False,
  with_entropy: bool = False,
  temperature: float = 1.0,
) -> TokenOutputs:
  """What a loss reads of each trained target: its log-probability, log Z and more; [batch, seq] each.

  Trained are the positions where `targets_segmentation` is not 0; elsewhere stand 0 and False.

  Args:
    config: the model's.
    model: a MaxText model.
    batch: BATCH_KEYS, each [batch, seq].
    is_train: as `maxtext_api.forward` takes it.
    with_correct: whether to say if the target is the most probable token.
    with_entropy: whether to say the entropy.
    temperature: logits are divided by it.
  """
  mask = batch["targets_segmentation"] != 0
  targets = jnp.where(mask, batch["targets"], 0)
  split = _split(config, model, mask.shape)
  if split is None:
    # Masked positions must not reach the gradient even where their logits are not finite.
    logits = _tempered(maxtext_api.forward(config, model, batch, is_train=is_train), temperature)
    logits = jnp.where(mask[..., None], logits, 0.0)
    outputs = head.logit_outputs(logits, targets, with_correct=with_correct, with_entropy=with_entropy)
    return TokenOutputs(*(jnp.where(mask, values, 0) for values in outputs))
  project, *arguments = split.arguments(config, model, batch, is_train=is_train)
  outputs = head.token_outputs(
    lambda weights, hidden: _tempered(project(weights, hidden), temperature),
    *arguments,
    chunk=split.chunk,
    with_correct=with_correct,
    with_entropy=with_entropy,
  )
  return TokenOutputs(*(values.reshape(mask.shape) for values in outputs))


def _tempered(logits: jax.Array, temperature: float) -> jax.Array:
  """Logits over the temperature, in float32 where that is not 1."""
  return logits if temperature == 1.0 else logits.astype(jnp.float32) / temperature


def nll_sum(config: MaxTextConfig, model: nnx.Module, batch: Batch, *, is_train: bool) -> jax.Array:
  """Negative log-likelihood summed over the trained tokens, with MaxText's z-loss where it is on; a float32 scalar.

  Cheaper to differentiate than `token_outputs`, for a loss that is this sum.

  Args:
    config: the model's.
    model: a MaxText model.
    batch: BATCH_KEYS, each [batch, seq].
    is_train: as `maxtext_api.forward` takes it.
  """
  mask = batch["targets_segmentation"] != 0
  split = _split(config, model, mask.shape)
  if split is None:
    logits = maxtext_api.forward(config, model, batch, is_train=is_train)
    return sft_loss_sum(logits, batch["targets"], mask, z_loss_multiplier=config.z_loss_multiplier)
  arguments = split.arguments(config, model, batch, is_train=is_train)
  return head.nll_sum(*arguments, chunk=split.chunk, z_loss_multiplier=config.z_loss_multiplier)


def logit_sums(
  config: MaxTextConfig,
  model: nnx.Module,
  batch: Batch,
  others: Any,
  part: Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any]],
  *,
  is_train: bool,
) -> tuple[jax.Array, Any]:
  """What `part` says of the logits of the trained positions, summed; see `losses.head.logit_sums`.

  Args:
    config: the model's.
    model: the live one.
    batch: BATCH_KEYS, each [batch, seq].
    others: pytree of arrays [batch, seq, ...] that `part` reads beside the logits.
    part: (logits [rows, positions, vocab], the same positions of `others`, mask [rows, positions]) to the loss and a
      pytree of other sums. It leaves out what the mask does.
    is_train: as `maxtext_api.forward` takes it.

  Returns:
    Float32 scalars: the loss, and the pytree of other sums.
  """
  mask = batch["targets_segmentation"] != 0
  split = _split(config, model, mask.shape)
  if split is None:
    return part(maxtext_api.forward(config, model, batch, is_train=is_train), others, mask)
  project, weights, hidden, _, mask = split.arguments(config, model, batch, is_train=is_train)
  others = jax.tree.map(lambda values: values.reshape(*split.rows, *values.shape[2:]), others)
  return head.logit_sums(project, weights, hidden, others, mask, part, chunk=split.chunk)


def unprojected(
  config: MaxTextConfig, model: nnx.Module, batch: Batch
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
  """A frozen model's logits, the head left for later where that can be.

  Args:
    config: the model's.
    model: a MaxText model.
    batch: BATCH_KEYS, each [batch, seq].

  Returns:
    Hidden states [batch, seq, emb], or logits [batch, seq, vocab] where the head can't wait; and what makes logits
    [rows, positions, vocab] of some of their positions [rows, positions, ...].
  """
  if _split(config, model, batch["inputs"].shape) is None:
    return maxtext_api.forward(config, model, batch, is_train=False), lambda logits: logits
  hidden = maxtext_api.hidden_states(config, model, batch, is_train=False)
  output_head = maxtext_api.output_head(config, model)
  return hidden, functools.partial(output_head.project, output_head.weights)


def logit_positions(config: MaxTextConfig, model: nnx.Module, shape: tuple[int, int]) -> int:
  """Positions of a batch [batch, seq] of this shape, on all devices together, whose logits a loss holds at once."""
  split = _split(config, model, shape)
  return shape[0] * shape[1] if split is None else split.rows[0] * split.chunk


@dataclasses.dataclass(frozen=True)
class _Split:
  """How the head is applied.

  Attributes:
    rows: that arrays are reshaped to, [rows, positions].
    chunk: positions of each row at a time.
  """

  rows: tuple[int, int]
  chunk: int

  def arguments(self, config: MaxTextConfig, model: nnx.Module, batch: Batch, *, is_train: bool) -> tuple[Any, ...]:
    """(project, weights, hidden, targets, mask) as `losses.head` takes them."""
    hidden = maxtext_api.hidden_states(config, model, batch, is_train=is_train)
    output_head = maxtext_api.output_head(config, model)
    targets, mask = batch["targets"].reshape(self.rows), (batch["targets_segmentation"] != 0).reshape(self.rows)
    return output_head.project, output_head.weights, hidden.reshape(*self.rows, -1), targets, mask


def _split(config: MaxTextConfig, model: nnx.Module, shape: tuple[int, ...]) -> _Split | None:
  """None where the head is applied to all positions at once."""
  if not maxtext_api.can_split_head(config, model):
    return None
  parts: Any = model
  devices = parts.mesh.devices
  rows = (1, shape[0] * shape[1]) if devices.size == 1 else (shape[0], shape[1])
  if config.num_vocab_tiling > 1:
    return _Split(rows, -(-rows[1] // config.num_vocab_tiling))
  if devices.size > 1:
    return None
  return _Split(rows, min(rows[1], head_chunk(devices.flat[0].platform)))
