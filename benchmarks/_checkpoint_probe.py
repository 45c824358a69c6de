"""Saves and restores one train state by one side's means, in a process of its own, and notes times and memory.

  python _checkpoint_probe.py SIDE MEGABYTES TIMES FOLDER RESULT.json

SIDE is `ours`, `orbax` or `maxtext`. All three get the same MaxText train state, with random numbers in every array so
that nothing compresses away. `orbax` has Orbax's own default options (OCDBT and Zarr 3, as the others), the others have
MaxText's. The state is built before anything is measured, a first save and a first restore are made before those that
are timed (they start threads, and import what is imported late), and each begins when what was written before it is on
the disk: else the side that runs after another, or the save after another, would also pay for what that one left to the
system. Memory is the largest rise of any save and any restore, the first included.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import psutil
from etils import epath
from flax import nnx
from maxtext.common import checkpointing
from orbax.checkpoint import v1 as ocp

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.checkpointing.locations import bytes_on_disk
from maxtext_posttrain.checkpointing.manager import MaxTextLayoutCheckpointManager
from maxtext_posttrain.logs import quiet_logs

_EMB, _MLP, _HEADS, _VOCAB = 512, 2048, 8, 1024
_LAYER_PARAMETERS = 4 * _EMB * _EMB + 3 * _EMB * _MLP
_OTHER_PARAMETERS = 2 * _VOCAB * _EMB
_BYTES_PER_PARAMETER = 12
_SAMPLE_SECONDS = 0.002


class Side(Protocol):
  """One way of saving and restoring."""

  def save(self, step: int) -> None:
    """Starts a save and returns when the trainer could go on."""
    ...

  def wait(self) -> None:
    """Returns when the save is on disk."""
    ...

  def restore(self, step: int) -> Any:
    """Reads everything; returns what was read."""
    ...


class _Ours:
  """`MaxTextLayoutCheckpointManager`, as the trainers use it."""

  def __init__(self, folder: Path, config: Any, pretraining: Any, state: nnx.State):
    self._manager = MaxTextLayoutCheckpointManager(str(folder), None, config, target=pretraining)
    train_state: Any = nnx.merge(pretraining.graphdef, state)
    self._model, self._optimizer = train_state.model, train_state.optimizer

  def save(self, step: int) -> None:
    self._manager.save(step, self._model, self._optimizer, force=True)

  def wait(self) -> None:
    self._manager.wait_until_finished()

  def restore(self, step: int) -> Any:
    self._manager.maybe_restore(self._model, self._optimizer, step, release=True)
    return nnx.state((self._model, self._optimizer))


class _Orbax:
  """Orbax's `training.Checkpointer` as it comes, on the tree that is to be written."""

  def __init__(self, folder: Path, _: Any, pretraining: Any, state: nnx.State):
    self._items = maxtext_api.to_checkpoint_dict(state)
    self._abstract = maxtext_api.to_checkpoint_dict(pretraining.state)
    self._checkpointer = ocp.training.Checkpointer(str(folder))

  def save(self, step: int) -> None:
    metadata: Any = {"scan_layers": True}
    self._checkpointer.save_checkpointables_async(step, {"items": self._items}, force=True, custom_metadata=metadata)

  def wait(self) -> None:
    self._checkpointer.wait()

  def restore(self, step: int) -> Any:
    return self._checkpointer.load_checkpointables(step, {"items": self._abstract})


class _MaxText:
  """What pre-training itself calls."""

  def __init__(self, folder: Path, config: Any, pretraining: Any, state: nnx.State):
    self._config, self._state, self._abstract = config, state, pretraining.state
    self._manager: Any = checkpointing.create_orbax_checkpoint_manager(
      str(folder),
      enable_checkpointing=True,
      use_async=True,
      save_interval_steps=1,
      use_ocdbt=config.checkpoint_storage_use_ocdbt,
      use_zarr3=config.checkpoint_storage_use_zarr3,
      max_num_checkpoints_to_keep=config.max_num_checkpoints_to_keep,
      checkpoint_storage_concurrent_gb=config.checkpoint_storage_concurrent_gb,
      ocdbt_target_data_file_size_bytes=config.checkpoint_storage_target_data_file_size_bytes,
    )

  def save(self, step: int) -> None:
    checkpointing.save_checkpoint(self._manager, step, self._state, self._config, None, force=True)

  def wait(self) -> None:
    checkpointing.wait_until_finished(self._manager)

  def restore(self, step: int) -> Any:
    gigabytes = self._config.checkpoint_storage_concurrent_gb
    restored, _ = checkpointing.load_state_if_possible(
      self._manager, None, "", "", gigabytes, self._abstract, step=step, maxtext_config=self._config
    )
    return restored


