"""Contenders that train, each run in a process of its own: what a side is, how it is run, what the machine is."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _runs import Hardware, Run, report

REPOSITORY = Path(__file__).resolve().parents[1]
BENCHMARKS = Path(__file__).parent
GSM8K = REPOSITORY.parent / "shared" / "data" / "gsm8k"
TORCH_PYTHON = REPOSITORY / ".venv-torch" / "bin" / "python"
VLLM_PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"
_PACKAGES = ("maxtext", "google-tunix", "jax", "flax", "optax", "transformers", "datasets", "grain")
_TORCH_PACKAGES = ("torch", "trl", "transformers", "accelerate")
_LOG_TAIL = 30

RUN_KEYS: Mapping[str, str] = {
  "run_name": "benchmark",
  "hf_path": "json",
  "train_split": "train",
  "tokenizer_type": "huggingface",
  "opt_type": "adamw",
  "learning_rate": "1e-3",
  "gradient_clipping_threshold": "1.0",
  "gradient_accumulation_steps": "1",
  "eval_interval": "-1",
  "enable_checkpointing": "false",
  "enable_tensorboard": "false",
  "hardware": "cpu",
  "skip_jax_distributed_system": "true",
  "enable_goodput_recording": "false",
}
"""MaxText's keys that every run of every trainer has."""


@dataclass(frozen=True)
class Side:
  """A contender.

  Attributes:
    name: in the tables.
    script: run as `interpreter script RESULT.json *arguments key=value ...`; writes what `_probe.py` writes.
    arguments: before the keys.
    keys: its own, over those that all sides have.
  """

  name: str
  interpreter: Path
  script: Path
  arguments: tuple[str, ...] = ()
  keys: Mapping[str, str] = field(default_factory=dict, hash=False)


def probed(name: str, module: str, config: Path, interpreter: Path | None = None) -> Side:
  """A trainer on Tunix's loop: what `python -m module config` runs, observed; by this interpreter unless told."""
  return Side(name, interpreter or Path(sys.executable), BENCHMARKS / "_probe.py", (module, str(config)))


def torch_side(name: str, interpreter: Path, script: str) -> Side:
  """A trainer on PyTorch, in an interpreter that has it.

  Raises:
    SystemExit: there is no such interpreter.
  """
  if not interpreter.is_file():
    sys.exit(f"{interpreter}: no such interpreter; make torch-env makes one with TRL, --torch-python names another")
  return Side(name, interpreter.absolute(), BENCHMARKS / script)


def maxtext_config(name: str) -> Path:
  """A file of the installed MaxText's `configs/post_train`.

  Raises:
    SystemExit: MaxText is not installed.
  """
  spec = importlib.util.find_spec("maxtext")
  if spec is None or not spec.submodule_search_locations:
    sys.exit("maxtext is not installed beside this Python")
  return Path(spec.submodule_search_locations[0]) / "configs" / "post_train" / name


def print_machine(torch_python: Path | None, *, warm_cache: bool) -> None:
  """Prints what the figures depend on; `torch_python` is the interpreter of a side on PyTorch, if there is one."""
  versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in _PACKAGES)
  cache = "filled by an earlier run" if warm_cache else "empty for each run"
  print(f"machine   {os.cpu_count()} CPUs, {platform.machine()}, load before the first run {os.getloadavg()[0]:.1f}")
  print(f"versions  {versions}")
  if torch_python is not None:
    code = f"import importlib.metadata as m; print(', '.join(f'{{p}} {{m.version(p)}}' for p in {_TORCH_PACKAGES}))"
    print(f"TRL's     {subprocess.check_output([torch_python, '-c', code], text=True).strip()}")
  print(f"cache     JAX compilation cache {cache}", flush=True)


def best_peak_tflops() -> float:
  """TFLOP/s of the best square float32 matrix product in JAX, measured now."""
  return float(subprocess.check_output([sys.executable, BENCHMARKS / "_peak.py"], text=True))


