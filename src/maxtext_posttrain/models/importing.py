"""HuggingFace folders and GGUF files into MaxText's items, with a configuration to lay over a trainer's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from maxtext_posttrain.config.saved import MODEL_CONFIG
from maxtext_posttrain.errors import ModelError
from maxtext_posttrain.logs import quiet_imports
from maxtext_posttrain.models.architecture import Architecture
from maxtext_posttrain.models.families import EMBEDDING, GEMMA2, GEMMA3, HEAD
from maxtext_posttrain.models.huggingface_config import from_huggingface
from maxtext_posttrain.models.maxtext_config import maxtext_keys
from maxtext_posttrain.models.new_folder import new_folder
from maxtext_posttrain.models.safetensors_files import DTYPES
from maxtext_posttrain.models.tensor_source import TensorSource, check_tensors, open_source, tokenizer_size
from maxtext_posttrain.models.weights import Weight, list_weights, scale_factor, to_maxtext

SCAN_AXIS = 1
"""MaxText's `param_scan_axis`, which its base.yml sets to 1."""

TOKENIZER_FOLDER = "tokenizer"


@dataclasses.dataclass(frozen=True)
class Imported:
  """What an import wrote.

  Attributes:
    folder: where.
    architecture: the model.
    parameters: number of weights.
    notes: what a user should know, one line each.
  """

  folder: Path
  architecture: Architecture
  parameters: int
  notes: tuple[str, ...]


def import_model(
  source: str, out: str, *, scan_layers: bool = True, dtype: str = "float32", untie: bool = False
) -> Imported:
  """Writes `out/0/items`, `out/model.yml` and `out/tokenizer/`.

  Args:
    source: a HuggingFace folder or a GGUF file.
    out: a folder that does not exist yet.
    scan_layers: layers stacked, as MaxText's default has them.
    dtype: of the weights on disk and of computation: `float32` or `bfloat16`.
    untie: give a model with tied embeddings a head of its own. MaxText rounds a tied head to bfloat16.

  Raises:
    ModelError: the source is broken or of no known family, or `out` exists or cannot be written.
  """
  target = Path(out).expanduser().absolute()
  if target.exists():
    raise ModelError(f"{target} exists; name a folder that does not")
  model = open_source(source)
  architecture = from_huggingface(model.config(), f"{model.where}: config.json")
  if untie:
    architecture = _untied(architecture)
  weights = list_weights(architecture.family, architecture.dimensions, scan_layers=scan_layers)
  tensors = model.tensors()
  tied_source = untie and HEAD not in tensors.shapes()
  needed = [weight for weight in weights if not (tied_source and weight.name == HEAD)]
  check_tensors(tensors, needed, architecture.family.name, tied=architecture.dimensions.tied)
  _check_tied_head(tensors, architecture)
  count = sum(math.prod(weight.shape) for weight in weights)
  with new_folder(target, count * DTYPES[dtype].itemsize) as folder:
    tokenizer = folder / TOKENIZER_FOLDER
    tokenizer.mkdir()
    missing = model.write_tokenizer(tokenizer)
    size = tokenizer_size(tokenizer)
    if size is not None and size > architecture.dimensions.vocab:
      raise ModelError(
        f"{model.where}: its tokenizer has {size} ids, the model {architecture.dimensions.vocab} (vocab_size): they do"
        " not belong together"
      )
    keys = _keys(architecture, target, tokenizer, scan_layers=scan_layers, dtype=dtype)
    (folder / MODEL_CONFIG).write_text(_model_file(architecture, model.where, keys), encoding="utf-8")
    if not any(tokenizer.iterdir()):
      tokenizer.rmdir()
    parameters = fill_parameters(tensors, weights, architecture, DTYPES[dtype], tied_head=tied_source)
    with quiet_imports(show=False):
      from maxtext_posttrain.models.items import write_items

    write_items(folder / "0", parameters, scan_layers=scan_layers)
  notes = (*architecture.notes, *filter(None, (missing, rounding_note(architecture, dtype))))
  return Imported(target, architecture, count, notes)


