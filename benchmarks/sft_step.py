"""SFT here against MaxText's own `train_sft` and TRL's `SFTTrainer`: start-up, step, compilation, memory.

  python benchmarks/sft_step.py --pairs 5
  python benchmarks/sft_step.py --rivals trl --model smollm2-shape

All sides train the same model on the same chats with the same tokenizer and keys, each run in a process of its own that
starts with an empty JAX compilation cache. The sides alternate, and which of them begins alternates too. Printed are
all sides' medians with smallest and largest value, and the ratio ours / the rival's of each pair likewise: times
depend on the machine, ratios much less. Keys after the options go to all sides (`remat_policy=full`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from _common import write_chats, write_tokenizer
from _runs import FIRST_TIMED_STEP, Hardware, Run, report
from _shapes import SHAPES, model_tflops

_REPOSITORY = Path(__file__).resolve().parents[1]
_BENCHMARKS = Path(__file__).parent
_DATA = _REPOSITORY.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
_TORCH_PYTHON = _REPOSITORY / ".venv-torch" / "bin" / "python"
_PACKAGES = ("maxtext", "google-tunix", "jax", "flax", "optax", "transformers", "datasets", "grain")
_TORCH_PACKAGES = ("torch", "trl", "transformers", "accelerate")
_RIVALS = ("maxtext", "trl")
_LOG_TAIL = 30

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
  """A contender.

  Attributes:
    name: in the tables.
    script: run as `interpreter script RESULT.json *arguments key=value ...`; writes what `_probe.py` writes.
  """

  name: str
  interpreter: Path
  script: Path
  arguments: tuple[str, ...] = ()


def main(arguments: Sequence[str] | None = None) -> None:
  options = _parse(arguments)
  if not options.data.is_file():
    sys.exit(f"{options.data}: no such file; --data names question/answer rows as JSONL")
  ours = _probed("ours", "train_sft", _REPOSITORY / "configs" / "sft.yml")
  rivals = [_rival(name, options.torch_python) for name in options.rivals]
  _print_machine(options)
  keys = _keys(options)
  with tempfile.TemporaryDirectory(prefix="sft_step-") as folder:
    bench = Bench(Path(folder), options.data, keys, warm_cache=options.warm_cache)
    if options.warm_cache:
      for side in (ours, *rivals):
        bench.run(side, "fills its compilation cache, not counted")
    rounds: list[dict[Side, Run]] = []
    peaks = []
    for number in range(1, options.pairs + 1):
      order = (ours, *rivals) if number % 2 else (*rivals, ours)
      rounds.append({side: bench.run(side, f"pair {number} of {options.pairs}") for side in order})
      peaks.append(_peak_tflops())
  hardware = Hardware(model_tflops(keys), max(peaks))
  print(
    f"\npeak      {hardware.peak_tflops:.4f} TFLOP/s, the best square float32 matrix product in JAX;"
    f" a step is {hardware.step_tflops:.4f} TFLOPs of the model"
  )
  for rival in rivals:
    for line in report(rival.name, [(runs[ours], runs[rival]) for runs in rounds], hardware):
      print(line)
  if options.output:
    raw = [{side.name.lower(): vars(run) for side, run in runs.items()} for runs in rounds]
    options.output.write_text(json.dumps({**vars(hardware), "pairs": raw}, indent=1), encoding="utf-8")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description="SFT here against MaxText's own train_sft or TRL's, in alternation.")
  parser.add_argument("--rivals", default="maxtext", metavar="LIST", help=f"of {','.join(_RIVALS)} (default maxtext)")
  parser.add_argument("--model", choices=SHAPES, default="10m", help="what is trained (default 10m)")
  parser.add_argument("--pairs", type=int, default=5, help="runs of each side (default 5)")
  parser.add_argument("--steps", type=int, default=20, help="updates of a run (default 20; those from 3 on are timed)")
  parser.add_argument("--batch", type=int, help="sequences of a step (default: 8 of 10m, 4 of smollm2-shape)")
  parser.add_argument("--length", type=int, default=256, help="tokens of a sequence (default 256)")
  parser.add_argument("--warm-cache", action="store_true", help="each side finds its compilation cache filled")
  parser.add_argument("--data", type=Path, default=_DATA, help="question/answer rows as JSONL (default: GSM8K)")
  parser.add_argument(
    "--torch-python", type=Path, default=_TORCH_PYTHON, help="an interpreter with TRL (default: make torch-env's)"
  )
  parser.add_argument("--output", type=Path, help="also write all runs to this file as JSON")
  parser.add_argument("keys", nargs="*", metavar="key=value", help="MaxText keys for all sides")
  options = parser.parse_args(arguments)
  options.rivals = options.rivals.split(",")
  if unknown := [name for name in options.rivals if name not in _RIVALS]:
    parser.error(f"--rivals {unknown[0]}: there are {', '.join(_RIVALS)}")
  if options.pairs < 1:
    parser.error("--pairs must be at least 1")
  if options.steps < FIRST_TIMED_STEP:
    parser.error(f"--steps must be at least {FIRST_TIMED_STEP}: steps from there on are timed")
  if bad := [key for key in options.keys if "=" not in key]:
    parser.error(f"{bad[0]}: keys are given as key=value")
  return options


def _keys(options: argparse.Namespace) -> dict[str, str]:
  sizes = {"steps": str(options.steps), "max_target_length": str(options.length)}
  if options.batch is not None:
    sizes["per_device_batch_size"] = str(options.batch)
  return {**SHAPES[options.model], **_RUN_KEYS, **sizes, **dict(key.split("=", 1) for key in options.keys)}


def _probed(name: str, module: str, config: Path) -> Side:
  """A trainer on Tunix's loop: what `python -m module config` runs, observed."""
  return Side(name, Path(sys.executable), _BENCHMARKS / "_probe.py", (module, str(config)))


def _rival(name: str, torch_python: Path) -> Side:
  if name == "maxtext":
    return _probed("MaxText", "maxtext.trainers.post_train.sft.train_sft", _maxtext_config())
  if not torch_python.is_file():
    sys.exit(f"{torch_python}: no such interpreter; make torch-env makes one with TRL, --torch-python names another")
  return Side("TRL", torch_python.absolute(), _BENCHMARKS / "_trl_side.py")


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
  if "trl" in options.rivals:
    code = f"import importlib.metadata as m; print(', '.join(f'{{p}} {{m.version(p)}}' for p in {_TORCH_PACKAGES}))"
    print(f"TRL's     {subprocess.check_output([options.torch_python, '-c', code], text=True).strip()}")
  print(f"cache     JAX compilation cache {cache}", flush=True)


def _peak_tflops() -> float:
  return float(subprocess.check_output([sys.executable, _BENCHMARKS / "_peak.py"], text=True))


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


if __name__ == "__main__":
  main()
