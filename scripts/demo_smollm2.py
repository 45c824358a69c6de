"""`make demo-smollm2`: real weights in, a few steps of SFT, and out again to everyone who could want them.

SmolLM2-135M-Instruct comes from a GGUF file, learns from GSM8K's problems for some steps, and goes to transformers (in
.venv-torch) and back to the unmodified pre-training of MaxText. Each part is a command that could be typed; it is
printed before it runs, and the first that fails ends the demo. At the end stand the figures.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from demo_steps import POSTTRAIN, Timed, find_gguf

from maxtext_posttrain.config import load_config
from maxtext_posttrain.report import read_metrics

_DEMO = "demo-smollm2"
_TORCH_PYTHON = Path(".venv-torch/bin/python")
_MODEL = Path("runs/smollm2")
_CONFIG = _MODEL / "sft.yml"
_EXPORT = Path("runs/sft_smollm2-hf")
_PRETRAINING_STEPS = 2
_CAPITAL = "What is the capital of France?"


def main() -> int:
  """Runs the demo; returns the exit code."""
  started = time.monotonic()
  timed = Timed(_DEMO)
  timed.run("import", POSTTRAIN, "import", find_gguf(_DEMO), _MODEL)
  _CONFIG.write_text("base_config: [demo/sft_smollm2.yml, model.yml]\n", encoding="utf-8")
  config = load_config([str(_CONFIG)])
  run = Path(config.base_output_directory) / config.run_name
  timed.run("SFT", sys.executable, "-m", "train_sft", _CONFIG)
  required = ["layout=maxtext", "resumable=true", f"step={config.steps}", "optimizer=adamw", "scan_layers=true"]
  timed.run("inspect", POSTTRAIN, "inspect", run, "--require", *required)
  timed.run("export", POSTTRAIN, "export", run, _EXPORT)
  with Path(config.hf_eval_files).open(encoding="utf-8") as rows:
    problem = json.loads(next(rows))["question"]
  answer = ["scripts/transformers_answer.py", _EXPORT, _CAPITAL, problem]
  loaded = json.loads(timed.run("transformers", _TORCH_PYTHON, *answer, capture=True))
  for question, text in zip((_CAPITAL, problem), loaded["answers"], strict=True):
    print(f"> {question}\n{text}")
  resume = ["scripts/hand_back.py", _CONFIG, "--steps", str(_PRETRAINING_STEPS)]
  timed.run("pre-training", sys.executable, *resume)

  records = list(read_metrics(run / "metrics.jsonl"))
  before, after = (record for record in records if record["kind"] == "eval")
  updates = sorted(record["step_seconds"] for record in records if record["kind"] == "train")
  tied = "tied" if loaded["tied"] else "untied"
  print(f"\nSmolLM2-135M-Instruct, {loaded['parameters']:,} weights, embeddings {tied}")
  print(f"{config.steps} steps of {config.per_device_batch_size:g} x {config.max_target_length} positions")
  print(f"held out, {before['trained_tokens']:,} trained tokens, before the first step and after the last:")
  for name in ("loss", "perplexity"):
    print(f"  {name} {before[name]:.4f} -> {after[name]:.4f}")
  print(f"a step {updates[len(updates) // 2]:.1f} s (median)")
  print(", ".join(f"{name} {seconds:.0f} s" for name, seconds in timed.seconds.items()))
  print(f"from start to end {time.monotonic() - started:.0f} s")
  if not after["loss"] < before["loss"]:
    print(f"error: {_DEMO}: the held-out loss did not fall")
    return 1
  if "Paris" not in loaded["answers"][0]:
    print(f"error: {_DEMO}: transformers does not answer as it should: {loaded['answers'][0]}")
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main())