def rounding_note(architecture: Architecture, dtype: str) -> str | None:
  """A line where `dtype` cannot hold what MaxText makes of bfloat16 weights, so that an export differs from the source.

  Scales that are powers of two and float32 lose nothing of bfloat16.
  """
  dimensions = architecture.dimensions
  inexact = any(
    rule.offset or math.frexp(scale_factor(rule, dimensions))[0] != 0.5 for rule in architecture.family.rules
  )
  if dtype == "float32" or not inexact:
    return None
  return (
    f"{dtype} rounds what MaxText keeps of {architecture.family.name} in another form (scaled queries and embeddings,"
    " norms as 1 + w); --dtype float32 keeps it"
  )


def _untied(architecture: Architecture) -> Architecture:
  if architecture.family in (GEMMA2, GEMMA3):
    raise ModelError(f"--untie: {architecture.family.name} has no head of its own in MaxText")
  return dataclasses.replace(architecture, dimensions=dataclasses.replace(architecture.dimensions, tied=False))


def _check_tied_head(tensors: TensorSource, architecture: Architecture) -> None:
  """Some files hold the head of a tied model too; it must be the table."""
  if architecture.dimensions.tied and HEAD in tensors.shapes():
    head, table = tensors.read(HEAD), tensors.read(EMBEDDING)
    if head.shape != table.shape or not np.array_equal(head, table):
      raise ModelError(
        f"{tensors.where}: {HEAD} differs from {EMBEDDING}, though tie_word_embeddings says they are one; set it to"
        " false in config.json if the model has a head of its own"
      )


def fill_parameters(
  tensors: TensorSource,
  weights: Sequence[Weight],
  architecture: Architecture,
  dtype: np.dtype,
  *,
  tied_head: bool = False,
) -> dict[tuple[str, ...], np.ndarray]:
  """MaxText's parameters by path, each allocated once and filled weight by weight.

  Args:
    tensors: what is read; checked before.
    weights: from `list_weights`.
    architecture: the model.
    dtype: of the parameters.
    tied_head: take the head from the embedding table.
  """
  parameters: dict[tuple[str, ...], np.ndarray] = {}
  for weight in weights:
    name = EMBEDDING if tied_head and weight.name == HEAD else weight.name
    array = to_maxtext(weight, tensors.read(name), architecture.dimensions, dtype)
    if weight.path not in parameters:
      parameters[weight.path] = np.empty(weight.parameter_shape(SCAN_AXIS), dtype)
    parameters[weight.path][weight.slot(SCAN_AXIS)] = array
  return parameters


def _keys(
  architecture: Architecture, target: Path, tokenizer: Path, *, scan_layers: bool, dtype: str
) -> dict[str, Any]:
  keys = maxtext_keys(architecture)
  keys |= {"scan_layers": scan_layers, "dtype": dtype, "weight_dtype": dtype}
  if (tokenizer / "tokenizer.json").is_file():
    keys |= {"tokenizer_type": "huggingface", "tokenizer_path": str(target / TOKENIZER_FOLDER)}
  elif (tokenizer / "tokenizer.model").is_file():
    keys |= {"tokenizer_type": "sentencepiece", "tokenizer_path": str(target / TOKENIZER_FOLDER / "tokenizer.model")}
  for name in ("chat_template.jinja", "chat_template.json"):
    if "tokenizer_type" in keys and (tokenizer / name).is_file():
      keys["chat_template"] = str(target / TOKENIZER_FOLDER / name)
      break
  if "tokenizer_type" in keys:
    keys["dataset_type"] = "hf"  # MaxText's default, synthetic data, has no use for a tokenizer.
  else:
    keys["tokenizer_path"] = ""
  keys["load_parameters_path"] = str(target / "0" / "items")
  return keys


def _model_file(architecture: Architecture, where: str, keys: dict[str, Any]) -> str:
  """The overlay, as YAML with a few words on it."""
  lines = [f"# {architecture.family.name}, imported from {Path(where).name}. Lay it over a trainer's configuration:"]
  lines += ["#   base_config: [sft.yml, <this file>]", ""]
  lines += [f"# {note}" for note in architecture.notes]
  lines.append(yaml.safe_dump(keys, sort_keys=False, allow_unicode=True, width=1000).rstrip())
  return "\n".join(lines) + "\n"
