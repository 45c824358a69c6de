"""MaxText's keys for an architecture, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

from maxtext_posttrain.errors import ModelError
from maxtext_posttrain.models.architecture import (
  GEMMA_EPSILON,
  MAXTEXT_ROPE_FACTOR,
  UNSET_POSITIONS,
  UNSET_ROPE_FACTOR,
  Architecture,
  Rope,
  gemma3_name,
)
from maxtext_posttrain.models.families import FAMILIES, GEMMA2, GEMMA3, QWEN2, QWEN3, Family
from maxtext_posttrain.models.weights import Dimensions

_GEMMA2_27B = (4608, 32)
"""emb_dim and heads of the one Gemma 2 whose attention scale is not head_dim's."""


def maxtext_keys(architecture: Architecture) -> dict[str, Any]:
  """MaxText's keys for a model, on top of its base.yml."""
  family, dimensions, rope = architecture.family, architecture.dimensions, architecture.rope
  gemma = family in (GEMMA2, GEMMA3)
  keys: dict[str, Any] = {
    "model_name": gemma3_name(architecture, "model") if family is GEMMA3 else "default",
    "override_model_config": True,
    "decoder_block": family.decoder_block,
    "base_num_decoder_layers": dimensions.layers // (1 if family.nested else len(family.kinds)),
    "base_emb_dim": dimensions.emb,
    "base_mlp_dim": dimensions.mlp,
    "base_num_query_heads": dimensions.heads,
    "base_num_kv_heads": dimensions.kv_heads,
    "head_dim": dimensions.head,
    "vocab_size": dimensions.vocab,
    "mlp_activations": ["gelu" if gemma else "silu", "linear"],
    "enable_dropout": False,
    "normalization_layer_epsilon": architecture.norm_epsilon,
    "logits_via_embedding": dimensions.tied,
    "normalize_embedding_logits": gemma,
    "rope_type": "llama3.1" if rope.scaling == "llama3" else "default",
    "rope_max_timescale": rope.theta,
  }
  if architecture.max_positions:
    keys["max_position_embeddings"] = architecture.max_positions
  if rope.scaling == "llama3" and rope.factor != MAXTEXT_ROPE_FACTOR:
    keys["rope_factor"] = int(rope.factor)
  if rope.scaling == "linear" or family is GEMMA3:
    keys["rope_linear_scaling_factor"] = rope.factor
  if family is QWEN2:
    keys["attention_bias"] = True
  if family is QWEN3:
    keys["use_qk_norm"] = True
  if gemma:
    keys["sliding_window_size"] = architecture.sliding_window
    keys["use_post_attn_norm"] = True
    keys["use_post_ffw_norm"] = True
    keys["attn_logits_soft_cap"] = architecture.attention_softcap
    keys["final_logits_soft_cap"] = architecture.final_softcap
  if family is GEMMA3:
    keys["local_rope_max_timescale"] = rope.local_theta
  return keys


