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
from collections.abc import Sequence
from pathlib import Path

from _bench import BENCHMARKS, REPOSITORY, Bench, Side, measured_peak_tflops, probed
from _runs import FIRST_TIMED_STEP, Hardware, Run, report
from _shapes import SHAPES, model_tflops

_DATA = REPOSITORY.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
_TORCH_PYTHON = REPOSITORY / ".venv-torch" / "bin" / "python"
_PACKAGES = ("maxtext", "google-tunix", "jax", "flax", "optax", "transformers", "datasets", "grain")
_TORCH_PACKAGES = ("torch", "trl", "transformers", "accelerate")
_RIVALS = ("maxtext", "trl")

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


def main(arguments: Sequence[str] | None = None) -> None:
  options = _parse(arguments)
  if not options.data.is_file():
    sys.exit(f"{options.data}: no such file; --data names question/answer rows as JSONL")
  ours = probed("ours", "train_sft", REPOSITORY / "configs" / "sft.yml")
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
      peaks.append(measured_peak_tflops())
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


def _rival(name: str, torch_python: Path) -> Side:
  if name == "maxtext":
    return probed("MaxText", "maxtext.trainers.post_train.sft.train_sft", _maxtext_config())
  if not torch_python.is_file():
    sys.exit(f"{torch_python}: no such interpreter; make torch-env makes one with TRL, --torch-python names another")
  return Side("TRL", torch_python.absolute(), BENCHMARKS / "_trl_side.py")


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


if __name__ == "__main__":
  main()
