"""A model's weights by both names: pure functions between HuggingFace's tensors and MaxText's parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from maxtext_posttrain.models.families import HEAD, Family, Rule

_CHUNK_ELEMENTS = 1 << 22


@dataclasses.dataclass(frozen=True)
class Dimensions:
  """What a model's weights are shaped by.

  Attributes:
    layers: decoder layers, as HuggingFace counts them.
    emb: width of the residual stream.
    mlp: width of the feed-forward layer.
    heads: query heads.
    kv_heads: key and value heads.
    head: width of one head.
    vocab: rows of the embedding table.
    tied: the head is the embedding table.
    neighbours: rotary pairs are neighbours on MaxText's side (`rope_type: llama3.1`).
    query_scale: what attention scores are multiplied by; held in the query kernel by the families that say so.
  """

  layers: int
  emb: int
  mlp: int
  heads: int
  kv_heads: int
  head: int
  vocab: int
  tied: bool
  neighbours: bool
  query_scale: float

  def heads_of(self, rule: Rule) -> int:
    """Heads of a rule's weight."""
    return self.kv_heads if rule.form.startswith("kv_") else self.heads


@dataclasses.dataclass(frozen=True)
class Weight:
  """One HuggingFace tensor and its place in MaxText's tree.

  Attributes:
    name: HuggingFace's name.
    gguf_name: GGUF's.
    shape: HuggingFace's shape.
    path: of MaxText's parameter, below `params/params`.
    inner_shape: MaxText's shape of this one weight, without the axis that layers are stacked along.
    index: its position along that axis; None where it is not stacked.
    stacked: length of that axis.
    rule: how it is transformed.
  """

  name: str
  gguf_name: str
  shape: tuple[int, ...]
  path: tuple[str, ...]
  inner_shape: tuple[int, ...]
  index: int | None
  stacked: int
  rule: Rule

  def parameter_shape(self, scan_axis: int) -> tuple[int, ...]:
    """MaxText's shape of the whole parameter."""
    if self.index is None:
      return self.inner_shape
    axis = min(scan_axis, len(self.inner_shape))
    return (*self.inner_shape[:axis], self.stacked, *self.inner_shape[axis:])

  def slot(self, scan_axis: int) -> tuple[Any, ...]:
    """Where in the parameter this weight lies."""
    if self.index is None:
      return (...,)
    return (*(slice(None),) * min(scan_axis, len(self.inner_shape)), self.index)


def list_weights(family: Family, dimensions: Dimensions, *, scan_layers: bool) -> list[Weight]:
  """Every weight of a model: the weights outside layers, then layer by layer."""
  rules = [rule for rule in family.rules if not (dimensions.tied and rule.huggingface == HEAD)]
  weights = [_weight(rule, rule.maxtext, dimensions) for rule in rules if not rule.in_layer]
  for layer in range(dimensions.layers):
    base, kind, index, stacked = _layer_place(family, dimensions.layers, layer, scan_layers)
    for rule in rules:
      if rule.in_layer:
        path = f"decoder/{base}/{rule.maxtext.format(kind=kind)}"
        weights.append(_weight(rule, path, dimensions, layer, index, stacked))
  return weights


def _weight(
  rule: Rule, path: str, dimensions: Dimensions, layer: int = 0, index: int | None = None, stacked: int = 1
) -> Weight:
  shape, inner_shape = _shapes(rule, dimensions)
  gguf_name = rule.gguf.format(layer=layer)
  return Weight(
    name=rule.huggingface.format(layer=layer),
    gguf_name=gguf_name if gguf_name.endswith(".bias") else f"{gguf_name}.weight",
    shape=shape,
    path=tuple(path.split("/")),
    inner_shape=inner_shape,
    index=index,
    stacked=stacked,
    rule=rule,
  )


def _layer_place(family: Family, layers: int, layer: int, scan_layers: bool) -> tuple[str, str, int | None, int]:
  """A layer's module below `decoder`, its kind, its index in the stack and the stack's length."""
  length = len(family.kinds)
  block, within = divmod(layer, length)
  blocks = layers // length
  kind = family.kinds[within]
  if not scan_layers:
    return f"layers_{layer if family.nested else block}", kind, None, 1
  if not family.nested:
    return "layers", kind, block, blocks
  if block < blocks:
    return f"layers/layers_{within}", kind, block, blocks
  return f"layers_remainder/layers_{within}", kind, None, 1


def _shapes(rule: Rule, dimensions: Dimensions) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """HuggingFace's shape and MaxText's of one weight."""
  heads, head, emb = dimensions.heads_of(rule), dimensions.head, dimensions.emb
  size = tuple(getattr(dimensions, name) for name in rule.size)
  match rule.form:
    case "heads_in" | "kv_heads_in":
      return (heads * head, emb), (emb, heads, head)
    case "heads_bias" | "kv_heads_bias":
      return (heads * head,), (heads, head)
    case "heads_out":
      return (emb, heads * head), (heads, head, emb)
    case "linear":
      return size, size[::-1]
    case _:
      return size, size


