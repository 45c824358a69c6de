"""One table per family: where each HuggingFace weight lies in MaxText's tree.

A rule is read in both directions and serves scanned and unscanned checkpoints alike: `weights.py` derives the place of
each layer from the family's blocks. What happens to a weight on the way stands in its rule, as a form (how its axes are
arranged) and at most one of a scale, an offset and the rotary layout:

- MaxText's Llama, Mistral and Gemma 2 blocks do not divide attention scores by sqrt(head_dim); the query kernel holds
  that factor. Its Qwen and Gemma 3 blocks multiply the query instead.
- MaxText's Gemma norms hold 1 + w, its Gemma embedding table holds sqrt(emb_dim) * w.
- MaxText's rotary embedding turns (i, i + head_dim/2) pairs as transformers does, except `rope_type: llama3.1`, which
  turns neighbours (2i, 2i + 1).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Form = Literal["vector", "matrix", "linear", "heads_in", "kv_heads_in", "heads_bias", "kv_heads_bias", "heads_out"]
Scale = Literal["none", "query", "embedding"]


@dataclasses.dataclass(frozen=True)
class Rule:
  """How one weight lies on both sides.

  Attributes:
    huggingface: its name, with `{layer}` where every layer has one.
    maxtext: its path; below the layer's own path where `huggingface` has `{layer}`. `{kind}` is the layer's name within
      its block.
    form: the axes on both sides; E is emb_dim, F mlp_dim, V vocab_size, H heads (or KV heads), D head_dim:
      `vector` [n], `matrix` [V, E], both unchanged; `linear` [out, in] to [in, out]; `heads_in` [H*D, E] to [E, H, D];
      `heads_bias` [H*D] to [H, D]; `heads_out` [E, H*D] to [H, D, E].
    size: of `vector` and `linear`: the dimensions' names on HuggingFace's side.
    scale: a factor that MaxText's weight holds and HuggingFace's does not.
    offset: added to HuggingFace's weight.
    rotary: the last axis follows the rotary layout.
    gguf: the tensor's name in GGUF files, without `.weight`; `{layer}` as above.
  """

  huggingface: str
  maxtext: str
  form: Form
  gguf: str
  size: tuple[str, ...] = ()
  scale: Scale = "none"
  offset: float = 0.0
  rotary: bool = False

  @property
  def in_layer(self) -> bool:
    """Whether every layer has one."""
    return "{layer}" in self.huggingface


@dataclasses.dataclass(frozen=True)
class Family:
  """Models that share a table.

  Attributes:
    name: for messages.
    decoder_block: MaxText's key that tells the family.
    architecture: HuggingFace's class.
    model_type: HuggingFace's `model_type`.
    gguf_architecture: GGUF's `general.architecture`.
    rules: every weight of a model with a head of its own; `head` is left out where embeddings are tied.
    kinds: names of the layers in one block of MaxText's, in order; a block is what it scans over.
    nested: the block holds its layers as `layers_<n>` modules, and those that fill no block lie in `layers_remainder`.
      Otherwise the names in `kinds` are parts of the block's own parameter names.
  """

  name: str
  decoder_block: str
  architecture: str
  model_type: str
  gguf_architecture: str
  rules: tuple[Rule, ...]
  kinds: tuple[str, ...] = ("",)
  nested: bool = False


_EMBEDDING = Rule("model.embed_tokens.weight", "token_embedder/embedding", "matrix", "token_embd", ("vocab", "emb"))
_HEAD = Rule("lm_head.weight", "decoder/logits_dense/kernel", "linear", "output", ("vocab", "emb"))
_FINAL_NORM = Rule("model.norm.weight", "decoder/decoder_norm/scale", "vector", "output_norm", ("emb",))
HEAD = _HEAD.huggingface
EMBEDDING = _EMBEDDING.huggingface


def _layer(huggingface: str, maxtext: str, form: Form, gguf: str, size: tuple[str, ...] = (), **how: object) -> Rule:
  name = huggingface if huggingface.endswith(".bias") else f"{huggingface}.weight"
  return Rule(f"model.layers.{{layer}}.{name}", maxtext, form, f"blk.{{layer}}.{gguf}", size, **how)  # type: ignore[arg-type]


def _attention(attention: str = "self_attention", *, scale: Scale = "none") -> tuple[Rule, ...]:
  return (
    _layer("self_attn.q_proj", f"{attention}/query/kernel", "heads_in", "attn_q", scale=scale, rotary=True),
    _layer("self_attn.k_proj", f"{attention}/key/kernel", "kv_heads_in", "attn_k", rotary=True),
    _layer("self_attn.v_proj", f"{attention}/value/kernel", "kv_heads_in", "attn_v"),
    _layer("self_attn.o_proj", f"{attention}/out/kernel", "heads_out", "attn_output"),
  )


def _mlp(mlp: str = "mlp") -> tuple[Rule, ...]:
  return (
    _layer("mlp.gate_proj", f"{mlp}/wi_0/kernel", "linear", "ffn_gate", ("mlp", "emb")),
    _layer("mlp.up_proj", f"{mlp}/wi_1/kernel", "linear", "ffn_up", ("mlp", "emb")),
    _layer("mlp.down_proj", f"{mlp}/wo/kernel", "linear", "ffn_down", ("emb", "mlp")),
  )


def _norm(huggingface: str, maxtext: str, gguf: str, size: str = "emb", offset: float = 0.0) -> Rule:
  return _layer(huggingface, f"{maxtext}/scale", "vector", gguf, (size,), offset=offset)


_TWO_NORMS = (
  _norm("input_layernorm", "pre_self_attention_layer_norm", "attn_norm"),
  _norm("post_attention_layernorm", "post_self_attention_layer_norm", "ffn_norm"),
)


def _gemma_norms(suffix: str) -> tuple[Rule, ...]:
  return (
    _norm("input_layernorm", f"pre_self_attention_norm{suffix}", "attn_norm", offset=1.0),
    _norm("post_attention_layernorm", f"post_self_attention_norm{suffix}", "post_attention_norm", offset=1.0),
    _norm("pre_feedforward_layernorm", f"pre_ffw_norm{suffix}", "ffn_norm", offset=1.0),
    _norm("post_feedforward_layernorm", f"post_ffw_norm{suffix}", "post_ffw_norm", offset=1.0),
  )


def _qk_norms(offset: float = 0.0) -> tuple[Rule, ...]:
  return (
    _norm("self_attn.q_norm", "self_attention/query_norm", "attn_q_norm", "head", offset),
    _norm("self_attn.k_norm", "self_attention/key_norm", "attn_k_norm", "head", offset),
  )


_PLAIN = (_EMBEDDING, _FINAL_NORM, _HEAD)
_GEMMA = (
  dataclasses.replace(_EMBEDDING, scale="embedding"),
  dataclasses.replace(_FINAL_NORM, offset=1.0),
  _HEAD,
)

LLAMA = Family(
  name="Llama",
  decoder_block="llama2",
  architecture="LlamaForCausalLM",
  model_type="llama",
  gguf_architecture="llama",
  rules=(*_PLAIN, *_TWO_NORMS, *_attention(scale="query"), *_mlp()),
)

MISTRAL = dataclasses.replace(
  LLAMA, name="Mistral", decoder_block="mistral", architecture="MistralForCausalLM", model_type="mistral"
)

QWEN2 = Family(
  name="Qwen2.5",
  decoder_block="qwen2",
  architecture="Qwen2ForCausalLM",
  model_type="qwen2",
  gguf_architecture="qwen2",
  rules=(
    *_PLAIN,
    *_TWO_NORMS,
    *_attention(),
    _layer("self_attn.q_proj.bias", "self_attention/query/bias", "heads_bias", "attn_q.bias", rotary=True),
    _layer("self_attn.k_proj.bias", "self_attention/key/bias", "kv_heads_bias", "attn_k.bias", rotary=True),
    _layer("self_attn.v_proj.bias", "self_attention/value/bias", "kv_heads_bias", "attn_v.bias"),
    *_mlp(),
  ),
)

QWEN3 = Family(
  name="Qwen3",
  decoder_block="qwen3",
  architecture="Qwen3ForCausalLM",
  model_type="qwen3",
  gguf_architecture="qwen3",
  rules=(*_PLAIN, *_TWO_NORMS, *_attention(), *_qk_norms(), *_mlp()),
)

GEMMA2 = Family(
  name="Gemma 2",
  decoder_block="gemma2",
  architecture="Gemma2ForCausalLM",
  model_type="gemma2",
  gguf_architecture="gemma2",
  rules=(
    *_GEMMA,
    *_gemma_norms("_{kind}"),
    *_attention("self_attention_{kind}", scale="query"),
    *_mlp("mlp_{kind}"),
  ),
  kinds=("local", "global"),
)

GEMMA3 = Family(
  name="Gemma 3",
  decoder_block="gemma3",
  architecture="Gemma3ForCausalLM",
  model_type="gemma3_text",
  gguf_architecture="gemma3",
  rules=(*_GEMMA, *_gemma_norms(""), *_attention(), *_qk_norms(offset=1.0), *_mlp()),
  kinds=("local", "local", "local", "local", "local", "global"),
  nested=True,
)

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3)
