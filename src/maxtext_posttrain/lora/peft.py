"""An adapter as HuggingFace's PEFT reads it: `adapter_config.json` and `adapter_model.safetensors`.

PEFT computes W + (lora_alpha / r) B A for a linear layer W [out, in], with A [r, in] and B [out, r]. MaxText's kernel
is that W transposed and shaped, with the query's scale inside for some families and the rotary pairs in another order
for `rope_type: llama3.1`; A's inputs are never touched by these, so A is MaxText's transposed, and B goes the way of
the kernel (`models.weights.to_huggingface`) with the rank in the place of the inputs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from maxtext_posttrain.config import load_model_config
from maxtext_posttrain.errors import CheckpointError, ModelError
from maxtext_posttrain.lora.kernels import KERNEL, LORA_A, LORA_B
from maxtext_posttrain.lora.record import AdapterRecord
from maxtext_posttrain.models.architecture import Architecture
from maxtext_posttrain.models.maxtext_config import from_maxtext
from maxtext_posttrain.models.new_folder import new_folder
from maxtext_posttrain.models.safetensors_files import DTYPES, PlannedTensor, write_json, write_shards
from maxtext_posttrain.models.source import find_source
from maxtext_posttrain.models.weights import Weight, list_weights, to_huggingface

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."


@dataclasses.dataclass(frozen=True)
class ExportedAdapter:
  """What an export wrote.

  Attributes:
    folder: where.
    rank: of the adapter.
    modules: how many linear layers have one.
    tensors: how many.
    notes: what a user should know, one line each.
  """

  folder: Path
  rank: int
  modules: int
  tensors: int
  notes: tuple[str, ...]


def export_adapter(
  path: str, out: str, *, config: str | None = None, dtype: str | None = None, base_model: str | None = None
) -> ExportedAdapter:
  """Writes a PEFT adapter from a LoRA run.

  Args:
    path: a run's folder, its `checkpoints`, a step's folder or its `items`.
    out: a folder that does not exist yet.
    config: the run's YAML, where it does not lie above the weights.
    dtype: of the tensors; the adapter's own if left out.
    base_model: HuggingFace's name or folder of the base, as PEFT notes it.

  Raises:
    ModelError: the model has no HuggingFace form, the adapter lies on what PEFT has no layer for, or `out` exists.
    CheckpointError: there is no adapter, or it can't be read.
    ConfigError: no configuration is found, or it is wrong.
  """
  target = Path(out).expanduser().absolute()
  if target.exists():
    raise ModelError(f"{target} exists; name a folder that does not")
  source = find_source(path, config)
  settings = load_model_config([str(source.config)])
  architecture = from_maxtext(settings, str(source.config))
  from maxtext_posttrain.lora.weights import read_record
  from maxtext_posttrain.models.items import read_parameters

  record = read_record(str(source.items))
  if record is None:
    raise CheckpointError(f"{source.items} holds full weights, no LoRA adapter; leave --adapter out")
  adapter, scan_layers = read_parameters(str(source.items), adapter=True)
  tensors = list(peft_tensors(adapter, architecture, record, scan_layers=scan_layers))
  kind = dtype or str(tensors[0][1].dtype)
  if kind not in DTYPES:
    kind = "float32"
  planned = [PlannedTensor(name, array.shape) for name, array in tensors]
  with new_folder(target, sum(math.prod(tensor.shape) for tensor in planned) * DTYPES[kind].itemsize) as folder:
    write_json(folder / CONFIG, peft_config(architecture, record, [name for name, _ in tensors], base_model))
    cast = ((name, array.astype(DTYPES[kind])) for name, array in tensors)
    write_shards(folder, [(WEIGHTS, planned)], DTYPES[kind], cast)
  notes = []
  if base_model is None:
    notes.append(f"{CONFIG} names no base; --base-model NAME does, or pass the model to PeftModel.from_pretrained")
  if record.weight_qtype is not None:
    notes.append(f"it was trained over a {record.weight_qtype} base; over the full one it computes slightly otherwise")
  return ExportedAdapter(target, record.rank, len(tensors) // 2, len(tensors), tuple(notes))


def peft_tensors(
  adapter: dict[tuple[str, ...], np.ndarray], architecture: Architecture, record: AdapterRecord, *, scan_layers: bool
) -> Iterator[tuple[str, np.ndarray]]:
  """PEFT's names and tensors, layer by layer.

  Args:
    adapter: A and B by path below `params/params`.
    architecture: the model.
    record: how the adapter was made.
    scan_layers: layers are stacked.

  Raises:
    ModelError: there is an A or B on a weight that HuggingFace's model has not.
  """
  used: set[tuple[str, ...]] = set()
  for weight in list_weights(architecture.family, architecture.dimensions, scan_layers=scan_layers):
    if weight.path[-1] != KERNEL:
      continue
    paths = [(*weight.path[:-1], name) for name in (LORA_A, LORA_B)]
    if not all(path in adapter for path in paths):
      continue
    used.update(paths)
    slot = weight.slot(record.scan_axis) if weight.index is not None else (...,)
    a, b = (np.asarray(adapter[path][slot]) for path in paths)
    module = _PREFIX + weight.name.removesuffix(".weight")
    yield f"{module}.lora_A.weight", np.ascontiguousarray(a.T)
    yield f"{module}.lora_B.weight", _outputs(weight, b, architecture)
  left = ["/".join(path) for path in adapter if path not in used]
  if left:
    raise ModelError(f"the adapter on {', '.join(left[:4])} has no layer in {architecture.family.architecture}")


def _outputs(weight: Weight, b: np.ndarray, architecture: Architecture) -> np.ndarray:
  """B [rank, outputs] as PEFT's [outputs, rank]."""
  if weight.rule.form not in ("heads_in", "kv_heads_in"):
    return np.ascontiguousarray(b.T)
  rank = b.shape[0]
  dimensions = dataclasses.replace(architecture.dimensions, emb=rank)
  return to_huggingface(weight, b.reshape(rank, *weight.inner_shape[1:]), dimensions, b.dtype)


def peft_config(
  architecture: Architecture, record: AdapterRecord, names: list[str], base_model: str | None
) -> dict[str, object]:
  """`adapter_config.json`."""
  modules = sorted({name.removeprefix(_PREFIX).rsplit(".lora_", 1)[0] for name in names})
  short = sorted({module.rsplit(".", 1)[-1] for module in modules})
  everywhere = len(modules) == len(short) * architecture.dimensions.layers
  return {
    "base_model_name_or_path": base_model,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_alpha": int(record.alpha) if float(record.alpha).is_integer() else record.alpha,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": record.rank,
    # A name alone means that layer in every block.
    "target_modules": short if everywhere else modules,
    "task_type": "CAUSAL_LM",
  }
