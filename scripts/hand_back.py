"""The unmodified pre-training of MaxText resumes an SFT run that was just made.

  python scripts/hand_back.py CONFIG [--steps N] [key=value ...]

CONFIG and the keys are the SFT's. Pre-training goes on in the same run, at its step and with its optimizer, on the
answers of the training data as plain text, and this script prints where one ended and the other went on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from maxtext_posttrain.config import load_config
from maxtext_posttrain.handback import PRETRAINING_MODULE, pretraining_command
from maxtext_posttrain.report import read_metrics

_MOST_ROWS = 1000


def answers(source: Path, columns: Sequence[str]) -> Iterator[str]:
  """What the assistant says in a JSONL file: in a column of messages, or the second of two columns."""
  with source.open(encoding="utf-8") as lines:
    for line in lines:
      row = json.loads(line)
      if len(columns) == 2:
        yield row[columns[1]]
      else:
        yield from (message["content"] for message in row[columns[0]] if message["role"] == "assistant")


def main() -> int:
  """Runs pre-training and prints the hand-over; returns its exit code."""
  parser = argparse.ArgumentParser(description="MaxText's pre-training resumes an SFT run.")
  parser.add_argument("config", help="the SFT's YAML")
  parser.add_argument("keys", nargs="*", metavar="key=value", help="the keys the SFT was given")
  parser.add_argument("--steps", type=int, default=5, help="updates of pre-training (default 5)")
  options = parser.parse_intermixed_args()
  config = load_config([options.config, *options.keys])
  run = Path(config.base_output_directory).absolute() / config.run_name
  last = [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"][-1]
  step = last["step"]
  text = run / "pretraining_text.parquet"
  rows = itertools.islice(answers(Path(config.hf_train_files), config.train_data_columns), _MOST_ROWS)
  pq.write_table(pa.table({"text": list(rows)}), text)
  command = pretraining_command(
    config,
    step=step,
    steps=step + options.steps,
    data={
      "dataset_type": "grain",
      "grain_file_type": "parquet",
      "grain_train_files": text,
      "grain_worker_count": 0,
      "num_epoch": 100,
    },
  )
  print(f"\npre-training resumes the run {config.run_name} at step {step}: python -m {PRETRAINING_MODULE} ...")
  environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
  process = subprocess.run(
    command,
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
  if process.returncode or [number for number, _ in steps] != list(range(step, step + options.steps)):
    print(process.stdout[-3000:])
    print(f"error: pre-training did not resume at step {step}; its output is in {run / 'pretraining.log'}")
    return process.returncode or 1
  print(f"SFT ended at step {step}: loss {last['loss']:.3f} on the answers")
  print(f"untrained weights would begin near ln {config.vocab_size} = {math.log(config.vocab_size):.1f}")
  for number, loss in steps:
    print(f"pre-training, step {number + 1}: loss {loss:.3f} on the answers as plain text")
  print(f"SFT wrote {run / 'checkpoints' / str(step) / 'items'}; pre-training went on in {run / 'checkpoints'}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
