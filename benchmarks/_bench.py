"""A benchmark's contenders, each run in a fresh process on the same data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from _common import write_chats, write_tokenizer
from _runs import Run

REPOSITORY = Path(__file__).resolve().parents[1]
BENCHMARKS = Path(__file__).parent

_LOG_TAIL = 30


@dataclass(frozen=True)
class Side:
  """A contender.

  Attributes:
    name: in the tables.
    script: run as `interpreter script RESULT.json *arguments key=value ...`; writes what `_probe.py` writes.
  """

  name: str
  interpreter: Path
  script: Path
  arguments: tuple[str, ...] = ()


def probed(name: str, module: str, config: Path) -> Side:
  """A trainer on Tunix's loop: what `python -m module config` runs, observed."""
  return Side(name, Path(sys.executable), BENCHMARKS / "_probe.py", (module, str(config)))


def measured_peak_tflops() -> float:
  """TFLOP/s of the best square float32 matrix product in JAX, in a process of its own."""
  return float(subprocess.check_output([sys.executable, BENCHMARKS / "_peak.py"], text=True))


class Bench:
  """Runs a side in a fresh process; holds the data and the tokenizer that all read."""

  def __init__(self, folder: Path, questions: Path, keys: Mapping[str, str], *, warm_cache: bool):
    self._folder = folder
    self._keys = keys
    self._warm_cache = warm_cache
    self._runs = 0
    self._chats = folder / "train.jsonl"
    self._tokenizer = folder / "tokenizer"
    write_chats(questions, self._chats)
    write_tokenizer(questions, self._tokenizer)

  def run(self, side: Side, title: str) -> Run:
    """One process of `side`, from its start to its end.

    Raises:
      SystemExit: the process failed, or made fewer updates than it was asked for.
    """
    self._runs += 1
    folder = self._folder / f"run-{self._runs}-{side.name}"
    folder.mkdir()
    cache = self._folder / f"cache-{side.name}" if self._warm_cache else folder / "cache"
    keys = {
      "base_output_directory": str(folder / "output"),
      "jax_cache_dir": str(cache),
      "hf_train_files": str(self._chats),
      "tokenizer_path": str(self._tokenizer),
      **self._keys,
    }
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
    run = Run.of(result, started)
    times = f"first step after {run.first_step_seconds:.2f} s, then {1e3 * run.step_seconds:.1f} ms a step"
    print(f"{title}: {side.name:<8} {times}", flush=True)
    return run
