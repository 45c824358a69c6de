"""What a run that trains an adapter notes of it."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from maxtext_posttrain import maxtext_lora
from maxtext_posttrain.lora.fingerprint import fingerprint
from maxtext_posttrain.lora.record import AdapterRecord
from maxtext_posttrain.maxtext_api import MaxTextConfig


def adapter_record(config: MaxTextConfig, base: nnx.Module) -> AdapterRecord:
  """The record of a run's adapter.

  Args:
    config: of the run.
    base: the live base, with its weights; not adapted yet.
  """
  weights = {tuple(path): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(base, nnx.Param))}
  lora = config.lora
  return AdapterRecord(
    rank=lora.lora_rank,
    alpha=float(lora.lora_alpha),
    module_path=maxtext_lora.module_path(config),
    weight_qtype=lora.lora_weight_qtype,
    tile_size=lora.lora_tile_size,
    scan_axis=config.param_scan_axis,
    weight_dtype=jnp.dtype(config.weight_dtype).name,
    base=config.load_parameters_path or None,
    fingerprint=fingerprint(weights),
  )
