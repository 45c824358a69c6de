"""HuggingFace's tensors to MaxText's parameters and back: bits, paths, layouts worked by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from maxtext_posttrain.models.families import GEMMA3, LLAMA, QWEN2
from maxtext_posttrain.models.importing import fill_parameters, rounding_note
from maxtext_posttrain.models.maxtext_config import maxtext_keys
from maxtext_posttrain.models.safetensors_files import SafetensorsFolder
from maxtext_posttrain.models.streaming import huggingface_weights
from maxtext_posttrain.models.weights import Dimensions, huggingface_tensors, list_weights, to_huggingface, to_maxtext
from tests.support import families

FLOAT32 = np.dtype(np.float32)
SMALL = Dimensions(
  layers=2, emb=6, mlp=8, heads=2, kv_heads=1, head=4, vocab=5, tied=False, neighbours=False, query_scale=0.5
)


class Tensors:
  """A source of tensors that are in memory."""

  where = "memory"

  def __init__(self, tensors: Mapping[str, np.ndarray]):
    self._tensors = tensors

  def shapes(self) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in self._tensors.items()}

  def read(self, name: str) -> np.ndarray:
    return self._tensors[name]


@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("name", families.NAMES)
def test_there_and_back_gives_the_same_bits(name: str, scan_layers: bool) -> None:
  architecture = families.architecture(name)
  weights = list_weights(architecture.family, architecture.dimensions, scan_layers=scan_layers)
  source = SafetensorsFolder(families.FOLDER / name)
  parameters = fill_parameters(source, weights, architecture, FLOAT32)
  back = dict(huggingface_tensors(parameters, architecture.family, architecture.dimensions, scan_layers=scan_layers))
  want = families.tensors(name)
  assert sorted(back) == sorted(want)
  for tensor, array in want.items():
    assert back[tensor].dtype == array.dtype
    np.testing.assert_array_equal(back[tensor].view(np.uint32), array.view(np.uint32), err_msg=tensor)


def test_a_configuration_is_enough_to_stream_weights() -> None:
  architecture = families.architecture("qwen3")
  keys = {**maxtext_keys(architecture), "scan_layers": True, "param_scan_axis": 1}
  weights = list_weights(architecture.family, architecture.dimensions, scan_layers=True)
  parameters = fill_parameters(SafetensorsFolder(families.FOLDER / "qwen3"), weights, architecture, FLOAT32)
  streamed = dict(huggingface_weights(parameters, SimpleNamespace(**keys), dtype=np.dtype(ml_dtypes.bfloat16)))
  want = families.tensors("qwen3")
  assert streamed.keys() == want.keys()
  for name, array in streamed.items():
    np.testing.assert_array_equal(array, want[name].astype(ml_dtypes.bfloat16))


def test_linear_and_heads_by_hand() -> None:
  tensors = {
    weight.name: np.arange(np.prod(weight.shape), dtype=np.float32).reshape(weight.shape)
    for weight in list_weights(LLAMA, SMALL, scan_layers=True)
  }
  parameters = fill_parameters(Tensors(tensors), list_weights(LLAMA, SMALL, scan_layers=True), _of(LLAMA), FLOAT32)
  query = tensors["model.layers.1.self_attn.q_proj.weight"]
  kernel = parameters["decoder", "layers", "self_attention", "query", "kernel"]
  assert kernel.shape == (6, 2, 2, 4)  # [emb, layers, heads, head_dim]
  # Row h * head_dim + d of HuggingFace's [heads * head_dim, emb], halved.
  assert kernel[5, 1, 1, 2] == query[1 * 4 + 2, 5] / 2
  out = tensors["model.layers.0.self_attn.o_proj.weight"]
  assert parameters["decoder", "layers", "self_attention", "out", "kernel"][1, 0, 3, 4] == out[4, 1 * 4 + 3]
  down = tensors["model.layers.1.mlp.down_proj.weight"]
  assert parameters["decoder", "layers", "mlp", "wo", "kernel"][7, 1, 2] == down[2, 7]
  norm = tensors["model.layers.1.input_layernorm.weight"]
  np.testing.assert_array_equal(parameters["decoder", "layers", "pre_self_attention_layer_norm", "scale"][:, 1], norm)
  head = parameters["decoder", "logits_dense", "kernel"]
  np.testing.assert_array_equal(head, tensors["lm_head.weight"].T)


def _of(family):
  return dataclasses.replace(families.architecture("llama2"), family=family, dimensions=SMALL)


def test_neighbours_turn_where_llama_3_1_turns_neighbours() -> None:
  dimensions = dataclasses.replace(SMALL, neighbours=True)
  weights = {weight.name: weight for weight in list_weights(LLAMA, dimensions, scan_layers=False)}
  key = weights["model.layers.0.self_attn.k_proj.weight"]
  tensor = np.repeat(np.arange(4, dtype=np.float32)[:, None], 6, axis=1)
  # transformers turns (0, 2) and (1, 3) of a head of four; neighbours are those pairs side by side.
  assert to_maxtext(key, tensor, dimensions, FLOAT32)[0, 0].tolist() == [0, 2, 1, 3]
  value = weights["model.layers.0.self_attn.v_proj.weight"]
  assert to_maxtext(value, tensor, dimensions, FLOAT32)[0, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
  ("layer", "scanned", "unscanned"),
  [
    (0, ("layers/layers_0", 0), "layers_0"),
    (5, ("layers/layers_5", 0), "layers_5"),
    (7, ("layers/layers_1", 1), "layers_7"),
    (12, ("layers_remainder/layers_0", None), "layers_12"),
  ],
)
def test_gemma3_layers_lie_in_blocks_of_six(layer: int, scanned: tuple[str, int | None], unscanned: str) -> None:
  dimensions = dataclasses.replace(SMALL, layers=13, tied=True)
  name = f"model.layers.{layer}.mlp.up_proj.weight"
  for scan_layers, (base, index) in ((True, scanned), (False, (unscanned, None))):
    weights = {weight.name: weight for weight in list_weights(GEMMA3, dimensions, scan_layers=scan_layers)}
    assert weights[name].path == ("decoder", *base.split("/"), "mlp", "wi_1", "kernel")
    assert weights[name].index == index


def test_gemma2_layers_lie_in_pairs() -> None:
  architecture = families.architecture("gemma2")
  weights = {
    weight.name: weight for weight in list_weights(architecture.family, architecture.dimensions, scan_layers=True)
  }
  up = weights["model.layers.3.mlp.up_proj.weight"]
  assert (up.path, up.index, up.stacked) == (("decoder", "layers", "mlp_global", "wi_1", "kernel"), 1, 2)
  norm = weights["model.layers.2.input_layernorm.weight"]
  assert norm.path == ("decoder", "layers", "pre_self_attention_norm_local", "scale")


@pytest.mark.parametrize("head", [16, 64, 80, 128])
def test_the_query_scale_is_exact_where_it_can_be(head: int) -> None:
  dimensions = dataclasses.replace(SMALL, head=head, query_scale=head**-0.5)
  weights = {weight.name: weight for weight in list_weights(LLAMA, dimensions, scan_layers=False)}
  query = weights["model.layers.0.self_attn.q_proj.weight"]
  tensor = np.random.default_rng(0).normal(size=query.shape).astype(np.float32)
  back = to_huggingface(query, to_maxtext(query, tensor, dimensions, FLOAT32), dimensions, FLOAT32)
  if head in (16, 64):  # 1/4 and 1/8 move the exponent alone.
    np.testing.assert_array_equal(back, tensor)
  else:
    np.testing.assert_array_max_ulp(back, tensor, maxulp=1)
  # What was published in bfloat16 comes back to the bit, whatever the head.
  coarse = tensor.astype(ml_dtypes.bfloat16)
  back = to_huggingface(query, to_maxtext(query, coarse, dimensions, FLOAT32), dimensions, coarse.dtype)
  np.testing.assert_array_equal(back.view(np.uint16), coarse.view(np.uint16))


def test_biases_have_heads() -> None:
  weights = {weight.name: weight for weight in list_weights(QWEN2, SMALL, scan_layers=True)}
  bias = weights["model.layers.1.self_attn.q_proj.bias"]
  assert (bias.shape, bias.inner_shape, bias.parameter_shape(1)) == ((8,), (2, 4), (2, 2, 4))
  assert to_maxtext(bias, np.arange(8, dtype=np.float32), SMALL, FLOAT32).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_large_weight_is_scaled_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr("maxtext_posttrain.models.weights._CHUNK_ELEMENTS", 7)
  weights = {weight.name: weight for weight in list_weights(LLAMA, SMALL, scan_layers=False)}
  query = weights["model.layers.0.self_attn.q_proj.weight"]
  tensor = np.random.default_rng(0).normal(size=query.shape).astype(np.float32)
  np.testing.assert_array_equal(to_maxtext(query, tensor, SMALL, FLOAT32), (tensor / 2).T.reshape(6, 2, 4))


def test_bfloat16_is_said_to_round_where_it_does() -> None:
  for name, rounds in (("llama2", False), ("qwen3", False), ("gemma3", True)):
    assert (rounding_note(families.architecture(name), "bfloat16") is not None) == rounds
    assert rounding_note(families.architecture(name), "float32") is None
  wide = families.architecture("llama2")
  wide = dataclasses.replace(wide, dimensions=dataclasses.replace(wide.dimensions, head=128, query_scale=128**-0.5))
  assert rounding_note(wide, "bfloat16") is not None