def from_maxtext(config: Any, where: str = "the configuration") -> Architecture:
  """What a MaxText configuration describes: MaxText's own, ours, or any object with MaxText's keys as attributes.

  Raises:
    ModelError: it is of no known family, or has what HuggingFace's class of that family cannot express.
  """

  def value(key: str, default: Any = None) -> Any:
    found = getattr(config, key, default)
    return getattr(found, "value", found)

  block = value("decoder_block")
  family = next((family for family in FAMILIES if family.decoder_block == block), None)
  if family is None:
    known = ", ".join(family.decoder_block for family in FAMILIES)
    raise ModelError(f"{where}: decoder_block {block!r} has no HuggingFace form here; known are {known}")
  gemma = family in (GEMMA2, GEMMA3)
  _check_maxtext(family, value, where)
  emb, heads, head = value("base_emb_dim"), value("base_num_query_heads"), value("head_dim")
  rope_type = value("rope_type", "default")
  if str(value("model_name", "")).startswith("llama3.1"):
    rope_type = "llama3.1"
  linear = float(value("rope_linear_scaling_factor", 1.0))
  scaled = rope_type == "llama3.1" and value("rope_use_scale", True)
  scalar = head
  if family is GEMMA2 and (emb, heads) == _GEMMA2_27B:
    scalar = emb // heads
  if family is GEMMA3 and value("model_name") == "gemma3-27b":
    scalar = emb // heads
  rope = Rope(int(value("rope_max_timescale")))
  if scaled:
    factor = value("rope_factor", UNSET_ROPE_FACTOR)
    factor = MAXTEXT_ROPE_FACTOR if factor == UNSET_ROPE_FACTOR else factor
    rope = dataclasses.replace(rope, scaling="llama3", factor=float(factor))
  elif linear != 1.0:
    rope = dataclasses.replace(rope, scaling="linear", factor=linear)
  if family is GEMMA3:
    local = int(value("local_rope_max_timescale", -1))
    rope = dataclasses.replace(rope, local_theta=local if local > 0 else rope.theta)
  positions = value("max_position_embeddings", UNSET_POSITIONS)
  return Architecture(
    family=family,
    dimensions=Dimensions(
      layers=value("base_num_decoder_layers") * (1 if family.nested else len(family.kinds)),
      emb=emb,
      mlp=value("base_mlp_dim"),
      heads=heads,
      kv_heads=value("base_num_kv_heads"),
      head=head,
      vocab=value("vocab_size"),
      tied=bool(value("logits_via_embedding")),
      neighbours=rope_type == "llama3.1",
      query_scale=scalar**-0.5,
    ),
    rope=rope,
    norm_epsilon=float(value("normalization_layer_epsilon")),
    sliding_window=value("sliding_window_size") or None if gemma else None,
    attention_softcap=value("attn_logits_soft_cap") or None,
    final_softcap=value("final_logits_soft_cap") or None,
    max_positions=None if positions == UNSET_POSITIONS else positions,
  )


def _check_maxtext(family: Family, value: Any, where: str) -> None:
  """What MaxText's blocks can do and HuggingFace's class of the family cannot."""
  gemma = family in (GEMMA2, GEMMA3)
  activation = ["gelu" if gemma else "silu", "linear"]
  wanted: list[tuple[str, Any, Any]] = [
    ("mlp_activations", activation, None),
    ("global_parameter_scale", 1, 1),
    ("fused_qkv", False, False),
    ("fused_mlp", False, False),
    ("attention_sink", False, False),
    ("trainable_position_size", -1, -1),
    ("use_qk_norm", family is QWEN3, False),
    ("use_mrope", False, False),
    ("num_experts", 1, 1),
    ("mtp_num_layers", 0, 0),
    ("rope_min_timescale", 1, 1),
  ]
  if family is QWEN2:
    wanted.append(("attention_bias", True, False))
  if gemma:
    wanted += [("use_post_attn_norm", True, False), ("use_post_ffw_norm", True, False)]
    wanted += [("logits_via_embedding", True, False), ("normalize_embedding_logits", True, True)]
    wanted += [("normalization_layer_epsilon", GEMMA_EPSILON, None)]
  else:
    wanted += [("attn_logits_soft_cap", None, None), ("final_logits_soft_cap", None, None)]
  if not gemma and value("logits_via_embedding"):
    wanted.append(("normalize_embedding_logits", False, True))
  if family is GEMMA3:
    wanted = [entry for entry in wanted if entry[0] != "use_qk_norm"]
  for key, want, default in wanted:
    have = value(key, default)
    have = list(have) if isinstance(have, tuple) else have
    if have != want and not (want is None and not have):
      raise ModelError(
        f"{where}: {key}={have} has no form in HuggingFace's {family.architecture}; it takes {key}={want}"
      )
  if value("rope_type", "default") not in ("default", "llama3.1"):
    raise ModelError(f"{where}: rope_type={value('rope_type')} is not exported; default and llama3.1 are")
