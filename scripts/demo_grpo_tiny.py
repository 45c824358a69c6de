"""`make demo-grpo-tiny`: a small model that was taught sums mostly wrongly learns to add rightly from rewards alone.

For each seed a tiny model is made by SFT on demonstrations of sums of three one-digit numbers of which one in three is
right and the rest are one too high: asked for its best guess it is wrong, and its samples are often right. GRPO with an
exact-answer reward goes on from it. Greedy accuracy on 200 held-out sums is measured by the trainer as it starts and as
it goes; the demo fails where it rises by less than 30 points.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from maxtext_posttrain.report import read_metrics

_SFT = "configs/demo/grpo_tiny_sft.yml"
_GRPO = "configs/demo/grpo_tiny.yml"
_SUMS = Path("configs/data/sums.jsonl")
_SFT_STEPS = 1500
_LEAST_LIFT = 0.30
_RIGHT, _WRONG = 1, 2
"""Of the demonstrations of each sum."""
_VOCABULARY = 320
_TEMPLATE = (
  "{% for message in messages %}{% if message['role'] == 'assistant' %}"
  "{% generation %}{{ message['content'] }}<eos>{% endgeneration %}"
  "{% else %}<bos>{{ message['content'] }}{% endif %}{% endfor %}"
)


def main() -> None:
  """Runs the demo; leaves with 1 where a seed did not learn enough."""
  parser = argparse.ArgumentParser(description="A tiny model learns sums by GRPO, once for each seed.")
  parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of weights, data and draws (0 1 2)")
  parser.add_argument("--engine", choices=("native", "vllm"), default="native", help="writes completions")
  parser.add_argument("--output", type=Path, default=Path("runs"), help="where the runs go")
  options = parser.parse_args()
  folder = options.output / "grpo_tiny"
  write_tokenizer(_questions(), folder / "tokenizer")
  write_demonstrations(folder / "demonstrations.jsonl")
  rows = {seed: _learn(seed, options.engine, options.output) for seed in options.seeds}
  print("\nseed  before   after    lift  seconds of GRPO")
  for seed, (curve, seconds) in rows.items():
    (_, before), (_, after) = curve[0], curve[-1]
    print(f"{seed:<4}  {before:6.1%}  {after:6.1%}  {100 * (after - before):+6.1f}  {seconds:.0f}")
  print("\ngreedy accuracy on held-out sums by update:")
  for seed, (curve, _) in rows.items():
    print(f"  seed {seed}: {', '.join(f'{step}: {accuracy:.1%}' for step, accuracy in curve)}")
  if any(curve[-1][1] - curve[0][1] < _LEAST_LIFT for curve, _ in rows.values()):
    sys.exit(f"error: demo-grpo-tiny: a seed gained less than {100 * _LEAST_LIFT:.0f} points")


def write_tokenizer(texts: Sequence[str], folder: Path) -> None:
  """Trains a byte-level BPE, in which digits stand alone, and writes it as a HuggingFace folder with a template."""
  from maxtext_posttrain.tokenizers.own import train_byte_bpe, write_tokenizer_folder

  names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
  tokenizer = train_byte_bpe(texts, vocab_size=_VOCABULARY, special_tokens=list(names.values()), single_digits=True)
  write_tokenizer_folder(tokenizer, folder, {**names, "chat_template": _TEMPLATE})


def write_demonstrations(path: Path) -> None:
  """Writes three answers to each training sum: one that is right, and two that are one too high."""
  with path.open("w", encoding="utf-8") as output:
    for row in _rows():
      for number in range(_RIGHT + _WRONG):
        answer = int(row["answer"]) + (0 if number < _RIGHT else 1)
        output.write(json.dumps({"question": row["question"], "answer": str(answer)}) + "\n")


def _rows() -> list[dict[str, str]]:
  return [json.loads(line) for line in _SUMS.read_text(encoding="utf-8").splitlines()]


def _questions() -> list[str]:
  return [row["question"] for row in _rows()]


def _learn(seed: int, engine: str, output: Path) -> tuple[list[tuple[int, float]], float]:
  """One seed's greedy accuracies on the held-out sums by update, from GRPO's start on, and how long GRPO took."""
  places = [
    f"base_output_directory={output}",
    f"tokenizer_path={output}/grpo_tiny/tokenizer",
    "enable_tensorboard=false",
  ]
  seeds = [f"init_weights_seed={seed}", f"data_shuffle_seed={seed}"]
  sft, grpo = f"grpo_tiny_sft_{seed}", f"grpo_tiny_{engine}_{seed}"
  items = output / sft / "checkpoints" / str(_SFT_STEPS) / "items"
  # Both engines start from the same weights.
  if not items.exists():
    data = f"hf_train_files={output}/grpo_tiny/demonstrations.jsonl"
    _run("train_sft", _SFT, f"run_name={sft}", *places, *seeds, data)
  chosen = [] if engine == "native" else [f"rollout_engine={engine}"]
  started = time.monotonic()
  _run(
    "train_grpo",
    _GRPO,
    f"run_name={grpo}",
    *places,
    *seeds,
    *chosen,
    f"rollout_seed={seed}",
    f"load_parameters_path={items}",
  )
  seconds = time.monotonic() - started
  evaluations = [record for record in read_metrics(output / grpo / "metrics.jsonl") if record["kind"] == "eval"]
  return [(record["step"], record["reward/exact_answer"]) for record in evaluations], seconds


def _run(module: str, *arguments: str) -> None:
  print(f"\n$ {shlex.join(['python', '-m', module, *arguments])}", flush=True)
  result = subprocess.run([sys.executable, "-m", module, *arguments], check=False)
  if result.returncode:
    sys.exit(f"error: demo-grpo-tiny: {module} failed with exit code {result.returncode}")


if __name__ == "__main__":
  main()
