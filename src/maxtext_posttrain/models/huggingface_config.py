"""HuggingFace's config.json to an architecture, and back."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from maxtext_posttrain.errors import ModelError
from maxtext_posttrain.models.architecture import (
  GEMMA_EPSILON,
  MAXTEXT_ROPE_FACTOR,
  UNSET_ROPE_FACTOR,
  Architecture,
  Rope,
  gemma3_name,
)
from maxtext_posttrain.models.families import FAMILIES, GEMMA2, GEMMA3, LLAMA, MISTRAL, QWEN2, QWEN3, Family
from maxtext_posttrain.models.weights import Dimensions

_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_MAX_SIZE = 1 << 31
_MAX_LAYERS = 4096
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
  LLAMA.name: {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048},
  MISTRAL.name: {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 131072},
  QWEN2.name: {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 32768},
  QWEN3.name: {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
    "head_dim": 128,
  },
  GEMMA2.name: {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
  },
  GEMMA3.name: {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
  },
}
"""What transformers takes for keys that a config.json leaves out."""


def family_of_huggingface(config: Mapping[str, Any], where: str) -> Family:
  """The family a config.json names.

  Raises:
    ModelError: none that is known.
  """
  names = config.get("architectures")
  architecture = names[0] if isinstance(names, list) and names else None
  model_type = config.get("model_type")
  for family in FAMILIES:
    if architecture == family.architecture or (architecture is None and model_type == family.model_type):
      return family
  known = ", ".join(family.architecture for family in FAMILIES)
  raise ModelError(f"{where}: architecture {architecture or model_type!r} is not known; known are {known}")


class _Values:
  """A config.json with what transformers would fill in, read with checks."""

  def __init__(self, config: Mapping[str, Any], family: Family, where: str):
    self._config = config
    self._defaults = _DEFAULTS[family.name]
    self.where = where

  def get(self, key: str) -> Any:
    value = self._config.get(key)
    return self._defaults.get(key) if value is None and key not in self._config else value

  def fail(self, message: str) -> ModelError:
    return ModelError(f"{self.where}: {message}")

  def size(self, key: str, default: int | None = None, limit: int = _MAX_SIZE) -> int:
    value = self.get(key)
    value = default if value is None else value
    if value is None:
      raise self.fail(f"{key} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < limit:
      raise self.fail(f"{key} is {value!r}: a whole number from 1 to {limit - 1} is needed")
    return value

  def number(self, key: str, *, optional: bool = False) -> float | None:
    value = self.get(key)
    if value is None and optional:
      return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
      raise self.fail(f"{key} is {value!r}: a number above 0 is needed")
    return float(value)

  def require(self, key: str, wanted: Any, why: str) -> None:
    value = self.get(key)
    if value is not None and value != wanted:
      raise self.fail(f"{key} is {value!r}: {why}")


def from_huggingface(config: Mapping[str, Any], where: str = "config.json") -> Architecture:
  """What a config.json describes.

  Args:
    config: its contents.
    where: its name in messages.

  Raises:
    ModelError: the family is not known, a key is missing or has a value that MaxText cannot compute.
  """
  family = family_of_huggingface(config, where)
  values = _Values(config, family, where)
  heads, emb = values.size("num_attention_heads"), values.size("hidden_size")
  kv_heads = values.size("num_key_value_heads", default=heads)
  if not isinstance(values.get("tie_word_embeddings"), bool):
    raise values.fail(f"tie_word_embeddings is {values.get('tie_word_embeddings')!r}: true or false is needed")
  head = values.size("head_dim", default=emb // heads)
  layers = values.size("num_hidden_layers", limit=_MAX_LAYERS)
  if heads % kv_heads:
    raise values.fail(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
  if head % 2:
    raise values.fail(f"head_dim {head} is odd: rotary embeddings turn pairs")
  _check_variants(family, values)
  notes: list[str] = []
  rope = _rope(family, values)
  query_scale = head**-0.5
  if family in (GEMMA2, GEMMA3):
    query_scale = (values.number("query_pre_attn_scalar") or 1.0) ** -0.5
  architecture = Architecture(
    family=family,
    dimensions=Dimensions(
      layers=layers,
      emb=emb,
      mlp=values.size("intermediate_size"),
      heads=heads,
      kv_heads=kv_heads,
      head=head,
      vocab=values.size("vocab_size"),
      tied=bool(values.get("tie_word_embeddings")),
      neighbours=rope.scaling == "llama3",
      query_scale=query_scale,
    ),
    rope=rope,
    norm_epsilon=values.number("rms_norm_eps") or 0.0,
    max_positions=values.size("max_position_embeddings"),
  )
  if family in (GEMMA2, GEMMA3):
    architecture = _gemma(architecture, values)
  if rope.scaling == "llama3" and rope.factor != MAXTEXT_ROPE_FACTOR:
    notes.append(
      f"rope_factor is {rope.factor:g} here; MaxText's own pre-training has {MAXTEXT_ROPE_FACTOR} built in and does not"
      " read it"
    )
  if family is MISTRAL and values.get("sliding_window"):
    window = values.size("sliding_window")
    notes.append(f"MaxText's Mistral attends to all earlier tokens: results agree up to {window} tokens")
  return dataclasses.replace(architecture, notes=tuple(notes))


def _check_variants(family: Family, values: _Values) -> None:
  """What transformers' classes can do and MaxText's blocks cannot."""
  if family in (GEMMA2, GEMMA3):
    for key in ("hidden_activation", "hidden_act"):
      values.require(key, "gelu_pytorch_tanh", "MaxText computes gelu_pytorch_tanh here")
    if values.get("rms_norm_eps") != GEMMA_EPSILON:
      raise values.fail(f"rms_norm_eps is {values.get('rms_norm_eps')!r}: MaxText's {family.name} has 1e-6 built in")
    if not values.get("tie_word_embeddings"):
      raise values.fail(f"tie_word_embeddings is false: {family.name} has no head of its own in MaxText")
  else:
    values.require("hidden_act", "silu", "MaxText computes silu here")
  if family is not QWEN2:
    values.require("attention_bias", False, f"MaxText's {family.name} has no biases")
  values.require("mlp_bias", False, f"MaxText's {family.name} has no biases")
  values.require("use_sliding_window", False, f"MaxText's {family.name} has no sliding window")
  values.require("use_bidirectional_attention", False, "attention looks back only")


def _gemma(architecture: Architecture, values: _Values) -> Architecture:
  family, dimensions = architecture.family, architecture.dimensions
  length = len(family.kinds)
  if family is GEMMA2 and dimensions.layers % length:
    raise values.fail(f"num_hidden_layers {dimensions.layers}: MaxText's Gemma 2 has pairs of layers")
  pattern = values.get("layer_types")
  wanted = [
    "sliding_attention" if family.kinds[layer % length] == "local" else "full_attention"
    for layer in range(dimensions.layers)
  ]
  if pattern is not None and pattern != wanted:
    raise values.fail(f"layer_types: MaxText's {family.name} has {length - 1} local layers before each global one")
  values.require("sliding_window_pattern", length, f"MaxText's {family.name} has a global layer every {length}")
  attention_softcap = values.number("attn_logit_softcapping", optional=True)
  final_softcap = values.number("final_logit_softcapping", optional=True)
  architecture = dataclasses.replace(
    architecture,
    sliding_window=values.size("sliding_window"),
    attention_softcap=attention_softcap,
    final_softcap=final_softcap,
  )
  if family is GEMMA3:
    gemma3_name(architecture, values.where)
  return architecture


def _rope(family: Family, values: _Values) -> Rope:
  """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
  parameters = values.get("rope_parameters")
  local_theta: Any = None
  if isinstance(parameters, Mapping) and "full_attention" in parameters:
    local = parameters.get("sliding_attention")
    local_theta = local.get("rope_theta") if isinstance(local, Mapping) else None
    parameters = parameters["full_attention"]
  scaling = parameters if parameters is not None else values.get("rope_scaling")
  if scaling is not None and not isinstance(scaling, Mapping):
    raise values.fail(f"rope_scaling is {scaling!r}: a mapping is needed")
  scaling = scaling or {}
  theta = _theta(values, "rope_theta", scaling.get("rope_theta", values.get("rope_theta") or 10_000))
  if family is GEMMA3:
    local_theta = _theta(values, "rope_local_base_freq", local_theta or values.get("rope_local_base_freq"))
  partial = scaling.get("partial_rotary_factor", values.get("partial_rotary_factor"))
  if partial not in (None, 1, 1.0):
    raise values.fail(f"partial_rotary_factor is {partial!r}: MaxText's {family.name} turns whole heads")
  kind = scaling.get("rope_type", scaling.get("type", "default"))
  if kind in ("default", None):
    return Rope(theta, local_theta)
  factor = scaling.get("factor")
  if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 1 <= factor < 1e6:
    raise values.fail(f"rope_scaling factor is {factor!r}: a number from 1 on is needed")
  if kind == "linear":
    return Rope(theta, local_theta, "linear", float(factor))
  if kind == "llama3" and family in (LLAMA, MISTRAL):
    for key, wanted in _LLAMA3_ROPE.items():
      if scaling.get(key, wanted) != wanted:
        raise values.fail(f"rope_scaling {key} is {scaling[key]!r}: MaxText computes {wanted}")
    if factor != int(factor) or factor == UNSET_ROPE_FACTOR:
      raise values.fail(f"rope_scaling factor is {factor!r}: MaxText takes a whole number other than 40")
    return Rope(theta, local_theta, "llama3", float(factor))
  raise values.fail(f"rope_scaling {kind!r}: MaxText's {family.name} has none of that kind")