def to_maxtext(weight: Weight, tensor: np.ndarray, dimensions: Dimensions, dtype: np.dtype) -> np.ndarray:
  """HuggingFace's tensor as MaxText holds it; shape `weight.inner_shape`, type `dtype`, possibly a view of `tensor`."""
  rule = weight.rule
  if rule.offset:
    tensor = (tensor.astype(np.float64) + rule.offset).astype(dtype)
  tensor = _multiplied(tensor, scale_factor(rule, dimensions), dtype)
  match rule.form:
    case "heads_in" | "kv_heads_in":
      tensor = tensor.T.reshape(weight.inner_shape)
    case "heads_bias" | "kv_heads_bias":
      tensor = tensor.reshape(weight.inner_shape)
    case "heads_out" | "linear":
      tensor = tensor.T.reshape(weight.inner_shape)
  if rule.rotary and dimensions.neighbours:
    halves = tensor.reshape(*tensor.shape[:-1], 2, -1)
    tensor = np.swapaxes(halves, -1, -2).reshape(tensor.shape)
  return tensor


def to_huggingface(weight: Weight, array: np.ndarray, dimensions: Dimensions, dtype: np.dtype) -> np.ndarray:
  """The inverse of `to_maxtext`: contiguous, shape `weight.shape`, type `dtype`."""
  rule = weight.rule
  if rule.rotary and dimensions.neighbours:
    pairs = array.reshape(*array.shape[:-1], -1, 2)
    array = np.swapaxes(pairs, -1, -2).reshape(array.shape)
  match rule.form:
    case "heads_in" | "kv_heads_in":
      array = array.reshape(dimensions.emb, -1).T
    case "heads_bias" | "kv_heads_bias":
      array = array.reshape(-1)
    case "heads_out" | "linear":
      array = array.reshape(-1, array.shape[-1]).T
  array = _multiplied(array, scale_factor(rule, dimensions), dtype, divide=True)
  if rule.offset:
    array = (array.astype(np.float64) - rule.offset).astype(dtype)
  return np.ascontiguousarray(array)


def scale_factor(rule: Rule, dimensions: Dimensions) -> float:
  """What MaxText's weight is multiplied by, against HuggingFace's."""
  if rule.scale == "query":
    return dimensions.query_scale
  return math.sqrt(dimensions.emb) if rule.scale == "embedding" else 1.0


def _multiplied(array: np.ndarray, factor: float, dtype: np.dtype, *, divide: bool = False) -> np.ndarray:
  """`array` times (or over) `factor`, rounded once, to `dtype`.

  Exact both ways where the factor is a power of two, and also where the source was bfloat16 and MaxText's weight is
  float32. A float32 source comes back within one unit in the last place otherwise: the scaled values' grid is coarser
  than the source's in parts, so that no order of operations can bring every value back.
  """
  if factor == 1.0:
    return array if array.dtype == dtype else array.astype(dtype)
  result = np.empty(array.shape, dtype)
  if not array.size:
    return result
  rows = max(1, _CHUNK_ELEMENTS * array.shape[0] // array.size)
  operation = np.divide if divide else np.multiply
  for start in range(0, array.shape[0], rows):
    result[start : start + rows] = operation(array[start : start + rows].astype(np.float64), factor).astype(dtype)
  return result


def huggingface_tensors(
  parameters: Mapping[tuple[str, ...], Any],
  family: Family,
  dimensions: Dimensions,
  *,
  scan_layers: bool,
  scan_axis: int = 1,
  dtype: np.dtype | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
  """A MaxText model's weights under HuggingFace's names, one at a time.

  Args:
    parameters: MaxText's arrays (numpy's or JAX's) by path below `params/params`, for example
      `("decoder", "layers", "mlp", "wo", "kernel")`.
    family: whose table applies.
    dimensions: the model's.
    scan_layers: layers are stacked along `scan_axis`.
    scan_axis: MaxText's `param_scan_axis`.
    dtype: of what is yielded; each parameter's own if left out.

  Yields:
    HuggingFace's name and the tensor; weights outside layers first, then layer by layer. The head of a tied model is
    not among them.

  Raises:
    KeyError: a parameter is missing.
  """
  for weight in list_weights(family, dimensions, scan_layers=scan_layers):
    parameter = parameters[weight.path]
    array = np.asarray(parameter[weight.slot(scan_axis)])
    yield weight.name, to_huggingface(weight, array, dimensions, np.dtype(dtype or array.dtype))
