"""Models to measure with, as MaxText's keys, and the arithmetic of one update."""

from __future__ import annotations

from collections.abc import Mapping

from _common import VOCAB_SIZE

_FLOAT32 = {
  "model_name": "default",
  "override_model_config": "true",
  "decoder_block": "llama2",
  "attention": "dot_product",
  "dtype": "float32",
  "weight_dtype": "float32",
  "remat_policy": "minimal",
}

SHAPES: Mapping[str, Mapping[str, str]] = {
  "10m": {
    **_FLOAT32,
    "base_num_decoder_layers": "6",
    "base_emb_dim": "256",
    "base_mlp_dim": "1024",
    "base_num_query_heads": "8",
    "base_num_kv_heads": "8",
    "head_dim": "32",
    "vocab_size": str(VOCAB_SIZE),
    "logits_via_embedding": "false",
    "per_device_batch_size": "8",
  },
  "smollm2-shape": {
    **_FLOAT32,
    "base_num_decoder_layers": "30",
    "base_emb_dim": "576",
    "base_mlp_dim": "1536",
    "base_num_query_heads": "9",
    "base_num_kv_heads": "3",
    "head_dim": "64",
    "vocab_size": "49152",
    "logits_via_embedding": "true",
    "rope_max_timescale": "100000",
    "per_device_batch_size": "4",
  },
}
"""By name; weights are random. `per_device_batch_size` is what `--batch` replaces."""


def model_tflops(keys: Mapping[str, str]) -> float:
  """TFLOPs of one update, forward and backward: matrix products over all positions, causal attention counted half.

  Six per weight and position, the head included and the embedding's look-up not; attention on top. MaxText's own count
  is the same. What is computed twice to save memory, or not at all, does not change it.
  """
  size = {key.removeprefix("base_"): int(value) for key, value in keys.items() if value.isdigit()}
  queries, kv = (size[name] * size["head_dim"] for name in ("num_query_heads", "num_kv_heads"))
  layer = 2 * size["emb_dim"] * (queries + kv) + 3 * size["emb_dim"] * size["mlp_dim"]
  weights = size["num_decoder_layers"] * layer + size["emb_dim"] * size["vocab_size"]
  length = size["max_target_length"]
  attention = size["num_decoder_layers"] * length * queries
  return 6 * (weights + attention) * size["per_device_batch_size"] * length / 1e12
