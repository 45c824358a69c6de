"""MaxText's items as a HuggingFace folder that transformers and vLLM load."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from maxtext_posttrain.config import Config, load_model_config
from maxtext_posttrain.errors import ConfigError, ModelError
from maxtext_posttrain.logs import quiet_imports
from maxtext_posttrain.models.architecture import Architecture
from maxtext_posttrain.models.families import EMBEDDING, HEAD
from maxtext_posttrain.models.huggingface_config import huggingface_config
from maxtext_posttrain.models.maxtext_config import from_maxtext
from maxtext_posttrain.models.new_folder import new_folder
from maxtext_posttrain.models.safetensors_files import DTYPES, PlannedTensor, plan_shards, write_json, write_shards
from maxtext_posttrain.models.source import find_source
from maxtext_posttrain.models.tensor_source import tokenizer_size
from maxtext_posttrain.models.tokenizer_files import write_tokenizer
from maxtext_posttrain.models.weights import Weight, huggingface_tensors, list_weights

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_LISTED = 8
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclasses.dataclass(frozen=True)
class Exported:
  """What an export wrote.

  Attributes:
    folder: where.
    architecture: the model.
    tensors: how many.
    size: their bytes.
    shards: number of weight files.
    notes: what a user should know, one line each.
  """

  folder: Path
  architecture: Architecture
  tensors: int
  size: int
  shards: int
  notes: tuple[str, ...]


def parse_size(text: str) -> int:
  """`200MB` or `2GiB` as bytes.

  Raises:
    ConfigError: it is no size.
  """
  match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
  unit = _UNITS.get(match[2].upper()) if match else None
  size = int(float(match[1]) * unit) if match and unit else 0
  if size < 1:
    raise ConfigError(f"--max-shard-size {text}: give bytes or a number with {', '.join(filter(None, _UNITS))}")
  return size


def export_model(
  path: str,
  out: str,
  *,
  config: str | None = None,
  dtype: str | None = None,
  max_shard_size: int = 5 * 10**9,
  base: str | None = None,
) -> Exported:
  """Writes a HuggingFace folder from MaxText's items; a LoRA adapter's are merged with its base's.

  Args:
    path: a run's folder, its `checkpoints`, a step's folder or its `items`, or what an import wrote.
    out: a folder that does not exist yet.
    config: the model's YAML, where it does not lie beside the weights.
    dtype: of the tensors; the weights' own if left out.
    max_shard_size: bytes of tensors in one file.
    base: where an adapter's base lies now, if not where the adapter's checkpoint says.

  Raises:
    ModelError: the model has no HuggingFace form, the weights do not fit the configuration, or `out` exists or cannot
      be written.
    ConfigError: no configuration is found, or it is wrong.
    CheckpointError: the weights cannot be read.
  """
  target = Path(out).expanduser().absolute()
  if target.exists():
    raise ModelError(f"{target} exists; name a folder that does not")
  source = find_source(path, config)
  settings = load_model_config([str(source.config)])
  architecture = from_maxtext(settings, str(source.config))
  with quiet_imports(show=False):
    from maxtext_posttrain.models.loading import full_parameters

  parameters, scan_layers = full_parameters(source, settings, base=base)
  scan_axis = settings.param_scan_axis
  weights = list_weights(architecture.family, architecture.dimensions, scan_layers=scan_layers)
  _check_parameters(str(source.items), weights, parameters, scan_axis, source.config)
  architecture = _tied_if_equal(architecture, parameters)
  dimensions = architecture.dimensions
  planned = [
    PlannedTensor(weight.name, weight.shape)
    for weight in list_weights(architecture.family, dimensions, scan_layers=scan_layers)
  ]
  kind = _dtype(dtype, parameters)
  shards = plan_shards(planned, DTYPES[kind], max_shard_size)
  with new_folder(target, sum(math.prod(tensor.shape) for tensor in planned) * DTYPES[kind].itemsize) as folder:
    ids, notes = write_tokenizer(settings, folder)
    _check_vocabulary(settings, folder, dimensions.vocab)
    model_ids = {key: value for key, value in ids.items() if key in _IDS}
    write_json(folder / "config.json", {**huggingface_config(architecture, dtype=kind), **model_ids})
    write_json(folder / "generation_config.json", ids)
    tensors = huggingface_tensors(
      parameters,
      architecture.family,
      dimensions,
      scan_layers=scan_layers,
      scan_axis=scan_axis,
      dtype=DTYPES[kind],
    )
    size = write_shards(folder, shards, DTYPES[kind], tensors)
  return Exported(target, architecture, len(planned), size, len(shards), tuple(notes))


def _dtype(asked: str | None, parameters: Mapping[tuple[str, ...], np.ndarray]) -> str:
  """The type to write: what was asked for, or what the weights are stored in."""
  if asked is not None:
    return asked
  stored = {str(array.dtype) for array in parameters.values()}
  return stored.pop() if len(stored) == 1 and stored <= DTYPES.keys() else "float32"


def _check_parameters(
  where: str,
  weights: list[Weight],
  parameters: Mapping[tuple[str, ...], np.ndarray],
  scan_axis: int,
  config: Path,
) -> None:
  """Whether the items hold what the configuration says, and nothing else.

  Raises:
    ModelError: names what is missing, left over or of another shape.
  """
  wanted = {weight.path: weight.parameter_shape(scan_axis) for weight in weights}
  names = {path: "/".join(path) for path in {*wanted, *parameters}}
  problems = [f"{names[path]} is missing" for path in wanted if path not in parameters]
  problems += [
    f"{names[path]} has shape {parameters[path].shape}, {shape} is needed"
    for path, shape in wanted.items()
    if path in parameters and parameters[path].shape != shape
  ]
  problems += [f"{names[path]} has no place in the model" for path in parameters if path not in wanted]
  if problems:
    more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    raise ModelError(f"{where} is not the model of {config}: {'; '.join(problems[:_LISTED])}{more}")


def _tied_if_equal(architecture: Architecture, parameters: Mapping[tuple[str, ...], np.ndarray]) -> Architecture:
  """A head that equals the embedding table, as an import with `--untie` leaves it, is written tied again."""
  if architecture.dimensions.tied:
    return architecture
  paths = {rule.huggingface: tuple(rule.maxtext.split("/")) for rule in architecture.family.rules}
  head, table = parameters[paths[HEAD]], parameters[paths[EMBEDDING]]
  if not np.array_equal(head.T, table):
    return architecture
  return dataclasses.replace(architecture, dimensions=dataclasses.replace(architecture.dimensions, tied=True))


def _check_vocabulary(settings: Config, folder: Path, vocab: int) -> None:
  size = tokenizer_size(folder)
  if size is not None and size > vocab:
    raise ModelError(
      f"tokenizer {settings.tokenizer_path} has {size} ids, the model {vocab} (vocab_size): they do not belong together"
    )