class Contest:
  """Runs the sides in alternation, each run in a fresh process."""

  def __init__(self, folder: Path, ours: Side, rivals: Sequence[Side], keys: Mapping[str, str], *, warm_cache: bool):
    """Takes a folder for all runs, and the keys of all sides, those of the data and the tokenizer included."""
    self._folder = folder
    self._ours = ours
    self._rivals = rivals
    self._keys = keys
    self._warm_cache = warm_cache
    self._runs = 0
    self._rounds: list[dict[Side, Run]] = []
    self._peaks: list[float] = []

  def run(self, rounds: int) -> None:
    """Runs each side `rounds` times; which begins alternates.

    Raises:
      SystemExit: a process failed, or made fewer updates than it was asked for.
    """
    if self._warm_cache:
      for side in (self._ours, *self._rivals):
        self._run(side, "fills its compilation cache, not counted")
    for number in range(1, rounds + 1):
      order = (self._ours, *self._rivals) if number % 2 else (*self._rivals, self._ours)
      self._rounds.append({side: self._run(side, f"pair {number} of {rounds}") for side in order})
      self._peaks.append(best_peak_tflops())

  def report(self, step_tflops: float, output: Path | None, *, same_positions: bool = True) -> None:
    """Prints a table for each rival, and writes all runs to `output` as JSON where it is given.

    Args:
      step_tflops: the model's TFLOPs of one update.
      output: a file for the runs, or None.
      same_positions: all sides compute as many positions a step; else they are compared by trained token too.

    Raises:
      SystemExit: two sides did not do the same work.
    """
    hardware = Hardware(step_tflops, max(self._peaks))
    print(
      f"\npeak      {hardware.peak_tflops:.4f} TFLOP/s, the best square float32 matrix product in JAX;"
      f" a step is {hardware.step_tflops:.4f} TFLOPs of the model"
    )
    for rival in self._rivals:
      pairs = [(runs[self._ours], runs[rival]) for runs in self._rounds]
      for line in report(rival.name, pairs, hardware, same_positions=same_positions):
        print(line)
    if output:
      raw = [{side.name.lower(): vars(run) for side, run in runs.items()} for runs in self._rounds]
      output.write_text(json.dumps({**vars(hardware), "pairs": raw}, indent=1), encoding="utf-8")

  def _run(self, side: Side, title: str) -> Run:
    """One process of `side`, from its start to its end."""
    self._runs += 1
    folder = self._folder / f"run-{self._runs}-{side.name}"
    cache = self._folder / f"cache-{side.name}" if self._warm_cache else folder / "cache"
    run = Run.of(*run_side(side, folder, {"jax_cache_dir": str(cache), **self._keys}))
    times = f"first step after {run.first_step_seconds:.2f} s, then {1e3 * run.step_seconds:.1f} ms a step"
    print(f"{title}: {side.name:<8} {times}", flush=True)
    return run


def run_side(side: Side, folder: Path, keys: Mapping[str, str]) -> tuple[dict[str, Any], float]:
  """One process of a side, from its start to its end; its run's folder is `folder/output/benchmark`.

  Args:
    side: which; its own keys stand over `keys`.
    folder: is made.
    keys: MaxText's.

  Returns:
    What its probe wrote, and the clock just before it was started.

  Raises:
    SystemExit: it failed, or made fewer updates than it was asked for.
  """
  folder.mkdir()
  keys = {"base_output_directory": str(folder / "output"), **keys, **side.keys}
  result_file, log_file = folder / "result.json", folder / "log"
  arguments = [*side.arguments, *(f"{key}={value}" for key, value in keys.items())]
  command = [str(side.interpreter), str(side.script), str(result_file), *arguments]
  environment = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
  with log_file.open("wb") as log:
    started = time.monotonic()
    code = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=False).returncode
  result = json.loads(result_file.read_text(encoding="utf-8")) if result_file.is_file() else {"completed": []}
  steps = len(result["completed"])
  if code or steps != int(keys["steps"]):
    tail = "\n".join(log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL:])
    sys.exit(f"{tail}\n{side.name}: exit code {code} after {steps} of {keys['steps']} steps")
  return result, started
