"""How checkpoints are written and read: MaxText's keys as Orbax's context."""

from __future__ import annotations

import dataclasses
from typing import Any

import orbax.checkpoint as ocp_v0
from orbax.checkpoint import v1 as ocp

from maxtext_posttrain import maxtext_api

_BYTES_PER_GB = 10**9
_NO_ARRAY_IS_LARGER = 2**62


@dataclasses.dataclass(frozen=True)
class StorageOptions:
  """How checkpoints are written; MaxText's keys and meanings.

  Attributes:
    save_interval_steps: save at multiples of this step (`checkpoint_period`).
    max_to_keep: newest checkpoints kept; None keeps all (`max_num_checkpoints_to_keep`).
    use_async: write in the background once the arrays are on the host (`async_checkpointing`).
    use_ocdbt: one key-value store instead of a folder an array (`checkpoint_storage_use_ocdbt`).
    use_zarr3: `checkpoint_storage_use_zarr3`.
    device_host_gb: device-to-host budget in GB (`checkpoint_storage_concurrent_gb`). It does not cap reads and
      writes: a single array larger than such a cap can't be saved.
    target_file_bytes: size at which a data file is closed (`checkpoint_storage_target_data_file_size_bytes`).
    restore_fallback: use the checkpoint before a damaged newest one.
    save_decision_policy: Orbax's policy, where a caller brings one; stands in for `save_interval_steps`.
  """

  save_interval_steps: int = 1
  max_to_keep: int | None = None
  use_async: bool = True
  use_ocdbt: bool = True
  use_zarr3: bool = True
  device_host_gb: int | None = None
  target_file_bytes: int | None = None
  restore_fallback: bool = False
  save_decision_policy: Any = None

  @classmethod
  def of(cls, options: ocp_v0.CheckpointManagerOptions | None, config: Any) -> StorageOptions:
    """From Tunix's `checkpointing_options` and a configuration with MaxText's keys; the options win where both speak.

    Either may be None.
    """
    values: dict[str, Any] = {}
    for field, key in (
      ("save_interval_steps", "checkpoint_period"),
      ("max_to_keep", "max_num_checkpoints_to_keep"),
      ("use_async", "async_checkpointing"),
      ("use_ocdbt", "checkpoint_storage_use_ocdbt"),
      ("use_zarr3", "checkpoint_storage_use_zarr3"),
      ("device_host_gb", "checkpoint_storage_concurrent_gb"),
      ("target_file_bytes", "checkpoint_storage_target_data_file_size_bytes"),
      ("restore_fallback", "restore_fallback"),
    ):
      value = getattr(config, key, None)
      if value is not None:
        values[field] = value
    if options is not None:
      values["save_interval_steps"] = options.save_interval_steps
      values["use_async"] = options.enable_async_checkpointing
      if options.max_to_keep is not None:
        values["max_to_keep"] = options.max_to_keep
      if options.save_decision_policy is not None:
        values["save_decision_policy"] = options.save_decision_policy
    return cls(**values)

  def context(self) -> ocp.Context:
    """A fresh Orbax context; it reads the part of a checkpoint that is asked for."""
    context = maxtext_api.build_orbax_context(
      use_ocdbt=self.use_ocdbt,
      use_zarr3=self.use_zarr3,
      ocdbt_target_data_file_size_bytes=self.target_file_bytes,
      partial_load=True,
    )
    # With any bound on writes Orbax writes arrays as they come; without one it gathers them in a single transaction,
    # which takes longer. An array above the bound could not be saved.
    context.memory.write_concurrent_bytes = _NO_ARRAY_IS_LARGER
    if self.device_host_gb:
      context.memory.transfer_concurrent_bytes = self.device_host_gb * _BYTES_PER_GB
    return context
