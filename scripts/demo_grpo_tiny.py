"""`make demo-grpo-tiny`: a small model that SFT left half way learns to add from rewards alone.

For each seed a tiny model is made by SFT on sums of three one-digit numbers, and GRPO with an exact-answer reward goes
on from it. Greedy accuracy on 200 held-out sums is measured by the trainer as it starts and as it goes; the demo fails
where it rises by less than 30 points.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

from maxtext_posttrain.report import read_metrics

_SFT = "configs/demo/grpo_tiny_sft.yml"
_GRPO = "configs/demo/grpo_tiny.yml"
_SFT_STEPS = 200
_LEAST_LIFT = 0.30


def main() -> None:
  """Runs the demo; leaves with 1 where a seed did not learn enough."""
  parser = argparse.ArgumentParser(description="A tiny model learns sums by GRPO, once for each seed.")
  parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
  parser.add_argument("--output", type=Path, default=Path("runs"), help="where the runs go")
  options = parser.parse_args()
  rows = [_learn(seed, options.output) for seed in range(options.seeds)]
  print("\nseed  before  after   lift    seconds of GRPO")
  for seed, (accuracies, seconds) in enumerate(rows):
    before, after = accuracies[0], accuracies[-1]
    print(f"{seed:<4}  {before:6.1%}  {after:6.1%}  {after - before:+6.1%}  {seconds:.0f}")
  print("\nheld-out accuracy by evaluation: ")
  for seed, (accuracies, _) in enumerate(rows):
    print(f"  seed {seed}: {' '.join(f'{accuracy:.3f}' for accuracy in accuracies)}")
  if any(accuracies[-1] - accuracies[0] < _LEAST_LIFT for accuracies, _ in rows):
    sys.exit(f"error: demo-grpo-tiny: a seed gained less than {_LEAST_LIFT:.0%}")


def _learn(seed: int, output: Path) -> tuple[list[float], float]:
  """One seed's greedy accuracies on the held-out sums, from GRPO's start on, and how long GRPO took."""
  places = [f"base_output_directory={output}", "enable_tensorboard=false"]
  seeds = [f"init_weights_seed={seed}", f"data_shuffle_seed={seed}"]
  sft, grpo = f"grpo_tiny_sft_{seed}", f"grpo_tiny_{seed}"
  _run("train_sft", _SFT, f"run_name={sft}", *places, *seeds)
  items = output / sft / "checkpoints" / str(_SFT_STEPS) / "items"
  started = time.monotonic()
  _run(
    "train_grpo", _GRPO, f"run_name={grpo}", *places, *seeds, f"rollout_seed={seed}", f"load_parameters_path={items}"
  )
  seconds = time.monotonic() - started
  records = read_metrics(output / grpo / "metrics.jsonl")
  return [record["reward/exact_answer"] for record in records if record["kind"] == "eval"], seconds


def _run(module: str, *arguments: str) -> None:
  print(f"\n$ {shlex.join(['python', '-m', module, *arguments])}", flush=True)
  result = subprocess.run([sys.executable, "-m", module, *arguments], check=False)
  if result.returncode:
    sys.exit(f"error: demo-grpo-tiny: {module} failed with exit code {result.returncode}")


if __name__ == "__main__":
  main()
