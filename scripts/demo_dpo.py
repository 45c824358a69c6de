"""`make demo-dpo`: SmolLM2-135M-Instruct learns to prefer right solutions of GSM8K's problems to wrong ones.

The pairs come from `preferences.jsonl`; every fifth is held out, and these say, before the first update and after the
last, how often the model ranks the right solution first. What is trained is an adapter, merged into full weights. Each
part is a command that could be typed; it is printed before it runs, and the first that fails ends the demo. At the end
stand the figures.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from demo_steps import POSTTRAIN, Timed, configure_smollm2

from maxtext_posttrain.report import read_metrics

_DEMO = "demo-dpo"
_PAIRS = Path("../shared/data/gsm8k/preferences.jsonl")
_PARTS = Path("runs/dpo_pairs")
_MERGED = Path("runs/dpo_smollm2-merged")
_HELD_OUT_EVERY = 5
_LONGEST = 420
"""Characters of a prompt with its longer completion: short pairs are many in the minutes there are."""
_SHOWN = ("loss", "rewards/accuracies", "rewards/margins", "logps/accuracies", "logps/chosen", "logps/rejected")


def part_pairs() -> None:
  """Parts the short pairs into those for training and every fifth, which is held out.

  Whose solutions a pair holds changes along the file, so its last ones would be pairs of another kind.

  Raises:
    SystemExit: they are not there.
  """
  if not _PAIRS.is_file():
    sys.exit(f"error: demo-dpo: {_PAIRS}: no such file")
  lines = [line for line in _PAIRS.read_text(encoding="utf-8").splitlines(keepends=True) if _is_short(json.loads(line))]
  _PARTS.mkdir(parents=True, exist_ok=True)
  held_out = lines[::_HELD_OUT_EVERY]
  train = [line for place, line in enumerate(lines) if place % _HELD_OUT_EVERY]
  (_PARTS / "train.jsonl").write_text("".join(train), encoding="utf-8")
  (_PARTS / "held_out.jsonl").write_text("".join(held_out), encoding="utf-8")


def _is_short(pair: Mapping[str, str]) -> bool:
  return len(pair["prompt"]) + max(len(pair[name]) for name in ("chosen", "rejected")) <= _LONGEST


def main() -> int:
  """Runs the demo; returns the exit code."""
  started = time.monotonic()
  timed = Timed(_DEMO)
  part_pairs()
  path, config = configure_smollm2(timed, _DEMO, "dpo_smollm2.yml", "dpo")
  run = Path(config.base_output_directory) / config.run_name
  timed.run("DPO", sys.executable, "-m", "train_dpo", path)
  timed.run("inspect", POSTTRAIN, "inspect", run, "--require", "layout=adapter", f"step={config.steps}")
  timed.run("merge", POSTTRAIN, "merge", run, _MERGED)

  records = list(read_metrics(run / "metrics.jsonl"))
  before, after = (record for record in records if record["kind"] == "eval")
  updates = sorted(record["step_seconds"] for record in records if record["kind"] == "train")
  pairs = sum(record["pairs"] for record in records if record["kind"] == "train")
  print(f"\n{config.steps} updates, {pairs:,.0f} pairs; held out, {before['pairs']:,} pairs, before and after:")
  for name in _SHOWN:
    print(f"  {name:<20} {before[name]:>10.4f} -> {after[name]:.4f}")
  print(f"a step {updates[len(updates) // 2]:.1f} s (median)")
  print(", ".join(f"{name} {seconds:.0f} s" for name, seconds in timed.seconds.items()))
  print(f"from start to end {time.monotonic() - started:.0f} s")
  # The start's rewards are ties, of which none is right; a coin would be right in half.
  if not after["rewards/accuracies"] > max(before["rewards/accuracies"], 0.5):
    print("error: demo-dpo: the held-out reward ranks the right solution first no more often than a coin")
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main())
