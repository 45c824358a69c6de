"""Full weights of a LoRA run written as MaxText's items, and read back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from maxtext_posttrain.config import Config, load_model_config
from maxtext_posttrain.config.saved import MODEL_CONFIG
from maxtext_posttrain.errors import ModelError
from maxtext_posttrain.handback import without_post_training
from maxtext_posttrain.lora.kernels import adapted_kernels
from maxtext_posttrain.lora.weights import Parameters
from maxtext_posttrain.models.items import read_parameters, write_items
from maxtext_posttrain.models.loading import read_adapter_of
from maxtext_posttrain.models.new_folder import new_folder
from maxtext_posttrain.models.source import find_source

_TOKENIZER_KEYS = ("tokenizer_type", "tokenizer_path", "chat_template", "chat_template_path")
_RUN_ONLY = ("base_output_directory", "lora_fresh_base")


@dataclasses.dataclass(frozen=True)
class Merged:
  """What a merge wrote.

  Attributes:
    items: the weights.
    kernels: how many kernels had an adapter.
    parameters: numbers in all weights.
    notes: what a user should know, one line each.
  """

  items: Path
  kernels: int
  parameters: int
  notes: tuple[str, ...]


def merge_adapter(path: str, out: str, *, base: str | None = None, config: str | None = None) -> Merged:
  """Writes `out/0/items` and `out/model.yml` from a LoRA run.

  Args:
    path: a run's folder, its `checkpoints`, a step's folder or its `items`.
    out: a folder that does not exist yet.
    base: where the base lies now, if not where the adapter's checkpoint says.
    config: the run's YAML, where it does not lie above the weights.

  Raises:
    ModelError: `out` exists or can't be written, or what was written reads back otherwise.
    CheckpointError: adapter or base can't be read, or do not belong together.
    ConfigError: no configuration is found, or it is wrong.
  """
  target = Path(out).expanduser().absolute()
  if target.exists():
    raise ModelError(f"{target} exists; name a folder that does not")
  source = find_source(path, config)
  settings = load_model_config([str(source.config)])
  adapter = read_adapter_of(source, settings, base=base)
  merged = adapter.merged()
  with new_folder(target, sum(array.nbytes for array in merged.values())) as folder:
    write_items(folder / "0", merged, scan_layers=adapter.scan_layers)
    _check_written(folder / "0", merged)
    keys = _model_keys(settings, target)
    text = f"# Merged from {path}. Lay it over a trainer's configuration:\n#   base_config: [sft.yml, <this file>]\n\n"
    text += yaml.safe_dump(keys, sort_keys=False, allow_unicode=True, width=1000)
    (folder / MODEL_CONFIG).write_text(text, encoding="utf-8")
  notes = []
  if adapter.record.weight_qtype is not None:
    notes.append(
      f"the kernels with an adapter are those of the {adapter.record.weight_qtype} base, dequantised: what was trained"
    )
  kernels = len(list(adapted_kernels(adapter.adapter)))
  return Merged(target / "0" / "items", kernels, sum(array.size for array in merged.values()), tuple(notes))


def _check_written(step: Path, merged: Parameters) -> None:
  written, _ = read_parameters(str(step))
  for path, array in merged.items():
    other = written.get(path)
    if other is None or other.dtype != array.dtype or not np.array_equal(_words(other), _words(array)):
      raise ModelError(f"{step}: {'/'.join(path)} reads back otherwise than it was written; is the disk sound?")


def _words(array: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(array).view(np.uint8)


def _model_keys(settings: Config, target: Path) -> dict[str, Any]:
  """The run's keys that are of the model and its tokenizer, and where the merged weights will lie."""
  chosen = settings.chosen()
  keys = {key: value for key, value in without_post_training(chosen).items() if key not in _RUN_ONLY}
  keys |= {key: chosen[key] for key in _TOKENIZER_KEYS if chosen.get(key)}
  for key in ("tokenizer_path", "chat_template", "chat_template_path"):
    value = str(keys.get(key, ""))
    if value and "\n" not in value and "://" not in value and len(value) < 4096 and Path(value).exists():
      keys[key] = str(Path(value).absolute())
  if "dataset_type" in chosen:
    keys["dataset_type"] = chosen["dataset_type"]
  keys["load_parameters_path"] = str(target / "0" / "items")
  return keys
