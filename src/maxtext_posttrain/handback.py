"""The command with which real pre-training goes on from a post-trained checkpoint."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
  from maxtext_posttrain.config import Config

Way = Literal["run_name", "load_full_state_path", "load_parameters_path"]

PRETRAINING_MODULE = "maxtext.trainers.pre_train.train"

_POST_TRAINING_KEYS = frozenset(
  {
    "use_sft",
    "use_dpo",
    "dpo",
    "use_tunix_gradient_accumulation",
    "sft_train_on_completion_only",
    "dataset_type",
    "train_split",
    "train_data_columns",
    "eval_data_columns",
    "tokenizer_path",
    "tokenizer_type",
    "num_epoch",
    "packing",
    "eval_interval",
    "eval_steps",
    "steps",
    "run_name",
    "load_parameters_path",
    "load_full_state_path",
    "lora",
    "offline_data_dir",
  }
)
_POST_TRAINING_PREFIXES = ("hf_", "grain_", "distill_", "chat_template", "formatting_", "data_shuffle_", "enable_data_")


def pretraining_command(
  config: Config,
  *,
  step: int,
  steps: int,
  way: Way = "run_name",
  new_run_name: str | None = None,
  data: Mapping[str, Any],
) -> list[str]:
  """The command with which pre-training goes on from a post-trained run, in this Python.

  Args:
    config: the run's configuration; its model, optimizer and tokenizer are pre-training's too.
    step: the checkpoint's step.
    steps: the step at which pre-training is to end; with the run's name at least two more.
    way: see `pretraining_arguments`.
    new_run_name: likewise.
    data: MaxText's keys of the data pre-training reads, and any others; they win.

  Returns:
    `[python, "-m", "maxtext.trainers.pre_train.train", base.yml, key=value, ...]`.
  """
  from maxtext_posttrain.tokenizers.files import local_path

  overrides = config.maxtext_overrides()
  directory = str(overrides["base_output_directory"])
  if "://" not in directory:
    overrides["base_output_directory"] = str(Path(directory).absolute())
  arguments = pretraining_arguments(
    overrides, way=way, run_name=config.run_name, step=step, steps=steps, new_run_name=new_run_name
  )
  tokens: dict[str, Any] = {}
  if config.tokenizer_path:
    tokens = {"tokenizer_path": local_path(config.tokenizer_path), "tokenizer_type": config.tokenizer_type}
  last = {**tokens, **data}
  kept = [argument for argument in arguments if argument.split("=")[0] not in last]
  return [sys.executable, "-m", PRETRAINING_MODULE, *kept, *(f"{key}={_argument(last[key])}" for key in last)]


def pretraining_arguments(
  overrides: Mapping[str, Any],
  *,
  way: Way,
  run_name: str,
  step: int,
  steps: int,
  new_run_name: str | None = None,
  role: str = "",
) -> list[str]:
  """Arguments of `python -m maxtext.trainers.pre_train.train` for the same model and optimizer, without data.

  Args:
    overrides: the MaxText keys the post-training run set; `base_output_directory` among them.
    way: how pre-training finds the checkpoint: by the run's name (everything, in the same folder), or from a path into
      another run (`load_full_state_path` keeps step and optimizer, `load_parameters_path` takes the weights alone).
    run_name: the post-trained run.
    step: the checkpoint's step.
    steps: the step at which pre-training is to end.
    new_run_name: the pre-training run's name, for the ways that take a path.
    role: the folder between `checkpoints` and the step, with its slash; pre-training looks into none by a run's name.

  Returns:
    MaxText's base.yml and `key=value` arguments; the data's keys are for the caller to add.
  """
  kept = without_post_training(overrides)
  kept["steps"] = steps
  if way == "run_name":
    kept["run_name"] = run_name
  else:
    kept["run_name"] = new_run_name or f"{run_name}-pretraining"
    base = str(overrides["base_output_directory"]).rstrip("/")
    kept[way] = f"{base}/{run_name}/checkpoints/{role}{step}/items"
  return [str(base_config()), *(f"{key}={_argument(value)}" for key, value in kept.items())]


def without_post_training(keys: Mapping[str, Any]) -> dict[str, Any]:
  """The keys that are not of a post-training run's task, data, length or name."""
  return {
    key: value
    for key, value in keys.items()
    if key not in _POST_TRAINING_KEYS and not key.startswith(_POST_TRAINING_PREFIXES)
  }


def base_config() -> Path:
  """MaxText's base.yml, found without importing MaxText.

  Raises:
    ModuleNotFoundError: maxtext is not installed.
  """
  spec = importlib.util.find_spec("maxtext")
  if spec is None or not spec.submodule_search_locations:
    raise ModuleNotFoundError("maxtext is not installed")
  return Path(spec.submodule_search_locations[0]) / "configs" / "base.yml"


def _argument(value: Any) -> str:
  """A value as MaxText's command line reads it."""
  if value is None:
    return "null"
  if isinstance(value, bool):
    return str(value).lower()
  return json.dumps(value) if isinstance(value, (list, tuple, dict)) else str(value)
