"""PEFT's tensors of an adapter: its own formula gives what merging on MaxText's side and exporting gives."""

from __future__ import annotations

import re

import numpy as np
import pytest

from maxtext_posttrain.errors import ModelError
from maxtext_posttrain.lora.kernels import KERNEL, LORA_A, LORA_B, adapted_kernels, merged_kernel, stacked_axis
from maxtext_posttrain.lora.peft import peft_config, peft_tensors
from maxtext_posttrain.lora.record import AdapterRecord
from maxtext_posttrain.models.importing import fill_parameters
from maxtext_posttrain.models.safetensors_files import SafetensorsFolder
from maxtext_posttrain.models.weights import huggingface_tensors, list_weights
from tests.support import families

RECORD = AdapterRecord(4, 6.0, ".*", None, None, 1, "float32", None, "")
_INPUTS = {"heads_in": 1, "kv_heads_in": 1, "linear": 1, "heads_out": 2}


def random_adapter(name: str, *, scan_layers: bool) -> dict[tuple[str, ...], np.ndarray]:
  architecture, generator = families.architecture(name), np.random.default_rng(1)
  adapter: dict[tuple[str, ...], np.ndarray] = {}
  for weight in list_weights(architecture.family, architecture.dimensions, scan_layers=scan_layers):
    if weight.rule.in_layer and weight.path[-1] == KERNEL:
      inputs = _INPUTS[weight.rule.form]
      rows, columns = (int(np.prod(part)) for part in (weight.inner_shape[:inputs], weight.inner_shape[inputs:]))
      stack = [] if weight.index is None else [weight.stacked]
      adapter.setdefault((*weight.path[:-1], LORA_A), generator.normal(size=(rows, *stack, 4)).astype(np.float32))
      adapter.setdefault((*weight.path[:-1], LORA_B), generator.normal(size=(4, *stack, columns)).astype(np.float32))
  return adapter


@pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "unscanned"])
@pytest.mark.parametrize("name", families.NAMES)
def test_pefts_formula_gives_the_merged_weights(name: str, scan_layers: bool) -> None:
  architecture = families.architecture(name)
  family, dimensions = architecture.family, architecture.dimensions
  adapter = random_adapter(name, scan_layers=scan_layers)
  weights = list_weights(family, dimensions, scan_layers=scan_layers)
  parameters = fill_parameters(SafetensorsFolder(families.FOLDER / name), weights, architecture, np.dtype(np.float32))
  for path, a, b in adapted_kernels(adapter):
    axis = stacked_axis(path, 1)
    parameters[path] = merged_kernel(parameters[path], a, b, scale=RECORD.scale, axis=axis)
  want = dict(huggingface_tensors(parameters, family, dimensions, scan_layers=scan_layers))
  base = families.tensors(name)
  tensors = dict(peft_tensors(adapter, architecture, RECORD, scan_layers=scan_layers))
  modules = {key.rsplit(".lora_", 1)[0] for key in tensors}
  assert len(modules) == 7 * dimensions.layers
  for module in modules:
    weight = f"{module.removeprefix('base_model.model.')}.weight"
    a, b = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
    assert (a.shape, b.shape) == ((4, base[weight].shape[1]), (base[weight].shape[0], 4))
    np.testing.assert_allclose(base[weight] + 6.0 / 4 * (b @ a), want[weight], rtol=1e-5, atol=2e-5, err_msg=weight)


def test_targets_are_named_briefly_where_every_layer_has_them() -> None:
  architecture = families.architecture("llama2")
  adapter = random_adapter("llama2", scan_layers=False)
  names = [name for name, _ in peft_tensors(adapter, architecture, RECORD, scan_layers=False)]
  config = peft_config(architecture, RECORD, names, "me/base")
  assert config["target_modules"] == sorted(
    ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
  )
  assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 6.0, "me/base")
  first = [name for name in names if ".layers.0." in name]
  targets = peft_config(architecture, RECORD, first, None)["target_modules"]
  assert isinstance(targets, list)
  assert all(re.fullmatch(r"model\.layers\.0\.(self_attn|mlp)\.\w+_proj", target) for target in targets)


def test_what_has_no_layer_there_is_named() -> None:
  adapter = random_adapter("llama2", scan_layers=True)
  adapter |= {("decoder", "other", name): np.zeros((4, 4), np.float32) for name in (LORA_A, LORA_B)}
  with pytest.raises(ModelError, match="decoder/other/kernel_lora_a"):
    list(peft_tensors(adapter, families.architecture("llama2"), RECORD, scan_layers=True))
