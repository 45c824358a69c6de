"""Distillation here against TRL's `GKDTrainer`: start-up, step, compilation, peak memory.

  python benchmarks/distillation_step.py --pairs 3

A student of half the layers learns, with the forward KL alone, from a teacher with random float32 weights. Both sides
have the same sizes, positions and optimizer, and run in processes of their own, in alternation. MaxText's own
`train_distill` is started first, to see whether it runs with the installed Tunix; what it says is printed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from _common import write_chats, write_tokenizer
from _contest import (
  GSM8K,
  REPOSITORY,
  RUN_KEYS,
  TORCH_PYTHON,
  Contest,
  maxtext_config,
  print_machine,
  probed,
  torch_side,
)
from _runs import FIRST_TIMED_STEP
from _shapes import SHAPES, model_tflops

_MAXTEXT_MODULE = "maxtext.trainers.post_train.distillation.train_distill"
_MAXTEXT_SECONDS = 180
_DATA_KEYS = frozenset({"run_name", "hf_path", "train_split", "tokenizer_type"})
_DISTILL_KEYS = {
  "train_data_columns": "[messages]",
  "packing": "true",
  "sft_train_on_completion_only": "true",
  "distill_alpha": "1.0",
  "distill_temperature": "1.0",
}


def main(arguments: Sequence[str] | None = None) -> None:
  options = _parse(arguments)
  if not options.data.is_file():
    sys.exit(f"{options.data}: no such file; --data names question/answer rows as JSONL")
  trl = torch_side("TRL", options.torch_python, "_gkd_side.py")
  print_machine(options.torch_python, warm_cache=False)
  shape = dict(SHAPES[options.model])
  layers = int(shape["base_num_decoder_layers"])
  with tempfile.TemporaryDirectory(prefix="distillation_step-") as name:
    folder = Path(name)
    sizes = {**shape, **RUN_KEYS, "max_target_length": str(options.length)}
    if options.batch is not None:
      sizes["per_device_batch_size"] = str(options.batch)
    own = {key: value for key, value in sizes.items() if key not in _DATA_KEYS}
    items = _random_teacher(folder, own)
    if not options.no_maxtext:
      print(f"MaxText   {_maxtexts_own(folder, own, items)}", flush=True)
    chats, tokenizer = folder / "train.jsonl", folder / "tokenizer"
    write_chats(options.data, chats)
    write_tokenizer(options.data, tokenizer)
    keys = {
      **sizes,
      **_DISTILL_KEYS,
      "hf_train_files": str(chats),
      "tokenizer_path": str(tokenizer),
      "steps": str(options.steps),
      "student_overrides.base_num_decoder_layers": str(layers // 2),
      "teacher_overrides.load_parameters_path": str(items),
    }
    ours = probed("ours", "train_distill", REPOSITORY / "configs" / "distillation.yml")
    contest = Contest(folder, ours, [trl], keys, warm_cache=False)
    contest.run(options.pairs)
  student = model_tflops({**keys, "base_num_decoder_layers": str(layers // 2)})
  print(f"\nteacher of {layers} layers, student of {layers // 2}; the TFLOPs of a step are those of both")
  # The teacher goes forward only: a third of forward and backward.
  contest.report(student + model_tflops(keys) / 3, options.output)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description="Distillation here against TRL's GKDTrainer, in alternation.")
  parser.add_argument("--model", choices=SHAPES, default="10m", help="the teacher (default 10m)")
  parser.add_argument("--pairs", type=int, default=3, help="runs of each side (default 3)")
  parser.add_argument("--steps", type=int, default=20, help="updates of a run (default 20; those from 3 on are timed)")
  parser.add_argument("--batch", type=int, help="sequences of a step (default: 8 of 10m, 4 of smollm2-shape)")
  parser.add_argument("--length", type=int, default=256, help="tokens of a sequence (default 256)")
  parser.add_argument("--no-maxtext", action="store_true", help="do not try MaxText's own train_distill")
  data = GSM8K / "train.jsonl"
  parser.add_argument("--data", type=Path, default=data, help="question/answer rows as JSONL (default: GSM8K)")
  parser.add_argument(
    "--torch-python", type=Path, default=TORCH_PYTHON, help="an interpreter with TRL (default: make torch-env's)"
  )
  parser.add_argument("--output", type=Path, help="also write all runs to this file as JSON")
  options = parser.parse_args(arguments)
  if options.pairs < 1 or options.steps < FIRST_TIMED_STEP:
    parser.error(f"--pairs must be at least 1 and --steps at least {FIRST_TIMED_STEP}")
  return options


def _run(
  module: str, config: Path, keys: Mapping[str, str], folder: Path, timeout: float | None = None
) -> tuple[int, str]:
  command = [sys.executable, "-m", module, str(config), *(f"{key}={value}" for key, value in keys.items())]
  result = subprocess.run(
    command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=timeout
  )
  return result.returncode, result.stdout


def _random_teacher(folder: Path, sizes: Mapping[str, str]) -> Path:
  """A step's items with the weights that one update of SFT on random tokens leaves."""
  own = {"run_name": "teacher", "base_output_directory": str(folder), "steps": "1", "dataset_type": "synthetic"}
  own["enable_checkpointing"] = "true"
  code, output = _run("train_sft", REPOSITORY / "configs" / "sft.yml", {**sizes, **own}, folder)
  if code:
    sys.exit(f"{output}\nthe teacher: exit code {code}")
  return folder / "teacher" / "checkpoints" / "1" / "items"


def _maxtexts_own(folder: Path, sizes: Mapping[str, str], items: Path) -> str:
  """What becomes of MaxText's own `train_distill`, in words."""
  config = maxtext_config("distillation.yml")
  # Its teacher is configured without the command line's keys, so all of them go into a file.
  own = {"base_output_directory": str(folder), "run_name": "maxtexts", "steps": "3", "dataset_type": "synthetic"}
  own |= {
    "tokenizer_type": "sentencepiece",
    "tokenizer_path": str(config.parents[2] / "assets/tokenizers/tokenizer.llama2"),
  }
  lines = [f"base_config: {config}", *(f"{key}: {value}" for key, value in {**sizes, **own}.items())]
  lines += ["student_overrides: {model_name: default}"]
  lines += [f"teacher_overrides: {{model_name: default, load_parameters_path: {items}}}"]
  path = folder / "maxtexts.yml"
  path.write_text("\n".join(lines) + "\n", encoding="utf-8")
  try:
    code, output = _run(_MAXTEXT_MODULE, path, {}, folder, timeout=_MAXTEXT_SECONDS)
  except subprocess.TimeoutExpired:
    return f"its train_distill did not end within {_MAXTEXT_SECONDS} s for 3 steps"
  if not code:
    return "its train_distill ran to its end"
  errors = [line for line in output.splitlines() if "Error" in line]
  return f"its train_distill fails: {errors[-1].strip() if errors else f'exit code {code}'}"


if __name__ == "__main__":
  main()
