"""SFT here against `python -m maxtext.trainers.post_train.sft.train_sft`: start-up, step, compilation, memory.

  python benchmarks/sft_step.py --pairs 5

Both sides train the same model on the same chats with the same tokenizer and keys, each run in a process of its own
that starts with an empty JAX compilation cache. The sides alternate, and which of them begins alternates too. Printed
are both sides' medians with smallest and largest value, and the ratio ours / MaxText's of each pair likewise: times
depend on the machine, ratios much less. Keys after the options go to both sides (`remat_policy=full`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import VOCAB_SIZE, Spread, write_chats, write_tokenizer

_REPOSITORY = Path(__file__).resolve().parents[1]
_DATA = _REPOSITORY.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
_PACKAGES = ("maxtext", "google-tunix", "jax", "flax", "optax", "transformers", "datasets", "grain")
_LOG_TAIL = 30

# Steps 1 and 2 still compile or warm something up on one side or the other.
_FIRST_TIMED_STEP = 3

_MODEL_KEYS = {
  "model_name": "default",
  "override_model_config": "true",
  "decoder_block": "llama2",
  "base_num_decoder_layers": "6",
  "base_emb_dim": "256",
  "base_mlp_dim": "1024",
  "base_num_query_heads": "8",
  "base_num_kv_heads": "8",
  "head_dim": "32",
  "vocab_size": str(VOCAB_SIZE),
  "attention": "dot_product",
  "dtype": "float32",
  "weight_dtype": "float32",
  "remat_policy": "minimal",
}
_RUN_KEYS = {
  "run_name": "benchmark",
  "hf_path": "json",
  "train_split": "train",
  "train_data_columns": "[messages]",
  "tokenizer_type": "huggingface",
  "packing": "true",
  "sft_train_on_completion_only": "true",
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


@dataclass(frozen=True)
class Side:
  """A contender: the module that `python -m` runs, and its configuration file."""

  name: str
  module: str
  config: Path


@dataclass(frozen=True)
class Run:
  """What one process did.

  Attributes:
    first_step_seconds: from just before the process was started to the end of its first update.
    step_seconds: median time between the ends of successive updates, from step 3 on.
    first_step_processor_seconds: processor time of all the process's threads up to the end of its first update.
    step_processor_seconds: median processor time between the ends of successive updates, from step 3 on.
    positions: of one step's batch, padding included.
    tokens: per step, padding excluded, a mean.
    trained_tokens: per step, those in the loss, a mean.
    compile_seconds: spent in XLA, all compilations together, on whatever thread.
    peak_bytes: largest resident memory of the training process.
  """

  first_step_seconds: float
  step_seconds: float
  first_step_processor_seconds: float
  step_processor_seconds: float
  positions: int
  tokens: float
  trained_tokens: float
  parameters: int
  losses: tuple[float, ...]
  compile_seconds: float
  compilations: int
  peak_bytes: int

  @property
  def tokens_per_second(self) -> float:
    """Positions per second, padding included: what the hardware computes."""
    return self.positions / self.step_seconds


@dataclass(frozen=True)
class Measure:
  """A line of the table."""

  label: str
  value: Callable[[Run], float]
  decimals: int
  goal: str = ""


_MEASURES = (
  Measure("start to first step, s", lambda run: run.first_step_seconds, 2, "<= 0.7"),
  Measure("step, ms", lambda run: 1e3 * run.step_seconds, 1, "<= 1.0"),
  Measure("CPU to first step, s", lambda run: run.first_step_processor_seconds, 2),
  Measure("CPU of a step, ms", lambda run: 1e3 * run.step_processor_seconds, 1),
  Measure("tokens per second", lambda run: run.tokens_per_second, 0),
  Measure("compile (XLA), s", lambda run: run.compile_seconds, 2),
  Measure("compilations", lambda run: run.compilations, 0),
  Measure("peak memory, MiB", lambda run: run.peak_bytes / 2**20, 0),
)


def main(arguments: Sequence[str] | None = None) -> None:
  options = _parse(arguments)
  if not options.data.is_file():
    sys.exit(f"{options.data}: no such file; --data names question/answer rows as JSONL")
  ours = Side("ours", "train_sft", _REPOSITORY / "configs" / "sft.yml")
  theirs = Side("MaxText", "maxtext.trainers.post_train.sft.train_sft", _maxtext_config())
  _print_machine(options)
  with tempfile.TemporaryDirectory(prefix="sft_step-") as folder:
    bench = Bench(Path(folder), options.data, _keys(options), warm_cache=options.warm_cache)
    if options.warm_cache:
      for side in (ours, theirs):
        bench.run(side, "fills its compilation cache, not counted")
    pairs = []
    for number in range(1, options.pairs + 1):
      order = (ours, theirs) if number % 2 else (theirs, ours)
      runs = {side: bench.run(side, f"pair {number} of {options.pairs}") for side in order}
      pairs.append((runs[ours], runs[theirs]))
  for line in report(pairs):
    print(line)
  if options.output:
    raw = [{"ours": vars(one), "maxtext": vars(other)} for one, other in pairs]
    options.output.write_text(json.dumps(raw, indent=1), encoding="utf-8")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description="SFT here against MaxText's own train_sft, in alternation.")
  parser.add_argument("--pairs", type=int, default=5, help="runs of each side (default 5)")
  parser.add_argument("--steps", type=int, default=20, help="updates of a run (default 20; those from 3 on are timed)")
  parser.add_argument("--batch", type=int, default=8, help="sequences of a step (default 8)")
  parser.add_argument("--length", type=int, default=256, help="tokens of a sequence (default 256)")
  parser.add_argument("--warm-cache", action="store_true", help="each side finds its compilation cache filled")
  parser.add_argument("--data", type=Path, default=_DATA, help="question/answer rows as JSONL (default: GSM8K)")
  parser.add_argument("--output", type=Path, help="also write all runs to this file as JSON")
  parser.add_argument("keys", nargs="*", metavar="key=value", help="MaxText keys for both sides")
  options = parser.parse_args(arguments)
  if options.pairs < 1:
    parser.error("--pairs must be at least 1")
  if options.steps < _FIRST_TIMED_STEP:
    parser.error(f"--steps must be at least {_FIRST_TIMED_STEP}: steps from there on are timed")
  if bad := [key for key in options.keys if "=" not in key]:
    parser.error(f"{bad[0]}: keys are given as key=value")
  return options


def _keys(options: argparse.Namespace) -> dict[str, str]:
  sizes = {
    "steps": str(options.steps),
    "per_device_batch_size": str(options.batch),
    "max_target_length": str(options.length),
  }
  return {**_MODEL_KEYS, **_RUN_KEYS, **sizes, **dict(key.split("=", 1) for key in options.keys)}


def _maxtext_config() -> Path:
  spec = importlib.util.find_spec("maxtext")
  if spec is None or not spec.submodule_search_locations:
    sys.exit("maxtext is not installed beside this Python")
  return Path(spec.submodule_search_locations[0]) / "configs" / "post_train" / "sft.yml"


def _print_machine(options: argparse.Namespace) -> None:
  versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in _PACKAGES)
  cache = "filled by an earlier run" if options.warm_cache else "empty for each run"
  print(f"machine   {os.cpu_count()} CPUs, {platform.machine()}, load before the first run {os.getloadavg()[0]:.1f}")
  print(f"versions  {versions}")
  print(f"cache     JAX compilation cache {cache}", flush=True)


class Bench:
  """Runs a side in a fresh process; holds the data and the tokenizer that both read."""

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
    folder = self._folder / f"run-{self._runs}-{side.module.split('.')[0]}"
    folder.mkdir()
    cache = self._folder / f"cache-{side.name}" if self._warm_cache else folder / "cache"
    keys = {
      "base_output_directory": str(folder / "output"),
      "jax_cache_dir": str(cache),
      "hf_train_files": str(self._chats),
      "tokenizer_path": str(self._tokenizer),
      **self._keys,
    }
    probe = Path(__file__).with_name("_probe.py")
    result_file, log_file = folder / "result.json", folder / "log"
    arguments = [str(side.config), *(f"{key}={value}" for key, value in keys.items())]
    command = [sys.executable, str(probe), str(result_file), side.module, *arguments]
    environment = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    with log_file.open("wb") as log:
      started = time.monotonic()
      code = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=False).returncode
    result = json.loads(result_file.read_text(encoding="utf-8")) if result_file.is_file() else {"completed": []}
    steps = len(result["completed"])
    if code or steps != int(keys["steps"]):
      tail = "\n".join(log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL:])
      sys.exit(f"{tail}\n{side.name}: exit code {code} after {steps} of {keys['steps']} steps")
    run = _summarise(result, started)
    times = f"first step after {run.first_step_seconds:.2f} s, then {1e3 * run.step_seconds:.1f} ms a step"
    print(f"{title}: {side.name:<8} {times}", flush=True)
    return run


def _summarise(result: Mapping[str, Any], started: float) -> Run:
  completed = result["completed"]
  steps = len(completed)
  processor = result["processor_seconds"]
  return Run(
    first_step_seconds=completed[0] - started,
    step_seconds=_median_step(completed),
    first_step_processor_seconds=processor[0],
    step_processor_seconds=_median_step(processor),
    positions=result["positions"][0],
    tokens=statistics.mean(result["tokens"][:steps]),
    trained_tokens=statistics.mean(result["trained_tokens"][:steps]),
    parameters=result["parameters"],
    losses=tuple(result["losses"]),
    compile_seconds=result["compile_seconds"],
    compilations=result["compilations"],
    peak_bytes=result["peak_bytes"],
  )


def _median_step(readings: Sequence[float]) -> float:
  """The median difference of successive readings, one at the end of each step, over the steps that are timed."""
  # What step n took is the difference of number n - 1 and the one before.
  timed = itertools.pairwise(readings[_FIRST_TIMED_STEP - 2 :])
  return statistics.median(after - before for before, after in timed)


def report(pairs: Sequence[tuple[Run, Run]]) -> Iterator[str]:
  """The table over all pairs (ours, MaxText's).

  Raises:
    SystemExit: the two sides did not do the same work.
  """
  for ours, theirs in pairs:
    for what in ("parameters", "positions"):
      if getattr(ours, what) != getattr(theirs, what):
        sys.exit(f"not the same work: {what} {getattr(ours, what)} here, {getattr(theirs, what)} in MaxText's")
  ours, theirs = pairs[0]
  yield ""
  yield f"both sides: {ours.parameters:,} parameters, {ours.positions:,} positions a step, padding included"
  for name, run in (("ours", ours), ("MaxText", theirs)):
    yield (
      f"{name:<8} {run.tokens:,.0f} tokens a step without padding, {run.trained_tokens:,.0f} of them trained;"
      f" loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f} in {len(run.losses)} steps"
    )
  yield ""
  columns = "{:<24} {:>30} {:>30} {:>22}  {}"
  yield columns.format("median [least .. most]", "ours", "MaxText", "ratio ours/MaxText", "goal").rstrip()
  for measure in _MEASURES:
    one, other = [measure.value(run) for run, _ in pairs], [measure.value(run) for _, run in pairs]
    ratio = Spread.of([a / b for a, b in zip(one, other, strict=True)])
    cells = (Spread.of(one).text(measure.decimals), Spread.of(other).text(measure.decimals), ratio.text(2))
    yield columns.format(measure.label, *cells, measure.goal).rstrip()


if __name__ == "__main__":
  main()
