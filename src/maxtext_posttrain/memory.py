"""How much memory a run takes on each device, estimated from shapes before anything is compiled or allocated.

What lies there all along is exact: every leaf's share by its sharding. What an update and a rollout add is an estimate
from the model's sizes. It knows MaxText's dense decoders; of a mixture of experts it counts the experts of each token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

GIB = 1 << 30

_QKV = frozenset({"query_proj", "key_proj", "value_proj"})
_PROJECTIONS = frozenset({*_QKV, "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo"})

_KEPT: Mapping[str, frozenset[str]] = {
  "none": frozenset(),  # MaxText recomputes layers under it too
  "full": frozenset(),
  "minimal": _PROJECTIONS,
  "minimal_with_quantization": _PROJECTIONS,
  "minimal_with_context": _PROJECTIONS | {"context"},
  "minimal_flash": _PROJECTIONS | {"context"},
  "minimal_with_context_and_quantization": _PROJECTIONS | {"context"},
  "save_dot_with_context_except_mlp": _QKV | {"context", "out_proj"},
  "save_dot_except_mlpwi": _QKV | {"out_proj", "mlpwo"},
  "save_dot_except_mlp": _QKV | {"out_proj"},
  "save_qkv_proj": _QKV,
  "save_out_proj": frozenset({"out_proj"}),
  "qkv_proj_offloaded": frozenset(),
  "minimal_offloaded": frozenset(),
}
"""What MaxText's remat policies keep of a layer on the device beside its input, by the names its layers give."""


@dataclasses.dataclass(frozen=True)
class Decoder:
  """The sizes of a decoder that its activations follow from.

  Attributes:
    layers: how many.
    emb: width of the residual stream.
    heads: of queries.
    kv_heads: of keys and values.
    head_dim: of each head.
    mlp: width of the feed-forward layer; with experts, of all that one token goes through.
    vocab: of the logits.
    itemsize: bytes of an activation.
    remat_policy: MaxText's.
    kept: what `remat_policy=custom` keeps on the device beside a layer's input, by MaxText's names.
    scores: attention holds its scores, [heads, length] of each token (`attention=dot_product`).
  """

  layers: int
  emb: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp: int
  vocab: int
  itemsize: int
  remat_policy: str = "full"
  kept: frozenset[str] = frozenset()
  scores: bool = False

  @property
  def widths(self) -> dict[str, int]:
    """Numbers of a token in what a layer's projections give, by MaxText's names."""
    queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
    return {
      "query_proj": queries,
      "key_proj": keys,
      "value_proj": keys,
      "context": queries,
      "out_proj": self.emb,
      "mlpwi_0": self.mlp,
      "mlpwi_1": self.mlp,
      "mlpwo": self.emb,
    }


@dataclasses.dataclass(frozen=True)
class Share:
  """What one device computes of a micro-batch, or of a rollout.

  Attributes:
    tokens: positions; in a rollout, sequences.
    length: of a sequence; in a rollout, columns of the cache.
    logits: positions whose logits are held at once.
    tensor: devices that share heads, feed-forward and vocabulary.
  """

  tokens: int
  length: int
  logits: int
  tensor: int = 1


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
  """Bytes of one device, by what they are for.

  Attributes:
    held: from the first step to the last.
    update: on top of that while an update is made.
    rollout: on top of that while completions are written; empty where none are.
  """

  held: Mapping[str, int]
  update: Mapping[str, int]
  rollout: Mapping[str, int] = dataclasses.field(default_factory=dict)

  @property
  def total(self) -> int:
    """At the worst moment."""
    return sum(self.held.values()) + max(sum(self.update.values()), sum(self.rollout.values()))

  @property
  def worst(self) -> Mapping[str, int]:
    """The parts of the worst moment."""
    in_rollout = sum(self.rollout.values()) > sum(self.update.values())
    return {**self.held, **(self.rollout if in_rollout else self.update)}