_SIDES: Mapping[str, Callable[[Path, Any, Any, nnx.State], Side]] = {
  "ours": _Ours,
  "orbax": _Orbax,
  "maxtext": _MaxText,
}


class _MemoryWatch:
  """The largest resident memory while it is entered, above what it was before."""

  def __enter__(self) -> _MemoryWatch:
    self._process = psutil.Process()
    self._before = self._largest = self._process.memory_info().rss
    self._done = threading.Event()
    self._thread = threading.Thread(target=self._sample)
    self._thread.start()
    return self

  def _sample(self) -> None:
    while not self._done.wait(_SAMPLE_SECONDS):
      self._largest = max(self._largest, self._process.memory_info().rss)

  def __exit__(self, *_: object) -> None:
    self._done.set()
    self._thread.join()

  @property
  def rise(self) -> int:
    """In bytes."""
    return self._largest - self._before


def _build(megabytes: float) -> tuple[Any, Any, nnx.State]:
  layers = max(1, round((megabytes * 1e6 / _BYTES_PER_PARAMETER - _OTHER_PARAMETERS) / _LAYER_PARAMETERS))
  maxtext_api.use_pretraining_prng()
  config = maxtext_api.build_config(
    {
      "run_name": "benchmark",
      "model_name": "default",
      "override_model_config": True,
      "decoder_block": "llama2",
      "base_num_decoder_layers": layers,
      "base_emb_dim": _EMB,
      "base_mlp_dim": _MLP,
      "base_num_query_heads": _HEADS,
      "base_num_kv_heads": _HEADS,
      "head_dim": _EMB // _HEADS,
      "vocab_size": _VOCAB,
      "weight_dtype": "float32",
      "attention": "dot_product",
      "hardware": "cpu",
      "skip_jax_distributed_system": True,
      "enable_goodput_recording": False,
      "async_checkpointing": True,
      "checkpoint_period": 1,
    }
  )
  pretraining = maxtext_api.pretraining_state(config, maxtext_api.build_mesh(config))
  keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(pretraining.state))))

  def fill(leaf: Any) -> jax.Array:
    key = next(keys)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      array = jax.random.split(key, leaf.shape) if leaf.shape else key
    elif jnp.issubdtype(leaf.dtype, jnp.floating):
      array = jax.random.normal(key, leaf.shape, leaf.dtype)
    else:
      array = jnp.ones(leaf.shape, leaf.dtype)
    return jax.device_put(array, leaf.sharding)

  return config, pretraining, jax.block_until_ready(jax.tree.map(fill, pretraining.state))


def main() -> None:
  name, megabytes, times, folder, result = sys.argv[1:]
  quiet_logs(show=False)
  config, pretraining, state = _build(float(megabytes))
  root = Path(folder)
  side = _SIDES[name](root, config, pretraining, state)
  del state
  saved, blocked, restored, rises = [], [], [], {"save": [], "restore": []}
  for step in range(1, int(times) + 2):
    if step > 1:
      shutil.rmtree(root / str(step - 1))
    os.sync()
    with _MemoryWatch() as watch:
      started = time.perf_counter()
      side.save(step)
      blocked.append(time.perf_counter() - started)
      side.wait()
      saved.append(time.perf_counter() - started)
    rises["save"].append(watch.rise)
    os.sync()
    with _MemoryWatch() as watch:
      started = time.perf_counter()
      jax.block_until_ready(side.restore(step))
      restored.append(time.perf_counter() - started)
    rises["restore"].append(watch.rise)
  measured = {
    "first_save_seconds": saved[0],
    "first_restore_seconds": restored[0],
    "save_seconds": saved[1:],
    "blocked_seconds": blocked[1:],
    "restore_seconds": restored[1:],
    "save_memory_bytes": max(rises["save"]),
    "restore_memory_bytes": max(rises["restore"]),
    "disk_bytes": bytes_on_disk(epath.Path(root / str(int(times) + 1))),
    "state_bytes": sum(
      leaf.size * leaf.dtype.itemsize
      for leaf in jax.tree.leaves(pretraining.state)
      if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ),
  }
  Path(result).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
  main()
