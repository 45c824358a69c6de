"""Weights as an engine wants them: every layer's apart, also where the model stacks them for a scan."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext_posttrain.errors import GenerationError

Path = tuple[Any, ...]
_BLOCK_LAYER = re.compile(r"layers_(\d+)")
_NOT_WEIGHTS = nnx.Any(nnx.RngState, nnx.Intermediate, nnx.Cache)
_NAMED = 3


def model_weights(model: nnx.Module) -> nnx.State:
  """The weights of a model, and what else it computes with that isn't drawn, sown or cached."""
  return nnx.state(model, nnx.Not(_NOT_WEIGHTS))


def weights_of(state: nnx.State) -> nnx.State:
  """As `model_weights`, of a model's state: the same arrays, not copies of them."""
  return nnx.filter_state(state, nnx.Not(_NOT_WEIGHTS))


def by_path(state: nnx.State) -> dict[Path, Any]:
  """The arrays (or their shapes) of a state by path."""
  return {tuple(path): variable.get_value() for path, variable in nnx.to_flat_state(state)}


def placeholder(leaf: jax.ShapeDtypeStruct) -> jax.Array:
  """Zeros, or a key, for what a model holds and does not compute with."""
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return jax.random.key(0)
  return jnp.zeros(leaf.shape, leaf.dtype)


@dataclasses.dataclass(frozen=True)
class _Slice:
  """Where one layer's array lies: in which array of the model, and, if that is a stack, where in it."""

  source: Path
  axis: int | None = None
  index: int = 0

  def of(self, weights: Mapping[Path, jax.Array]) -> jax.Array:
    array = weights[self.source]
    return array if self.axis is None else jax.lax.index_in_dim(array, self.index, self.axis, keepdims=False)


class LayerSplitter:
  """Takes a model's stacked layers apart.

  A scan over layers stacks `decoder/layers/…`. A scan over blocks of layers (Gemma 3) stacks
  `decoder/layers/layers_<j>/…`; the layers of a last, shorter block lie in `decoder/layers_remainder/layers_<j>/…`.
  """

  def __init__(self, given: nnx.State, wanted: nnx.State, scan_axis: int):
    """Plans the way from one model's arrays to another's.

    Args:
      given: of the model there is, arrays or shapes.
      wanted: of the same model with layers apart, arrays or shapes.
      scan_axis: along which parameters are stacked, where they have that many axes; the rest is along the first.

    Raises:
      GenerationError: they are not the same model.
    """
    self._slices = dict(_slices(given, scan_axis))
    shapes = {path: leaf.shape for path, leaf in by_path(wanted).items()}
    have = by_path(given)
    _refuse("lacks", shapes.keys() - self._slices.keys())
    _refuse("has also", self._slices.keys() - shapes.keys())
    for path, part in self._slices.items():
      shape = list(have[part.source].shape)
      if part.axis is not None:
        del shape[part.axis]
      if tuple(shape) != shapes[path]:
        want = shapes[path]
        raise GenerationError(f"{_text(path)}: its shape is {tuple(shape)} in the model, {want} by its configuration")

  def __call__(self, weights: Mapping[Path, jax.Array]) -> dict[Path, jax.Array]:
    """The arrays of the wanted model, by path; under jit where there are stacks."""
    return {path: part.of(weights) for path, part in self._slices.items()}


def _slices(given: nnx.State, scan_axis: int) -> Iterable[tuple[Path, _Slice]]:
  variables = [(tuple(path), variable) for path, variable in nnx.to_flat_state(given)]
  stacks = [(path, variable) for path, variable in variables if path[:2] == ("decoder", "layers")]
  in_block = {int(match[1]) for path, _ in stacks if (match := _BLOCK_LAYER.fullmatch(str(path[2])))}
  block = max(in_block, default=0) + 1
  blocks = 0
  for path, variable in stacks:
    shape = variable.get_value().shape
    axis = scan_axis if isinstance(variable, nnx.Param) and len(shape) > scan_axis else 0
    blocks = shape[axis]
    match = _BLOCK_LAYER.fullmatch(str(path[2]))
    first, rest = (int(match[1]), path[3:]) if match else (0, path[2:])
    for index in range(blocks):
      yield ("decoder", f"layers_{index * block + first}", *rest), _Slice(path, axis, index)
  for path, _ in variables:
    if path[:2] == ("decoder", "layers_remainder"):
      layer = int(str(path[2]).removeprefix("layers_"))
      yield ("decoder", f"layers_{blocks * block + layer}", *path[3:]), _Slice(path)
    elif path[:2] != ("decoder", "layers"):
      yield path, _Slice(path)


def _refuse(what: str, paths: Iterable[Path]) -> None:
  names = sorted(map(_text, paths))
  if names:
    listed = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    raise GenerationError(f"the model is not the one that is configured: it {what} {listed}")


def _text(path: Path) -> str:
  return "/".join(map(str, path))
