"""Writes GGUF files with the gguf package, the tensors laid out as llama.cpp's converter lays them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support import families

ARCHITECTURES = {"llama2": "LLAMA", "smollm2": "LLAMA", "qwen2_5": "QWEN2", "qwen3": "QWEN3", "gemma2": "GEMMA2"}
TOKENS = ["<|endoftext|>", "<|im_start|>", *(chr(code) for code in range(ord("a"), ord("z") + 1)), "Ġ", "he", "Ġhe"]
MERGES = ["h e", "Ġ he"]


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
  """llama.cpp turns neighbours: its converter puts the two halves of each head side by side."""
  return (
    weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)
  )


def write(
  path: Path,
  name: str,
  *,
  kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
  drop: str | None = None,
  add: dict[str, np.ndarray] | None = None,
  tokens: list[str] | None = None,
  tokenizer: dict[str, Any] | None = None,
) -> None:
  """The tiny model `name` as a GGUF file; matrices whose rows fill whole blocks are of type `kind`."""
  config = families.config(name)
  model = getattr(gguf.MODEL_ARCH, ARCHITECTURES[name])
  names = gguf.get_tensor_name_map(model, config["num_hidden_layers"])
  writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[model])
  writer.add_block_count(config["num_hidden_layers"])
  writer.add_context_length(config["max_position_embeddings"])
  writer.add_embedding_length(config["hidden_size"])
  writer.add_feed_forward_length(config["intermediate_size"])
  writer.add_head_count(config["num_attention_heads"])
  writer.add_head_count_kv(config["num_key_value_heads"])
  writer.add_key_length(config["head_dim"])
  writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
  writer.add_rope_freq_base(config.get("rope_parameters", {}).get("rope_theta", 10000.0))
  if name == "gemma2":
    writer.add_sliding_window(config["sliding_window"])
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
  if tokens is not None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_merges(MERGES)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
  for key, value in (tokenizer or {}).items():
    writer.add_string(key, value)
  for tensor, array in {**families.tensors(name), **(add or {})}.items():
    if tensor == drop:
      continue
    if ARCHITECTURES[name] == "LLAMA" and ".q_proj" in tensor:
      array = permute(array, config["num_attention_heads"])
    if ARCHITECTURES[name] == "LLAMA" and ".k_proj" in tensor:
      array = permute(array, config["num_key_value_heads"])
    if name == "gemma2" and "norm" in tensor:
      array = array + np.float32(1)
    base, _, suffix = tensor.rpartition(".")
    known = names.get_name(base)
    stored = f"{known}.{suffix}" if known else tensor
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if array.ndim == 2 and array.shape[1] % block == 0 and kind != gguf.GGMLQuantizationType.F32:
      writer.add_tensor(stored, gguf.quantize(array, kind), raw_dtype=kind)
    else:
      writer.add_tensor(stored, array)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
