"""GGUF files as the gguf package writes them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from maxtext_posttrain.errors import ModelError
from maxtext_posttrain.models.families import FAMILIES
from maxtext_posttrain.models.gguf_files import GgufFile
from maxtext_posttrain.models.gguf_tokenizer import write_tokenizer
from maxtext_posttrain.models.huggingface_config import from_huggingface
from maxtext_posttrain.models.tensor_source import GgufSource
from maxtext_posttrain.models.weights import list_weights
from tests.support import families, gguf_models

KINDS = gguf.GGMLQuantizationType


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_tensor_names_are_llama_cpps(family) -> None:
  model = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family.gguf_architecture)
  names = gguf.get_tensor_name_map(model, 4)
  example = {"mistral": "mistral", "gemma3_text": "gemma3", "qwen2": "qwen2_5", "llama": "llama2"}
  architecture = families.architecture(example.get(family.model_type, family.model_type))
  for weight in list_weights(family, architecture.dimensions, scan_layers=False):
    if ".layers." not in weight.name or ".layers.1." in weight.name:
      base, _, suffix = weight.name.rpartition(".")
      assert weight.gguf_name == f"{names.get_name(base)}.{suffix}"


@pytest.mark.parametrize("name", gguf_models.ARCHITECTURES)
def test_a_file_is_the_model_it_was_made_of(tmp_path: Path, name: str) -> None:
  gguf_models.write(tmp_path / "model.gguf", name)
  source = GgufSource(tmp_path / "model.gguf")
  tensors, want = source.tensors(), families.tensors(name)
  assert tensors.shapes() == {tensor: array.shape for tensor, array in want.items()}
  for tensor, array in want.items():
    np.testing.assert_array_equal(tensors.read(tensor), array, err_msg=tensor)
  config = source.config()
  original = families.config(name)
  for key in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "head_dim", "vocab_size"):
    assert config[key] == original[key], key
  assert config["rope_theta"] == original.get("rope_parameters", {}).get("rope_theta", 10000.0)


@pytest.mark.parametrize("kind", [KINDS.F16, KINDS.BF16, KINDS.Q4_0, KINDS.Q4_1, KINDS.Q5_0, KINDS.Q5_1, KINDS.Q8_0])
def test_types_are_dequantized(tmp_path: Path, kind: KINDS) -> None:
  gguf_models.write(tmp_path / "model.gguf", "llama2", kind=kind)
  tensors = GgufSource(tmp_path / "model.gguf").tensors()
  up = "model.layers.1.mlp.up_proj.weight"  # [48, 32]: one block a row
  original = families.tensors("llama2")[up]
  np.testing.assert_array_equal(tensors.read(up), gguf.dequantize(gguf.quantize(original, kind), kind))
  np.testing.assert_allclose(tensors.read(up), original, atol=0.1)


def test_llama_3s_frequencies_are_its_rope_factor(tmp_path: Path) -> None:
  factors = np.array([1, 1, 1, 1, 2, 11, 32, 32], np.float32)
  gguf_models.write(tmp_path / "model.gguf", "llama2", add={"rope_freqs.weight": factors})
  source = GgufSource(tmp_path / "model.gguf")
  assert source.config()["rope_scaling"] == {"rope_type": "llama3", "factor": 32.0}
  assert "rope_freqs.weight" not in source.tensors().shapes()


def test_the_tokenizer_becomes_a_folder(tmp_path: Path) -> None:
  gguf_models.write(tmp_path / "model.gguf", "llama2", tokens=gguf_models.TOKENS)
  folder = tmp_path / "tokenizer"
  folder.mkdir()
  assert GgufSource(tmp_path / "model.gguf").write_tokenizer(folder) is None
  tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
  ids = tokenizer.encode("<|im_start|>he he", add_special_tokens=False).ids
  assert ids == [gguf_models.TOKENS.index(token) for token in ("<|im_start|>", "he", "Ġhe")]
  assert tokenizer.decode(ids, skip_special_tokens=True) == "he he"
  config = json.loads((folder / "tokenizer_config.json").read_text())
  assert config["chat_template"] == "{{ messages[0].content }}"
  assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|endoftext|>")
  assert json.loads((folder / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 0}


def test_a_tokenizer_of_another_kind_is_named(tmp_path: Path) -> None:
  gguf_models.write(tmp_path / "model.gguf", "llama2", tokenizer={"tokenizer.ggml.model": "llama"})
  line = GgufSource(tmp_path / "model.gguf").write_tokenizer(tmp_path)
  assert line is not None
  assert "kind 'llama'" in line
  assert not (tmp_path / "tokenizer.json").exists()


def test_metadata_are_the_packages(tmp_path: Path) -> None:
  gguf_models.write(tmp_path / "model.gguf", "llama2", tokens=gguf_models.TOKENS)
  ours = GgufFile(tmp_path / "model.gguf").metadata
  fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
  for key, field in fields.items():
    if not key.startswith("GGUF."):
      have = ours[key]
      assert (have.tolist() if isinstance(have, np.ndarray) else have) == field.contents(), key


@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("model", np.array([1, 2])),
    ("pre", ["smollm"]),
    ("tokens", "abc"),
    ("merges", 3),
    ("token_type", 3),
    ("token_type", "x" * len(gguf_models.TOKENS)),
    ("bos_token_id", "x"),
    ("bos_token_id", 1.5),
    ("add_bos_token", np.array([1, 2])),
  ],
)
def test_a_tokenizers_value_of_another_type_is_named(tmp_path: Path, key: str, value: Any) -> None:
  gguf_models.write(tmp_path / "model.gguf", "llama2", tokens=gguf_models.TOKENS)
  metadata = GgufFile(tmp_path / "model.gguf").metadata | {f"tokenizer.ggml.{key}": value}
  with pytest.raises(ModelError, match=f"^here: tokenizer.ggml.{key} is of type "):
    write_tokenizer(metadata, tmp_path, "here")


@pytest.mark.parametrize(("heads", "says"), [(0, "num_attention_heads is 0"), ("x", "num_attention_heads is 'x'")])
def test_heads_that_are_no_number_are_named_where_the_27b_model_divides_by_them(
  tmp_path: Path, heads: Any, says: str
) -> None:
  gguf_models.write(tmp_path / "model.gguf", "gemma2")
  file = GgufFile(tmp_path / "model.gguf")
  file.metadata |= {"gemma2.block_count": 46, "gemma2.attention.head_count": heads}
  with pytest.raises(ModelError, match=says):
    from_huggingface(file.huggingface_config())


def test_frequencies_that_are_empty_are_named(tmp_path: Path) -> None:
  gguf_models.write(tmp_path / "model.gguf", "llama2", add={"rope_freqs.weight": np.zeros(0, np.float32)})
  with pytest.raises(ModelError, match=r"tensor rope_freqs\.weight is empty"):
    GgufFile(tmp_path / "model.gguf").huggingface_config()


def test_a_tensor_without_dimensions_is_named(tmp_path: Path) -> None:
  path = tmp_path / "model.gguf"
  gguf_models.write(path, "llama2", add={"rope_freqs.weight": np.ones(8, np.float32)})
  data = path.read_bytes()
  rank = data.index(b"rope_freqs.weight") + len(b"rope_freqs.weight")
  path.write_bytes(data[:rank] + struct.pack("<I", 0) + data[rank + 4 :])
  with pytest.raises(ModelError, match=r"tensor rope_freqs\.weight has 0 dimensions"):
    GgufFile(path)
