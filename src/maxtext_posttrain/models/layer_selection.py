"""Some of a model's layers as the layers of a shallower one: pure functions of parameters by path."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxtext_posttrain.errors import ModelError

Path = tuple[Any, ...]

_SCANNED = ("decoder", "layers")
_LAYER = re.compile(r"layers_(\d+)")
_OTHER_STACKS = re.compile(r"(dense_layers|moe_layers|layers_remainder|layers_outside_pipeline|pipeline_module)(_\d+)?")


def select_layers(parameters: Mapping[Path, Any], layers: Sequence[int], *, scan_axis: int) -> dict[Path, Any]:
  """The parameters of a model with only these layers, in this order; everything outside the layers is kept.

  Args:
    parameters: arrays by path below the model, as `("decoder", "layers", "mlp", "wo", "kernel")` where layers are
      scanned, with `layers_0` and on in its place where they are not.
    layers: numbers from 0 on.
    scan_axis: along which scanned layers are stacked, where an array has that many axes; else it is the first.

  Returns:
    Arrays by path; of NumPy's or JAX's kind, as they came.

  Raises:
    ModelError: there is no such layer, or the model's layers are of several kinds, stacked apart.
  """
  selected: dict[Path, Any] = {}
  found: set[int] = set()
  for path, array in parameters.items():
    part = str(path[1]) if path[:1] == ("decoder",) and len(path) > 1 else ""
    layer = _LAYER.fullmatch(part)
    in_block = path[:2] == _SCANNED and len(path) > 2 and _LAYER.fullmatch(str(path[2]))
    if in_block or _OTHER_STACKS.fullmatch(part):
      raise ModelError(
        f"{'/'.join(map(str, path))}: layers of several kinds are stacked apart in this model; layers can be taken from"
        " it with scan_layers=false, or from models whose layers are all of a kind"
      )
    if path[:2] == _SCANNED:
      axis = scan_axis if len(array.shape) > scan_axis else 0
      found |= set(range(array.shape[axis]))
      if set(layers) <= found:
        selected[path] = array.take(np.asarray(layers, np.int32), axis=axis)
    elif layer:
      found.add(int(layer[1]))
      for place, number in enumerate(layers):
        if number == int(layer[1]):
          selected[("decoder", f"layers_{place}", *path[2:])] = array
    else:
      selected[path] = array
  missing = sorted(set(layers) - found)
  if missing:
    raise ModelError(f"layer {missing[0]} does not exist: the model has {len(found)} layers, from 0")
  return selected


def check_same_shapes(selected: Mapping[Path, Any], wanted: Mapping[Path, Any]) -> None:
  """Says where parameters do not fit a model.

  Args:
    selected: arrays by path.
    wanted: the model's, arrays or anything with a shape.

  Raises:
    ModelError: a parameter is missing, there is one too many, or a shape differs; the first is named.
  """
  for path in [*wanted, *selected]:
    name = "/".join(map(str, path))
    if path not in selected:
      raise ModelError(f"the student has {name} and the teacher has not: they are of different architectures")
    if path not in wanted:
      raise ModelError(f"the teacher has {name} and the student has not: they are of different architectures")
    have, want = tuple(selected[path].shape), tuple(wanted[path].shape)
    if have != want:
      raise ModelError(f"{name}: the teacher's layers give it the shape {have}, the student's configuration {want}")