def _theta(values: _Values, key: str, value: Any) -> int:
  if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _MAX_SIZE or value != int(value):
    raise values.fail(f"{key} is {value!r}: MaxText takes a whole number above 0")
  return int(value)


def huggingface_config(architecture: Architecture, *, dtype: str) -> dict[str, Any]:
  """The config.json that transformers (4 and 5) and vLLM read, without the special tokens' ids.

  Args:
    architecture: the model.
    dtype: of the weights that are written, as `float32`.
  """
  family, dimensions, rope = architecture.family, architecture.dimensions, architecture.rope
  gemma = family in (GEMMA2, GEMMA3)
  positions = architecture.max_positions or _DEFAULTS[family.name]["max_position_embeddings"]
  config: dict[str, Any] = {
    "architectures": [family.architecture],
    "model_type": family.model_type,
    "vocab_size": dimensions.vocab,
    "hidden_size": dimensions.emb,
    "intermediate_size": dimensions.mlp,
    "num_hidden_layers": dimensions.layers,
    "num_attention_heads": dimensions.heads,
    "num_key_value_heads": dimensions.kv_heads,
    "head_dim": dimensions.head,
    "hidden_act": "gelu_pytorch_tanh" if gemma else "silu",
    "rms_norm_eps": architecture.norm_epsilon,
    "rope_theta": float(rope.theta),
    "max_position_embeddings": positions,
    "tie_word_embeddings": dimensions.tied,
    "attention_dropout": 0.0,
    "use_cache": True,
    "torch_dtype": dtype,
  }
  if rope.scaling == "llama3":
    config["rope_scaling"] = {"rope_type": "llama3", "factor": rope.factor, **_LLAMA3_ROPE}
  elif rope.scaling == "linear":
    config["rope_scaling"] = {"rope_type": "linear", "factor": rope.factor}
  if family is not QWEN2:
    config["attention_bias"] = False
  if family is LLAMA:
    config["mlp_bias"] = False
  if family is MISTRAL:
    config["sliding_window"] = None
  if family in (QWEN2, QWEN3):
    config["use_sliding_window"] = False
  if gemma:
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config["query_pre_attn_scalar"] = round(dimensions.query_scale**-2)
    config["sliding_window"] = architecture.sliding_window
    config["attn_logit_softcapping"] = architecture.attention_softcap
    config["final_logit_softcapping"] = architecture.final_softcap
    length = len(family.kinds)
    config["layer_types"] = [
      "sliding_attention" if family.kinds[layer % length] == "local" else "full_attention"
      for layer in range(dimensions.layers)
    ]
  if family is GEMMA3:
    config["sliding_window_pattern"] = len(family.kinds)
    config["rope_local_base_freq"] = float(rope.local_theta or rope.theta)
  return config