def device_bytes(tree: Any) -> int:
  """Bytes of a tree on one device: arrays or `jax.ShapeDtypeStruct`s, each by its sharding; without one, whole."""
  total = 0
  for leaf in jax.tree.leaves(tree):
    sharding = getattr(leaf, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    total += math.prod(shape) * leaf.dtype.itemsize
  return total


def saved_bytes(model: Decoder, share: Share) -> int:
  """What the forward pass keeps of all layers for the backward pass."""
  kept = model.kept if model.remat_policy == "custom" else _KEPT[model.remat_policy]
  widths = model.widths
  split = sum(width for name, width in widths.items() if name in kept and name not in ("out_proj", "mlpwo"))
  whole = model.emb + sum(widths[name] for name in ("out_proj", "mlpwo") if name in kept)
  return model.layers * share.tokens * (whole + split // share.tensor) * model.itemsize


def layer_bytes(model: Decoder, share: Share) -> int:
  """What the backward pass of one layer works with: the forward pass again, and gradients of what is widest."""
  split = (model.heads * model.head_dim + 3 * model.mlp) // share.tensor
  gradients = share.tokens * (2 * model.emb + split) * model.itemsize
  if model.scores:
    gradients += _scores(model, share)
  return _layer_forward(model, share) + gradients


def forward_bytes(model: Decoder, share: Share) -> int:
  """What a forward pass without a gradient works with, its logits left out."""
  return _layer_forward(model, share)


def _layer_forward(model: Decoder, share: Share) -> int:
  """A layer's intermediates: two normalised inputs, in float32 too; projections, rotated; the feed-forward's three."""
  queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
  split = (3 * queries + 3 * keys + 3 * model.mlp) // share.tensor
  bytes_of_token = (5 * model.emb + split) * model.itemsize + 2 * model.emb * 4
  return share.tokens * bytes_of_token + (2 * _scores(model, share) if model.scores else 0)


def _scores(model: Decoder, share: Share) -> int:
  return share.tokens * (model.heads // min(share.tensor, model.heads)) * share.length * 4


def logit_bytes(model: Decoder, share: Share, *, gradient: bool = True) -> int:
  """Logits as the head gives them and in float32; their gradient in float32; and the head's input with its own."""
  logits = share.logits * (model.vocab // share.tensor) * (model.itemsize + (8 if gradient else 4))
  return logits + share.tokens * model.emb * (model.itemsize + (4 if gradient else 0))


def gathered_bytes(params: Any, model: Decoder, *, tensor: int = 1) -> int:
  """Weights that are spread over devices and gathered where they are used: two layers, and the widest table.

  A layer is gathered while the one before works, and its gradient is whole until it is shared out again; the table's
  gradient is in float32.

  Args:
    params: abstract parameters with their shardings.
    model: its sizes.
    tensor: devices of which each works on a part of every weight.
  """
  layers, tables = 0, [0]
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or sharding.shard_shape(leaf.shape) == tuple(leaf.shape):
      continue
    if any("layer" in str(getattr(key, "key", key)) for key in path):
      layers += math.prod(leaf.shape)
    else:
      tables.append(math.prod(leaf.shape))
  return 3 * layers // model.layers // tensor * model.itemsize + max(tables) // tensor * (model.itemsize + 4)


def cache_bytes(model: Decoder, share: Share) -> int:
  """Keys and values of all layers, for `share.tokens` sequences of `share.length` columns."""
  heads = model.kv_heads // min(share.tensor, model.kv_heads)
  return model.layers * 2 * share.tokens * share.length * heads * model.head_dim * model.itemsize


_USABLE: Mapping[str, float] = {"TPU v5 lite": 15.75, "TPU v5e": 15.75, "TPU v6 lite": 31.25, "TPU v6e": 31.25}
"""GiB that a program may use, by the start of JAX's `device_kind`; XLA keeps the rest of a chip's memory."""


def device_memory(device: Any) -> int | None:
  """Bytes that a program may use on one of `jax.devices()`, as it says itself or by its kind; None where neither tells.

  A CPU's is None: it is not set aside for a program.
  """
  if device.platform == "cpu":
    return None
  stats = device.memory_stats() or {}
  if "bytes_limit" in stats:
    return int(stats["bytes_limit"])
  known = [size for kind, size in _USABLE.items() if device.device_kind.startswith(kind)]
  return int(known[0] * GIB) if known else None
