"""MaxText's own pre-training, unmodified, of the model that an SFT's configuration describes.

  python end_to_end/pretrain.py CONFIG [key=value ...] --run-name NAME --log FILE [--data "key=value"]

CONFIG and the keys are an SFT's; `steps`, `load_parameters_path` and `load_full_state_path` among them are
pre-training's. Shown are its steps; all that it prints is in FILE.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

from maxtext_posttrain.config import load_config
from maxtext_posttrain.handback import PRETRAINING_MODULE, base_config, without_post_training

_PRETRAINING = ("steps", "load_parameters_path", "load_full_state_path")
_LINES_OF_A_FAILURE = 15


def main() -> int:
  """Runs pre-training; returns its exit code."""
  parser = argparse.ArgumentParser(description="MaxText's pre-training of the model of an SFT's configuration.")
  parser.add_argument("config", help="the SFT's YAML")
  parser.add_argument("keys", nargs="*", metavar="key=value", help="the SFT's keys")
  parser.add_argument("--run-name", required=True, help="of the pre-training run")
  parser.add_argument("--log", type=Path, required=True, help="where its output goes")
  parser.add_argument("--data", default="dataset_type=synthetic", help="MaxText's keys of the data")
  options = parser.parse_intermixed_args()
  config = load_config([options.config, *options.keys, f"run_name={options.run_name}"])
  given = config.maxtext_overrides()
  keys = without_post_training(given) | {key: given[key] for key in _PRETRAINING if given.get(key)}
  keys["run_name"] = options.run_name
  arguments = [f"{key}={_argument(value)}" for key, value in keys.items()] + shlex.split(options.data)
  command = [sys.executable, "-m", PRETRAINING_MODULE, str(base_config()), *arguments]
  last: deque[str] = deque(maxlen=_LINES_OF_A_FAILURE)
  with (
    options.log.open("w", encoding="utf-8") as log,
    subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as process,
  ):
    assert process.stdout is not None
    for line in process.stdout:
      log.write(line)
      last.append(line)
      start = line.find("completed step:")
      if start >= 0:
        print(f"pre-training, {line[start:].strip().rstrip(',')}", flush=True)
  if process.returncode:
    print(f"{''.join(last)}error: pre-training failed; its output is in {options.log}", file=sys.stderr)
  return process.returncode


def _argument(value: Any) -> str:
  if isinstance(value, bool):
    return str(value).lower()
  return json.dumps(value) if isinstance(value, (list, dict)) else str(value)


if __name__ == "__main__":
  sys.exit(main())
