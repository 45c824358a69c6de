"""DPO here against TRL's `DPOTrainer` or MaxText's own `train_dpo`: start-up, step, compilation, memory.

  python benchmarks/dpo_step.py --pairs 3
  python benchmarks/dpo_step.py --rival maxtext

As `sft_step.py`, with a frozen reference beside the policy on all sides. By default every completion is longer than the
sequence, so that all sides compute the same [2 * batch, length] positions and cut what is left over (MaxText pads the
prompt to half of them). With `--real` the pairs are GSM8K's as they are, packed here and padded there, and what counts
is the trained tokens per second.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from _common import write_tokenizer
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

_RIVALS = ("trl", "maxtext")
_DPO_KEYS = {
  "dpo.algo": "dpo",
  "dpo.dpo_beta": "0.1",
  "train_data_columns": "[prompt,chosen,rejected]",
}
# MaxText's adapter for Tunix knows models by name alone, so both sides train this one's architecture.
_NAMED_MODEL = {"model_name": "qwen3-0.6b", "decoder_block": "qwen3"}
_COPIES = 12
"""Solutions joined to one completion, so that no completion is short."""


def main(arguments: Sequence[str] | None = None) -> None:
  options = _parse(arguments)
  print_machine(options.torch_python if options.rival == "trl" else None, warm_cache=options.warm_cache)
  keys = _keys(options)
  ours = probed("ours", "train_dpo", REPOSITORY / "configs" / "dpo.yml")
  with tempfile.TemporaryDirectory(prefix="dpo_step-") as folder:
    pairs, tokenizer = Path(folder, "pairs.jsonl"), Path(folder, "tokenizer")
    write_pairs(options.data, pairs, real=options.real)
    write_tokenizer(GSM8K / "train.jsonl", tokenizer)
    keys |= {"hf_train_files": str(pairs), "tokenizer_path": str(tokenizer)}
    contest = Contest(
      Path(folder), ours, [_rival(options.rival, options.torch_python)], keys, warm_cache=options.warm_cache
    )
    contest.run(options.pairs)
  # Two sequences a pair, and a third of a forward and backward pass for the reference's forward.
  contest.report(2 * (1 + 1 / 3) * model_tflops(keys), options.output, same_positions=not options.real)


def write_pairs(source: Path, target: Path, *, real: bool) -> None:
  """Writes preference rows as they are, or each completion followed by those of the rows behind it."""
  with source.open(encoding="utf-8") as lines:
    rows = [json.loads(line) for line in lines]
  copies = 1 if real else _COPIES
  with target.open("w", encoding="utf-8") as output:
    for index in range(len(rows)):
      joined = [rows[(index + offset) % len(rows)] for offset in range(copies)]
      row = {name: "\n".join(each[name] for each in joined) for name in ("chosen", "rejected")}
      row["prompt"] = rows[index]["prompt"]
      output.write(json.dumps(row) + "\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description="DPO here against TRL's or MaxText's own, in alternation.")
  parser.add_argument("--rival", choices=_RIVALS, default="trl", help="against whom (default trl)")
  parser.add_argument("--model", choices=SHAPES, default="10m", help="what is trained (default 10m)")
  parser.add_argument("--pairs", type=int, default=3, help="runs of each side (default 3)")
  parser.add_argument("--steps", type=int, default=12, help="updates of a run (default 12; those from 3 on are timed)")
  parser.add_argument("--batch", type=int, default=4, help="preference pairs (or packed rows) of a step (default 4)")
  parser.add_argument("--length", type=int, default=256, help="tokens of a sequence, half of them the prompt's")
  parser.add_argument("--real", action="store_true", help="pairs of their own lengths")
  parser.add_argument("--warm-cache", action="store_true", help="each side finds its compilation cache filled")
  data = GSM8K / "preferences.jsonl"
  parser.add_argument("--data", type=Path, default=data, help="preference rows as JSONL (default: GSM8K's)")
  parser.add_argument(
    "--torch-python", type=Path, default=TORCH_PYTHON, help="an interpreter with TRL (default: make torch-env's)"
  )
  parser.add_argument("--output", type=Path, help="also write all runs to this file as JSON")
  parser.add_argument("keys", nargs="*", metavar="key=value", help="MaxText keys for all sides")
  options = parser.parse_args(arguments)
  if options.pairs < 1:
    parser.error("--pairs must be at least 1")
  if options.steps < FIRST_TIMED_STEP:
    parser.error(f"--steps must be at least {FIRST_TIMED_STEP}: steps from there on are timed")
  if bad := [key for key in options.keys if "=" not in key]:
    parser.error(f"{bad[0]}: keys are given as key=value")
  if not options.data.is_file():
    sys.exit(f"{options.data}: no such file; --data names prompt/chosen/rejected rows as JSONL")
  return options


def _keys(options: argparse.Namespace) -> dict[str, str]:
  return {
    **SHAPES[options.model],
    **(_NAMED_MODEL if options.rival == "maxtext" else {}),
    **RUN_KEYS,
    **_DPO_KEYS,
    "packing": "true" if options.real and options.rival == "trl" else "false",
    "dpo.max_prompt_length": str(options.length // 2),
    "steps": str(options.steps),
    "max_target_length": str(options.length),
    "per_device_batch_size": str(options.batch),
    **dict(key.split("=", 1) for key in options.keys),
  }


def _rival(name: str, torch_python: Path) -> Side:
  if name == "maxtext":
    return probed("MaxText", "maxtext.trainers.post_train.dpo.train_dpo", maxtext_config("dpo.yml"))
  return torch_side("TRL", torch_python, "_trl_dpo_side.py")


if __name__ == "__main__":
  main()
