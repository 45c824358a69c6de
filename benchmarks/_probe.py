"""Runs a training module as `python -m` would, and notes from outside what it does.

  python _probe.py RESULT.json MODULE [argument ...]

Both sides of the comparison train in the loop of Tunix's `PeftTrainer`, so both are observed at the same two places of
it: where it places a batch, and where it takes the loss of an update it has dispatched. A thread waits for that loss
and reads the clock; nothing makes the loop wait. What has to be counted is counted after the run.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import json
import math
import queue
import resource
import runpy
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


class AfterImport(importlib.abc.MetaPathFinder):
  """Calls a function on one module as soon as something imports it, so that observing imports nothing itself."""

  def __init__(self, name: str, action: Callable[[ModuleType], None]):
    self._name = name
    self._action = action

  def find_spec(
    self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
  ) -> ModuleSpec | None:
    """The spec the other finders give, with the action after the module's own code."""
    del path, target
    if fullname != self._name:
      return None
    sys.meta_path.remove(self)
    spec = importlib.util.find_spec(fullname)
    if spec is None or spec.loader is None:
      return spec
    execute = spec.loader.exec_module

    def execute_and_act(module: ModuleType) -> None:
      execute(module)
      self._action(module)

    spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
    return spec


class Recorder:
  """What one run did: when each update was complete, on what data, and what was compiled."""

  def __init__(self) -> None:
    self._completed: list[float] = []
    self._processor_seconds: list[float] = []
    self._losses: list[Any] = []
    self._batches: list[dict[str, Any]] = []
    self._compile_seconds: list[float] = []
    self._parameters = 0
    self._pending: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._watcher: threading.Thread | None = None

  def _watch(self) -> None:
    while (loss := self._pending.get()) is not None:
      loss.block_until_ready()
      self._completed.append(time.monotonic())
      self._processor_seconds.append(time.process_time())
      self._losses.append(loss)

  def observe_compilation(self, monitoring: ModuleType) -> None:
    """Listens to `jax.monitoring`."""

    def listen(event: str, seconds: float, **_: Any) -> None:
      if event == _BACKEND_COMPILE:
        self._compile_seconds.append(seconds)

    monitoring.register_event_duration_secs_listener(listen)

  def observe_training(self, peft_trainer: ModuleType) -> None:
    """Wraps the two functions of `tunix.sft.peft_trainer` that see each loss and each batch."""
    trainer_class, sharding = peft_trainer.PeftTrainer, peft_trainer.sharding_utils
    buffer_metrics, shard_input = trainer_class._buffer_metrics, sharding.shard_input

    @functools.wraps(buffer_metrics)
    def observed_buffer_metrics(trainer: Any, metrics_buffer: Any, loss: Any, step: int, *args: Any, **kw: Any) -> Any:
      self._pending.put(loss)
      if self._watcher is None:
        # Not sooner: what is observed may fork while it has no thread.
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
      if not self._parameters:
        self._parameters = _count_parameters(trainer.model)
      return buffer_metrics(trainer, metrics_buffer, loss, step, *args, **kw)

    @functools.wraps(shard_input)
    def observed_shard_input(batch: Any, *args: Any, **kw: Any) -> Any:
      self._batches.append(batch)
      return shard_input(batch, *args, **kw)

    trainer_class._buffer_metrics = observed_buffer_metrics
    sharding.shard_input = observed_shard_input

  def write(self, path: Path) -> None:
    """Writes all that was recorded; call it when the run is over."""
    self._pending.put(None)
    if self._watcher is not None:
      self._watcher.join()
    kilobytes = 1 if sys.platform == "darwin" else 1024
    result = {
      "completed": self._completed,
      "processor_seconds": self._processor_seconds,
      "losses": [float(loss) for loss in self._losses],
      "parameters": self._parameters,
      **_work(self._batches),
      "compile_seconds": sum(self._compile_seconds),
      "compilations": len(self._compile_seconds),
      "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobytes,
    }
    path.write_text(json.dumps(result), encoding="utf-8")


def _work(batches: Sequence[Any]) -> dict[str, list[int]]:
  """How large each batch is: of MaxText's arrays by name, or of the object that Tunix's DPO makes of its own."""
  if not all(isinstance(batch, dict) for batch in batches):
    return {
      "positions": [math.prod(batch.input_ids.shape) for batch in batches],
      # A row of the attention mask is the last token's view of all that are not padding.
      "tokens": [_count(batch.attention_mask[:, -1] if batch.attention_mask.ndim == 3 else 1) for batch in batches],
      "trained_tokens": [_count(batch.completion_mask) for batch in batches],
    }
  return {
    "positions": [math.prod(batch["inputs"].shape) for batch in batches],
    "tokens": [_count(batch["inputs_segmentation"]) for batch in batches],
    "trained_tokens": [_count(batch["targets_segmentation"]) for batch in batches],
  }


def _count(segments: Any) -> int:
  import numpy as np

  return int(np.count_nonzero(np.asarray(segments)))


def _count_parameters(model: Any) -> int:
  import jax
  from flax import nnx

  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def main() -> None:
  result, module, *arguments = sys.argv[1:]
  recorder = Recorder()
  sys.meta_path.insert(0, AfterImport("jax.monitoring", recorder.observe_compilation))
  sys.meta_path.insert(0, AfterImport("tunix.sft.peft_trainer", recorder.observe_training))
  # As `python -m` has them.
  sys.path[0] = str(Path.cwd())
  sys.argv = [module, *arguments]
  # Where Weights & Biases is installed, Tunix logs to it unasked, and stops where it is not logged in.
  sys.modules["wandb"] = None  # type: ignore[assignment]
  try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
  finally:
    recorder.write(Path(result))


if __name__ == "__main__":
  main()
