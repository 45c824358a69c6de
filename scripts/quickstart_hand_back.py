"""Second half of `make quickstart`: the unmodified pre-training of MaxText resumes the SFT run that was just made.

It goes on in the same run, at its step and with its optimizer, on the conversations' answers as plain text, and this
script prints where one ended and the other went on.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from maxtext_posttrain.config import load_config
from maxtext_posttrain.handback import PRETRAINING_MODULE, pretraining_arguments
from maxtext_posttrain.report import read_metrics
from maxtext_posttrain.tokenizers.files import local_path

CONFIG = "configs/quickstart/sft.yml"
MORE_STEPS = 5


def write_text(source: Path, target: Path) -> None:
  """The assistant's answers of a JSONL file of conversations, for pre-training's own pipeline."""
  conversations = [json.loads(line)["messages"] for line in source.read_text(encoding="utf-8").splitlines()]
  answers = [message["content"] for messages in conversations for message in messages if message["role"] == "assistant"]
  pq.write_table(pa.table({"text": answers}), target)


def main() -> int:
  """Runs pre-training and prints the hand-over; returns its exit code."""
  config = load_config([CONFIG, *sys.argv[1:]])
  run = Path(config.base_output_directory).absolute() / config.run_name
  last = [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"][-1]
  step = last["step"]
  text = run / "pretraining_text.parquet"
  write_text(Path(config.hf_train_files), text)
  overrides = {
    **config.maxtext_overrides(),
    "base_output_directory": str(Path(config.base_output_directory).absolute()),
  }
  arguments = [
    *pretraining_arguments(overrides, way="run_name", run_name=config.run_name, step=step, steps=step + MORE_STEPS),
    "dataset_type=grain",
    "grain_file_type=parquet",
    f"grain_train_files={text}",
    "grain_worker_count=0",
    "num_epoch=100",
    f"tokenizer_path={local_path(config.tokenizer_path)}",
    f"tokenizer_type={config.tokenizer_type}",
  ]
  print(f"\npre-training resumes the run {config.run_name} at step {step}: python -m {PRETRAINING_MODULE} base.yml ...")
  environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
  process = subprocess.run(
    [sys.executable, "-m", PRETRAINING_MODULE, *arguments],
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
  )
  (run / "pretraining.log").write_text(process.stdout, encoding="utf-8")
  steps = [
    (int(step), float(loss)) for step, loss in re.findall(r"completed step: (\d+),.*? loss: ([\d.]+)", process.stdout)
  ]
  if process.returncode or not steps or steps[0][0] != step:
    print(process.stdout[-3000:])
    print(f"error: pre-training did not resume at step {step}; its output is in {run / 'pretraining.log'}")
    return process.returncode or 1
  print(f"SFT ended at step {step}: loss {last['loss']:.3f} on the answers")
  print("untrained weights would begin near ln 32000 = 10.4")
  for number, loss in steps:
    print(f"pre-training, step {number + 1}: loss {loss:.3f} on the answers as plain text")
  print(f"SFT wrote {run / 'checkpoints' / str(step) / 'items'}; pre-training went on in {run / 'checkpoints'}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
