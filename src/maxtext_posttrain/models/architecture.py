"""What a model is, apart from its weights: between HuggingFace's config.json and MaxText's keys, both ways."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from maxtext_posttrain.errors import ModelError
from maxtext_posttrain.models.families import FAMILIES, GEMMA2, GEMMA3, LLAMA, MISTRAL, QWEN2, QWEN3, Family
from maxtext_posttrain.models.weights import Dimensions

MAXTEXT_ROPE_FACTOR = 8
"""The factor of Llama 3's rope scaling that MaxText 0.2.5 has built in; this package's models take another."""

_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_MAX_SIZE = 1 << 31
_MAX_LAYERS = 4096
_GEMMA_EPSILON = 1e-6
_UNSET_ROPE_FACTOR = 40
_UNSET_POSITIONS = 163840
"""MaxText's defaults of keys that it reads for YaRN alone."""
_GEMMA2_27B = (4608, 32)
"""emb_dim and heads of the one Gemma 2 whose attention scale is not head_dim's."""

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


@dataclasses.dataclass(frozen=True)
class Rope:
  """Rotary position embedding.

  Attributes:
    theta: its base (of global layers, where local ones have their own).
    local_theta: of Gemma 3's local layers.
    scaling: `llama3` (longer waves slowed by `factor`), `linear` (all of them) or none.
    factor: of the scaling.
  """

  theta: int
  local_theta: int | None = None
  scaling: Literal["none", "llama3", "linear"] = "none"
  factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Architecture:
  """A model without its weights.

  Attributes:
    family: whose table applies.
    dimensions: its sizes.
    rope: its position embedding.
    norm_epsilon: of its RMS norms.
    sliding_window: of Gemma's local layers.
    attention_softcap: of attention scores.
    final_softcap: of logits.
    max_positions: the context it was made for, where that is known.
    notes: where MaxText computes it differently, one line each.
  """

  family: Family
  dimensions: Dimensions
  rope: Rope
  norm_epsilon: float
  sliding_window: int | None = None
  attention_softcap: float | None = None
  final_softcap: float | None = None
  max_positions: int | None = None
  notes: tuple[str, ...] = ()


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
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
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
    if values.get("rms_norm_eps") != _GEMMA_EPSILON:
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
    _gemma3_name(architecture, values.where)
  return architecture


def _gemma3_name(architecture: Architecture, where: str) -> str:
  """MaxText tells Gemma 3's attention scale by the model's name.

  Raises:
    ModelError: it has no name for this scale.
  """
  dimensions = architecture.dimensions
  if math.isclose(dimensions.query_scale, dimensions.head**-0.5, rel_tol=1e-6):
    return "gemma3-4b"
  if math.isclose(dimensions.query_scale, (dimensions.emb // dimensions.heads) ** -0.5, rel_tol=1e-6):
    return "gemma3-27b"
  scalar = dimensions.query_scale**-2
  raise ModelError(
    f"{where}: query_pre_attn_scalar {scalar:g}: MaxText's Gemma 3 knows head_dim ({dimensions.head}) and"
    f" hidden_size / heads ({dimensions.emb // dimensions.heads})"
  )


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
    if factor != int(factor) or factor == _UNSET_ROPE_FACTOR:
      raise values.fail(f"rope_scaling factor is {factor!r}: MaxText takes a whole number other than 40")
    return Rope(theta, local_theta, "llama3", float(factor))
  raise values.fail(f"rope_scaling {kind!r}: MaxText's {family.name} has none of that kind")


def _theta(values: _Values, key: str, value: Any) -> int:
  if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _MAX_SIZE or value != int(value):
    raise values.fail(f"{key} is {value!r}: MaxText takes a whole number above 0")
  return int(value)


def maxtext_keys(architecture: Architecture) -> dict[str, Any]:
  """MaxText's keys for a model, on top of its base.yml."""
  family, dimensions, rope = architecture.family, architecture.dimensions, architecture.rope
  gemma = family in (GEMMA2, GEMMA3)
  keys: dict[str, Any] = {
    "model_name": _gemma3_name(architecture, "model") if family is GEMMA3 else "default",
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
    factor = value("rope_factor", _UNSET_ROPE_FACTOR)
    factor = MAXTEXT_ROPE_FACTOR if factor == _UNSET_ROPE_FACTOR else factor
    rope = dataclasses.replace(rope, scaling="llama3", factor=float(factor))
  elif linear != 1.0:
    rope = dataclasses.replace(rope, scaling="linear", factor=linear)
  if family is GEMMA3:
    local = int(value("local_rope_max_timescale", -1))
    rope = dataclasses.replace(rope, local_theta=local if local > 0 else rope.theta)
  positions = value("max_position_embeddings", _UNSET_POSITIONS)
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
    max_positions=None if positions == _UNSET_POSITIONS else positions,
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
    wanted += [("normalization_layer_epsilon", _GEMMA_EPSILON, None)]
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
