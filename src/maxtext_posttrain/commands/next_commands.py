"""The commands that lead on from a checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxtext_posttrain.checkpointing.diagnosis import FULL_STATE, PARAMETERS, RUN_NAME
from maxtext_posttrain.checkpointing.inspection import Inspection
from maxtext_posttrain.config.saved import MODEL_CONFIG, RUN_CONFIG
from maxtext_posttrain.errors import ConfigError
from maxtext_posttrain.handback import PRETRAINING_MODULE, Way, base_config, pretraining_arguments

_MORE_STEPS = 1000
_MODEL_KEYS = "<the model's keys>"
_DATA_KEYS = "<your data's keys>"


def next_commands(inspection: Inspection) -> list[tuple[str, str]]:
  """What can be done with a checkpoint: a name and a command line each.

  What only the user knows stands in angle brackets: the data pre-training is to read, and the model's keys where no
  configuration lies beside the checkpoint.
  """
  return list(_commands(inspection))


def _commands(inspection: Inspection) -> Iterator[tuple[str, str]]:
  if inspection.diagnosis is None:
    return
  root = str(inspection.location.root)
  config = _config_beside(inspection)
  if inspection.layout == "tunix":
    target = f"{root}-maxtext" if inspection.location.run is None else f"{inspection.location.run}-maxtext"
    yield "convert", shlex.join(["posttrain", "convert", root, target]) + f" --config {_quoted(config, '<its YAML>')}"
    return
  if inspection.layout == "adapter":
    yield from _adapter_commands(inspection, root, config)
    return
  for way in (RUN_NAME, FULL_STATE, PARAMETERS):
    if inspection.diagnosis.verdict(way).answer == "yes":
      yield f"pre-train ({way})", _pretraining(inspection, way, config)
  if inspection.diagnosis.verdict(PARAMETERS).answer != "yes":
    return
  path = root if inspection.location.run is None or not inspection.location.newest else str(inspection.location.run)
  tools = {
    "generate": "--prompt Hello",
    "eval": "--data <a .jsonl, .json or .parquet file>",
    "export": shlex.quote(f"{path}-hf"),
  }
  for name, arguments in tools.items():
    command = f"{shlex.join(['posttrain', name, path])} {arguments}"
    yield name, command if config is not None else f"{command} --config <its YAML>"


def _adapter_commands(inspection: Inspection, root: str, config: Path | None) -> Iterator[tuple[str, str]]:
  """What can be done with an adapter: all of it reads the base too."""
  run = inspection.location.run
  path = root if run is None or not inspection.location.newest else str(run)
  tail = "" if config is not None else " --config <its YAML>"
  yield "merge", shlex.join(["posttrain", "merge", path, f"{path}-merged"]) + tail
  yield "generate", shlex.join(["posttrain", "generate", path, "--prompt", "Hello"]) + tail
  yield "export (merged)", shlex.join(["posttrain", "export", path, f"{path}-hf"]) + tail
  yield "export (PEFT)", shlex.join(["posttrain", "export", path, f"{path}-peft", "--adapter"]) + tail


def _config_beside(inspection: Inspection) -> Path | None:
  """The configuration a run or an import left near the step."""
  root = Path(str(inspection.location.root))
  for folder in (inspection.location.run, root.parent, root.parent.parent):
    for name in (RUN_CONFIG, MODEL_CONFIG):
      if folder is not None and (path := Path(str(folder)) / name).is_file():
        return path
  return None


def _quoted(path: Path | None, otherwise: str) -> str:
  return otherwise if path is None else shlex.quote(str(path))


def _pretraining(inspection: Inspection, way: Way, config: Path | None) -> str:
  location = inspection.location
  step = inspection.step or 0
  steps = _MORE_STEPS + (0 if way == PARAMETERS else step)
  overrides = _overrides(config)
  start = ["python", "-m", PRETRAINING_MODULE]
  if overrides is not None and location.run is not None and overrides.get("base_output_directory"):
    folder = location.folder_step or 0
    base = {**overrides, "base_output_directory": str(location.run.parent)}
    arguments = pretraining_arguments(base, way=way, run_name=location.run.name, step=folder, steps=steps)
    return f"{shlex.join([*start, *arguments])} {_DATA_KEYS}"
  keys: dict[str, Any] = {}
  if inspection.scan_layers is not None:
    keys["scan_layers"] = str(inspection.scan_layers).lower()
  if way == RUN_NAME and location.run is not None:
    keys["base_output_directory"] = location.run.parent
    keys["run_name"] = location.run.name
  else:
    keys["run_name"] = "<a new name>"
    keys[way] = location.root / "items"
  if way != PARAMETERS and inspection.diagnosis is not None and inspection.diagnosis.optimizer is not None:
    keys["opt_type"] = inspection.diagnosis.optimizer.name
  keys["steps"] = steps
  named = " ".join(f"{key}={value if '<' in str(value) else shlex.quote(str(value))}" for key, value in keys.items())
  return f"{shlex.join([*start, str(base_config())])} {_MODEL_KEYS} {named} {_DATA_KEYS}"


def _overrides(config: Path | None) -> dict[str, Any] | None:
  """The MaxText keys that a configuration sets; None where it no longer holds."""
  from maxtext_posttrain.config import load_model_config

  if config is None:
    return None
  try:
    return load_model_config([str(config)]).maxtext_overrides()
  except ConfigError:
    return None
