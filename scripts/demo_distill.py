"""`make demo-distill`: half the layers of a real model learn what all of them say.

SmolLM2-135M-Instruct comes from a GGUF file and is the teacher; the student starts as 15 of its 30 layers and learns
the teacher's next-token distributions on GSM8K's problems. Each part is a command that could be typed; it is printed
before it runs, and the first that fails ends the demo. At the end stand the figures.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from demo_steps import POSTTRAIN, Timed, find_gguf

from maxtext_posttrain.config import load_config
from maxtext_posttrain.report import read_metrics

_DEMO = "demo-distill"
_MODEL = Path("runs/smollm2-teacher")
_CONFIG = _MODEL / "distill.yml"


def main() -> int:
  """Runs the demo; returns the exit code."""
  started = time.monotonic()
  timed = Timed(_DEMO)
  timed.run("import", POSTTRAIN, "import", find_gguf(_DEMO), _MODEL)
  _CONFIG.write_text("base_config: [demo/distill_smollm2.yml, model.yml]\n", encoding="utf-8")
  config = load_config([str(_CONFIG)], trainer="distill")
  teacher = config.teacher
  assert teacher is not None
  run = Path(config.base_output_directory) / config.run_name
  timed.run("distillation", sys.executable, "-m", "train_distill", _CONFIG)
  required = ["layout=maxtext", "resumable=true", f"step={config.steps}", "optimizer=adamw", "scan_layers=true"]
  timed.run("inspect", POSTTRAIN, "inspect", run, "--require", *required)

  records = list(read_metrics(run / "metrics.jsonl"))
  held_out = [record for record in records if record["kind"] == "eval"]
  updates = sorted(record["step_seconds"] for record in records if record["kind"] == "train")
  print(f"\nSmolLM2-135M-Instruct: {teacher.base_num_decoder_layers} layers teach {config.base_num_decoder_layers}")
  print(f"{config.steps} steps of {config.per_device_batch_size:g} x {config.max_target_length} positions")
  print(f"held out, {held_out[0]['trained_tokens']:,} tokens:")
  for record in held_out:
    print(
      f"  step {record['step']:>3}: KL from the teacher {record['kl']:.4f}, the same likeliest token"
      f" {record['teacher_agreement']:.1%}, cross-entropy {record['cross_entropy']:.3f}"
    )
  print(f"  the teacher's own cross-entropy {held_out[0]['teacher_cross_entropy']:.3f}")
  print(f"a step {updates[len(updates) // 2]:.1f} s (median)")
  print(", ".join(f"{name} {seconds:.0f} s" for name, seconds in timed.seconds.items()))
  print(f"from start to end {time.monotonic() - started:.0f} s")
  if not held_out[-1]["kl"] < held_out[0]["kl"]:
    print(f"error: {_DEMO}: the held-out KL did not fall")
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main())
