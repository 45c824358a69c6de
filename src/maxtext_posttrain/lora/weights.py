"""Full weights of an adapter's checkpoint: its base read again, checked, and the adapter folded in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from maxtext_posttrain.checkpointing.metadata import load_step_metadata
from maxtext_posttrain.errors import CheckpointError
from maxtext_posttrain.lora.fingerprint import fingerprint
from maxtext_posttrain.lora.kernels import adapted_kernels, merged_kernel, misfit, number_of_inputs, stacked_axis
from maxtext_posttrain.lora.record import AdapterRecord
from maxtext_posttrain.models.items import read_parameters

Parameters = dict[tuple[str, ...], np.ndarray]


@dataclasses.dataclass(frozen=True)
class AdapterCheckpoint:
  """An adapter and the base it was trained over.

  Attributes:
    items: its step's folder or `items`.
    record: how it was made.
    adapter: A and B of each kernel by path, as stored.
    base: the base's weights by path below `params/params`, as stored.
    scan_layers: layers are stacked.
  """

  items: str
  record: AdapterRecord
  adapter: Parameters
  base: Parameters
  scan_layers: bool

  def merged(self) -> Parameters:
    """The weights W + (alpha / rank) A B, each in the dtype the base has on disk; the others are the base's own.

    With QLoRA, W of an adapted kernel is the quantised one, so that the merged model computes what was trained.
    """
    merged = dict(self.base)
    for path, a, b in adapted_kernels(self.adapter):
      kernel, axis = self.base[path], stacked_axis(path, self.record.scan_axis)
      if self.record.weight_qtype is not None:
        kernel = _requantised(kernel, a, axis, self.record)
      merged[path] = merged_kernel(kernel, a, b, scale=self.record.scale, axis=axis).astype(self.base[path].dtype)
    return merged


def read_record(items: str) -> AdapterRecord | None:
  """What a step says of the adapter it holds; None where it holds full weights."""
  return AdapterRecord.of(load_step_metadata(items), items)


def read_adapter(items: str, base: str | None, draw_base: Callable[[], Parameters] | None = None) -> AdapterCheckpoint:
  """Reads an adapter's checkpoint, and its base.

  Args:
    items: a step's folder or its `items`.
    base: where the base lies now, if not where the checkpoint says.
    draw_base: makes the base where the run had none to load, from the seed.

  Raises:
    CheckpointError: either can't be read, they don't belong together, or the base has changed.
  """
  record = read_record(items)
  if record is None:
    raise CheckpointError(f"checkpoint {items} holds full weights, no LoRA adapter: there is nothing to merge")
  adapter, scan_layers = read_parameters(items, adapter=True)
  where = base or record.base
  if where is not None:
    try:
      weights, base_scanned = read_parameters(where)
    except CheckpointError as error:
      raise CheckpointError(
        f"the base of adapter {items} can't be read: {error}; say where it lies now: --base PATH, or"
        " load_parameters_path=PATH"
      ) from error
    if base_scanned != scan_layers:
      raise CheckpointError(f"the base {where} has scan_layers={base_scanned}, adapter {items} {scan_layers}")
  elif draw_base is not None:
    weights = draw_base()
  else:
    raise CheckpointError(f"adapter {items} was trained over fresh weights, which nothing here draws again")
  held = {path: _cast(array, record.weight_dtype) for path, array in weights.items()}
  found = fingerprint(held)
  if found != record.fingerprint:
    raise CheckpointError(
      f"the base {where or 'drawn from the seed'} is not the one adapter {items} was trained over: its fingerprint is"
      f" {found}, the adapter's base had {record.fingerprint}; name the right one: --base PATH, or"
      " load_parameters_path=PATH"
    )
  for path, a, b in adapted_kernels(adapter):
    problem = "the base has none"
    if path in weights:
      problem = misfit(weights[path].shape, a.shape, b.shape, stacked_axis(path, record.scan_axis))
    if problem is not None:
      raise CheckpointError(f"adapter {items}: {'/'.join(path)}: {problem}")
  return AdapterCheckpoint(items, record, adapter, weights, scan_layers)


def _cast(array: np.ndarray, dtype: str) -> np.ndarray:
  return array.astype(jnp.dtype(dtype), copy=False)


def _requantised(kernel: np.ndarray, a: np.ndarray, axis: int | None, record: AdapterRecord) -> np.ndarray:
  """The kernel as QLoRA computes with it, in float32."""
  from maxtext_posttrain.maxtext_lora import quantised

  assert record.weight_qtype is not None
  held = _cast(kernel, record.weight_dtype)
  layers = [held] if axis is None else list(np.moveaxis(held, axis, 0))
  rows = a.shape[0] if axis is None else np.moveaxis(a, axis, 0).shape[1]
  inputs = number_of_inputs(layers[0].shape, rows)
  assert inputs is not None
  done: list[Any] = [np.asarray(quantised(layer, inputs, record.weight_qtype, record.tile_size)) for layer in layers]
  array = done[0] if axis is None else np.moveaxis(np.stack(done), 0, axis)
  return array.astype(np.float32)
