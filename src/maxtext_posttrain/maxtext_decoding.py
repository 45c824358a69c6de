"""Generating with MaxText's models on a cache of our own: the door's part for the native engine (maxtext 0.2.5).

`decoding_model` builds it without caches, `prefill` gives it those of some prompts, `decode` goes on a token at a time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import logical_axis_rules
from flax.linen.spmd import with_logical_constraint
from jax.sharding import Mesh
from maxtext.common import common_types
from maxtext.inference import kvcache
from maxtext.layers import attentions

from maxtext_posttrain.errors import GenerationError
from maxtext_posttrain.maxtext_api import MaxTextConfig, new_model

_GENERATING = frozenset(
  common_types.DecoderBlockType(name)
  for name in ("llama2", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
)
_NOT_GENERATING = ("use_multimodal", "use_audio", "quantize_kvcache", "using_pipeline_parallelism", "moba", "fused_qkv")


def inference_config(config: MaxTextConfig, platform: str) -> MaxTextConfig:
  """`config` for generating: layers apart, since a scan would copy each layer's weights for each token.

  On anything but a TPU the cache lies [batch, heads, length, head dim], so that attention reads it as it is.
  """
  update: dict[str, Any] = {
    "scan_layers": False,
    "remat_policy": "none",
    "use_ragged_attention": False,
    "attention": "dot_product" if config.attention == "dot_product" else "autoselected",
  }
  if platform != "tpu":
    order = "0,2,1,3"
    update |= {"prefill_cache_axis_order": order, "ar_cache_axis_order": order, "compute_axis_order": order}
  return MaxTextConfig(config._pydantic_config.model_copy(update=update))


def decoding_model(config: MaxTextConfig, mesh: Mesh) -> nnx.Module:
  """The abstract model of an `inference_config`, without caches.

  Raises:
    GenerationError: its architecture, or something it is configured with, is none we generate with.
  """
  if config.decoder_block not in _GENERATING:
    known = ", ".join(sorted(block.value for block in _GENERATING))
    raise GenerationError(f"decoder_block={config.decoder_block.value}: text can be generated with {known}")
  for key in _NOT_GENERATING:
    if getattr(config, key, False):
      raise GenerationError(f"{key}={getattr(config, key)}: text can't be generated with it; set {key}=false")
  with logical_axis_rules(config.logical_axis_rules):
    return nnx.eval_shape(lambda: new_model(config, mesh))


def _attentions(model: nnx.Module) -> list[Any]:
  return [module for _, module in nnx.iter_modules(model) if isinstance(module, attentions.Attention)]


class DecodingCache(nnx.Module):
  """The keys and values of one attention, prompt and new tokens in one array, as MaxText's attention asks for them.

  MaxText's own cache has an array for prompts and one for new tokens; attention runs over each, and joins them.

  Attributes:
    keys: in the axis order of MaxText's cache, columns for the prompt and then one for each new token.
    values: likewise.
  """

  def __init__(self, prompts: Any, new_tokens: int):
    """From MaxText's cache after a prefill, with room for new tokens."""
    self._order = tuple(prompts.prefill_cache_axis_order)
    self._axis_names = kvcache.transpose_tuple(prompts.cache_logical_axis_names, self._order)
    self._columns = self._order.index(1)
    room = [(0, new_tokens if axis == self._columns else 0) for axis in range(len(self._order))]
    self.keys = nnx.Cache(jnp.pad(prompts.cached_prefill_key.get_value(), room))
    self.values = nnx.Cache(jnp.pad(prompts.cached_prefill_value.get_value(), room))

  def prepare(self, column: jax.Array, seen: jax.Array) -> None:
    """Says where the next key and value go, scalar int32, and which columns are seen then, [batch, columns] bool."""
    self._column = nnx.data(column)
    self._seen = nnx.data(jnp.where(seen, common_types.DECODING_ACTIVE_SEQUENCE_INDICATOR, 0))

  def __call__(self, key: jax.Array, value: jax.Array, **_: Any) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
    """Puts a token's key and value [batch, 1, heads, head dim] in; all of them, and which of them are seen."""
    return (self._put(self.keys, key), self._put(self.values, value), self._seen), None

  def _put(self, cache: nnx.Cache, one: jax.Array) -> jax.Array:
    one = jnp.transpose(one, self._order)
    whole = jax.lax.dynamic_update_slice_in_dim(cache.get_value(), one, self._column, self._columns)
    whole = with_logical_constraint(whole, self._axis_names)
    cache.set_value(whole)
    return kvcache.reverse_transpose(whole, self._order)


def prefill(model: nnx.Module, tokens: jax.Array, lengths: jax.Array, *, new_tokens: int) -> None:
  """Gives each attention a cache with the keys and values of prompts and room for new tokens.

  Args:
    model: from `decoding_model`, with weights; afterwards it decodes, and does nothing else.
    tokens: [batch, prompt_length] int32, padded on the right.
    lengths: [batch] int32, of the prompts.
    new_tokens: how often `decode` is called at most.
  """
  for attention in _attentions(model):
    attention.max_prefill_predict_length = tokens.shape[1]
    attention.max_target_length = tokens.shape[1] + new_tokens
    attention.model_mode = common_types.MODEL_MODE_AUTOREGRESSIVE
    attention.KVCache_0 = nnx.data(attention.init_kv_caches(inputs_kv_shape=(tokens.shape[0], 1, 1)))
  columns = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  parts: Any = model
  # The logits are left unused, so that XLA drops their computation.
  parts.decoder(
    shared_embedding=parts.token_embedder,
    decoder_input_tokens=tokens,
    decoder_positions=columns,
    decoder_segment_ids=jnp.where(columns < lengths[:, None], common_types.DECODING_ACTIVE_SEQUENCE_INDICATOR, 0),
    deterministic=True,
    model_mode=common_types.MODEL_MODE_PREFILL,
  )
  for attention in _attentions(model):
    attention.KVCache_0 = nnx.data(DecodingCache(attention.KVCache_0, new_tokens))
    # MaxText measures a window from the end of the cache, whose columns are not all filled: `decode` masks instead.
    attention.attention_op.attention_type = common_types.AttentionType.GLOBAL


def decode(model: nnx.Module, tokens: jax.Array, lengths: jax.Array, step: jax.Array) -> jax.Array:
  """Puts one more token of each sequence into the caches; returns the logits of the next, [batch, vocab].

  Args:
    model: after `prefill`.
    tokens: [batch] int32.
    lengths: [batch] int32, of the prompts as `prefill` had them.
    step: scalar int32, calls before this one.
  """
  positions = lengths + step
  for attention in _attentions(model):
    cache, width = attention.KVCache_0, attention.max_prefill_predict_length
    columns = jnp.arange(attention.max_target_length)
    # The prompt, which is padded, then the new tokens up to this one.
    age = positions[:, None] - jnp.where(columns < width, columns, lengths[:, None] + columns - width)
    seen = (age >= 0) & ((columns < lengths[:, None]) | (columns >= width))
    if attention.attention_type == common_types.AttentionType.LOCAL_SLIDING:
      seen &= age < attention.sliding_window_size
    cache.prepare(width + step, seen)
  parts: Any = model
  logits = parts(
    decoder_input_tokens=tokens[:, None],
    decoder_positions=positions[:, None],
    enable_dropout=False,
    model_mode=common_types.MODEL_MODE_AUTOREGRESSIVE,
  )
  return logits[:, 0].astype(jnp.float32)
