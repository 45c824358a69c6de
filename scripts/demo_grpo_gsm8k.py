"""`make demo-grpo-gsm8k`: GRPO of SmolLM2-135M-Instruct on GSM8K's problems with the native engine, every phase timed.

A dozen updates are few for a model of this size: what the demo shows is that every part works at a real model's sizes,
what each costs, and how rewards went, whichever way. Each part is a command that could be typed; it is printed before
it runs, and the first that fails ends the demo. The curves and phases are on the run's page too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo_steps import POSTTRAIN, Timed, configure_smollm2

from maxtext_posttrain.report import read_metrics

_DEMO = "demo-grpo-gsm8k"
_REWARDS = ("reward", "reward/exact_answer", "reward/marked_answer", "reward/finished")
_PHASES = {
  "weight_transfer_seconds": "weights",
  "rollout_seconds": "completions",
  "reward_seconds": "rewards",
  "log_prob_seconds": "log-probs",
}


def main() -> int:
  """Runs the demo; returns the exit code."""
  started = time.monotonic()
  timed = Timed(_DEMO)
  path, config = configure_smollm2(timed, _DEMO, "grpo_gsm8k.yml", "grpo")
  run = Path(config.base_output_directory) / config.run_name
  timed.run("GRPO", sys.executable, "-m", "train_grpo", path)
  timed.run("inspect", POSTTRAIN, "inspect", run, "--require", "layout=adapter", f"step={config.steps}")

  records = list(read_metrics(run / "metrics.jsonl"))
  train = [record for record in records if record["kind"] == "train"]
  before, after = (record for record in records if record["kind"] == "eval")
  print("\nupdate  reward   exact  marked  finished   tokens |   weights  completions  rewards  log-probs   update, s")
  for record in train:
    print(_line(record))
  middle = sorted(train[1:], key=lambda record: record["step_seconds"])[len(train[1:]) // 2]
  share = middle["weight_transfer_seconds"] / middle["step_seconds"]
  print(
    f"\na step {middle['step_seconds']:.1f} s (median after the first), weight transfer {100 * share:.1f} % of it;"
    f" {middle['rollout_tokens_per_second']:.0f} tokens a second written"
  )
  print(f"held out, {before['prompts']:,} problems answered greedily, before and after:")
  for name in _REWARDS:
    print(f"  {name:<22} {before[name]:.3f} -> {after[name]:.3f}")
  print(f"report: {run / 'report.html'}")
  print(", ".join(f"{name} {seconds:.0f} s" for name, seconds in timed.seconds.items()))
  print(f"from start to end {time.monotonic() - started:.0f} s")
  return 0


def _line(record: Mapping[str, Any]) -> str:
  phases = [record[name] for name in _PHASES]
  # What the next rollout waits for is this update; the last one is told by nobody.
  update = record["step_seconds"] - sum(phases)
  rewards = [record[name] for name in _REWARDS]
  return (
    f"{record['step']:>6}  {rewards[0]:6.3f}  {rewards[1]:6.3f}  {rewards[2]:6.3f}  {rewards[3]:8.3f}"
    f"  {record['completion_tokens_mean']:7.1f} | {phases[0]:9.3f}  {phases[1]:11.2f}  {phases[2]:7.3f}"
    f"  {phases[3]:9.2f}  {update:9.2f}"
  )


if __name__ == "__main__":
  sys.exit(main())
