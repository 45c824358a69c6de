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
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from _common import write_chats, write_tokenizer
from _contest import (
  GSM8K,
  REPOSITORY,
  RUN_KEYS,
  TORCH_PYTHON,
  Contest,
  Side,
  maxtext_config,
  print_machine,
  probed,
  torch_side,
)
from _runs import FIRST_TIMED_STEP
from _shapes import SHAPES, model_tflops

_RIVALS = ("maxtext", "trl")
_SFT_KEYS = {"train_data_columns": "[messages]", "packing": "true", "sft_train_on_completion_only": "true"}


def main(arguments: Sequence[str] | None = None) -> None:
  options = _parse(arguments)
  if not options.data.is_file():
    sys.exit(f"{options.data}: no such file; --data names question/answer rows as JSONL")
  ours = probed("ours", "train_sft", REPOSITORY / "configs" / "sft.yml")
  rivals = [_rival(name, options.torch_python) for name in options.rivals]
  print_machine(options.torch_python if "trl" in options.rivals else None, warm_cache=options.warm_cache)
  keys = _keys(options)
  with tempfile.TemporaryDirectory(prefix="sft_step-") as folder:
    chats, tokenizer = Path(folder, "train.jsonl"), Path(folder, "tokenizer")
    write_chats(options.data, chats)
    write_tokenizer(options.data, tokenizer)
    keys |= {"hf_train_files": str(chats), "tokenizer_path": str(tokenizer)}
    contest = Contest(Path(folder), ours, rivals, keys, warm_cache=options.warm_cache)
    contest.run(options.pairs)
  contest.report(model_tflops(keys), options.output)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description="SFT here against MaxText's own train_sft or TRL's, in alternation.")
  parser.add_argument("--rivals", default="maxtext", metavar="LIST", help=f"of {','.join(_RIVALS)} (default maxtext)")
  parser.add_argument("--model", choices=SHAPES, default="10m", help="what is trained (default 10m)")
  parser.add_argument("--pairs", type=int, default=5, help="runs of each side (default 5)")
  parser.add_argument("--steps", type=int, default=20, help="updates of a run (default 20; those from 3 on are timed)")
  parser.add_argument("--batch", type=int, help="sequences of a step (default: 8 of 10m, 4 of smollm2-shape)")
  parser.add_argument("--length", type=int, default=256, help="tokens of a sequence (default 256)")
  parser.add_argument("--warm-cache", action="store_true", help="each side finds its compilation cache filled")
  parser.add_argument(
    "--data", type=Path, default=GSM8K / "train.jsonl", help="question/answer rows as JSONL (default: GSM8K)"
  )
  parser.add_argument(
    "--torch-python", type=Path, default=TORCH_PYTHON, help="an interpreter with TRL (default: make torch-env's)"
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
  return {**SHAPES[options.model], **RUN_KEYS, **_SFT_KEYS, **sizes, **dict(key.split("=", 1) for key in options.keys)}


def _rival(name: str, torch_python: Path) -> Side:
  if name == "maxtext":
    return probed("MaxText", "maxtext.trainers.post_train.sft.train_sft", maxtext_config("sft.yml"))
  return torch_side("TRL", torch_python, "_trl_side.py")


if __name__ == "__main__":
  main()
