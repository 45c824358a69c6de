"""What a checkpoint of an adapter says of it: how it was made, and over which base. Needs no JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from maxtext_posttrain.errors import CheckpointError

LORA = "lora"
"""The key in a step's metadata."""

_NAMES = {
  "rank": "lora_rank",
  "alpha": "lora_alpha",
  "module_path": "lora_module_path",
  "weight_qtype": "lora_weight_qtype",
  "tile_size": "lora_tile_size",
  "scan_axis": "param_scan_axis",
  "weight_dtype": "weight_dtype",
  "base": "base",
  "fingerprint": "base_fingerprint",
}


@dataclasses.dataclass(frozen=True)
class AdapterRecord:
  """How an adapter was made.

  Attributes:
    rank: of A and B.
    alpha: the adapter's part is multiplied by alpha / rank.
    module_path: regular expression of the modules that have one.
    weight_qtype: Qwix's type of the quantised base; None where it is not quantised.
    tile_size: length of its blocks; None is a whole axis.
    scan_axis: along which scanned layers are stacked.
    weight_dtype: of the base as the run held it, which is what `fingerprint` was taken of.
    base: the step or `items` the base was read from; None is a base drawn from `init_weights_seed`.
    fingerprint: of the base; see `lora.fingerprint`.
  """

  rank: int
  alpha: float
  module_path: str
  weight_qtype: str | None
  tile_size: int | None
  scan_axis: int
  weight_dtype: str
  base: str | None
  fingerprint: str

  @property
  def scale(self) -> float:
    """What A B is multiplied by."""
    return self.alpha / self.rank

  def metadata(self) -> dict[str, Any]:
    """As the step's metadata hold it; the names are MaxText's where it has one."""
    return {name: getattr(self, field) for field, name in _NAMES.items()}

  @classmethod
  def of(cls, custom_metadata: Mapping[str, Any], where: str) -> AdapterRecord | None:
    """The record in a step's metadata; None where it has none.

    Raises:
      CheckpointError: there is one, and it lacks what is needed.
    """
    stored = custom_metadata.get(LORA)
    if stored is None:
      return None
    if not isinstance(stored, Mapping):
      raise CheckpointError(f"checkpoint {where}: its metadata `{LORA}` is no mapping; it was not written by posttrain")
    missing = [name for name in _NAMES.values() if name not in stored]
    if missing:
      raise CheckpointError(
        f"checkpoint {where}: its metadata `{LORA}` lack {', '.join(missing)}; it was not written by posttrain, and"
        " nothing says which base it belongs to"
      )
    record = cls(**{field: stored[name] for field, name in _NAMES.items()})
    problem = record._problem()
    if problem is not None:
      raise CheckpointError(f"checkpoint {where}: its metadata `{LORA}`: {problem}")
    return record

  def _problem(self) -> str | None:
    if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
      return f"lora_rank={self.rank!r} is no rank"
    if not isinstance(self.alpha, (int, float)) or isinstance(self.alpha, bool):
      return f"lora_alpha={self.alpha!r} is no number"
    if not isinstance(self.fingerprint, str) or not isinstance(self.weight_dtype, str):
      return "base_fingerprint and weight_dtype must be texts"
    if self.scan_axis not in (0, 1):
      return f"param_scan_axis={self.scan_axis!r} must be 0 or 1"
    return None

  def check_same(self, run: AdapterRecord, where: str) -> None:
    """Refuses to go on from an adapter that `run` does not continue.

    Args:
      run: of the run that reads this one.
      where: the step that holds it.

    Raises:
      CheckpointError: what differs.
    """
    keys = ("rank", "alpha", "module_path", "weight_qtype", "tile_size", "weight_dtype")
    differing = [
      f"{_NAMES[key]} {getattr(self, key)} there, {getattr(run, key)} here"
      for key in keys
      if getattr(self, key) != getattr(run, key)
    ]
    if differing:
      raise CheckpointError(
        f"checkpoint {where} holds another adapter: {'; '.join(differing)}; set what it was trained with, or another"
        " run_name"
      )
    if self.fingerprint != run.fingerprint:
      raise CheckpointError(
        f"checkpoint {where} was trained over another base: {self.base or 'fresh weights'} with fingerprint"
        f" {self.fingerprint}, while {run.base or 'fresh weights'} has {run.fingerprint}; load_parameters_path must"
        " name the base it was trained over, unchanged"
      )


def refuse_adapter(custom_metadata: Mapping[str, Any], where: str) -> None:
  """Refuses a step that holds an adapter where full weights are read.

  Raises:
    CheckpointError: it does; says how full weights are made of it.
  """
  if LORA in custom_metadata:
    raise CheckpointError(
      f"checkpoint {where} holds a LoRA adapter, no full weights: posttrain merge makes them of it; a run that goes on"
      " with the adapter sets lora.enable_lora=true"
    )
