"""The one door to MaxText's internals (pinned: maxtext 0.2.5).

Every other module of this package asks here, so a MaxText release that moves something is met in this file. What we
assume of MaxText is named and tested in `tests/integration/test_maxtext_assumptions.py`. Importing this module imports
MaxText's model code (seconds); nothing that only checks a configuration may import it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pydantic
from flax import nnx
from flax.core.spmd import logical_axis_rules
from flax.linen.spmd import with_logical_constraint
from jax.sharding import Mesh
from maxtext.common import checkpoint_context, common_types, train_state_nnx
from maxtext.configs import pyconfig
from maxtext.inference import kvcache
from maxtext.layers import attentions, embeddings, quantizations
from maxtext.models import models
from maxtext.optimizers import optimizers
from maxtext.utils import maxtext_utils, maxtext_utils_nnx, sharding

from maxtext_posttrain.errors import ConfigError, GenerationError
from maxtext_posttrain.logs import quiet_logs as quiet_logs

PRNG_IMPL = "unsafe_rbg"
"""The key implementation real pre-training sets; its checkpoints hold keys of this shape, (4,) uint32."""

UNSET_ROPE_FACTOR = 40
"""MaxText's default of `rope_factor`."""

TrainStateNNX = train_state_nnx.TrainStateNNX
to_checkpoint_dict = train_state_nnx.to_checkpoint_dict
opt_state_from_checkpoint = train_state_nnx._opt_state_from_linen
split_for_checkpoint = train_state_nnx.split_for_checkpoint
build_orbax_context = checkpoint_context.build_context


class MaxTextConfig(pyconfig.HyperParameters):
  """MaxText's own view of the run: what its model, optimizer and schedule read."""


def use_pretraining_prng() -> None:
  """Makes new PRNG keys of the kind pre-training stores. Call before the first model is built."""
  jax.config.update("jax_default_prng_impl", PRNG_IMPL)


@contextlib.contextmanager
def _without_variables(names: Iterable[str]) -> Iterator[None]:
  """The environment without `names`, inside the block."""
  hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
  try:
    yield
  finally:
    os.environ.update(hidden)


def build_config(
  overrides: Mapping[str, Any], *, base_config: str = "base.yml", hidden_environment: Iterable[str] = ()
) -> MaxTextConfig:
  """Runs MaxText's own configuration: its YAML, its model overlay, its validators, its derived sizes.

  Args:
    overrides: MaxText keys and values; nested ones as mappings.
    base_config: a file of MaxText's `configs` folder.
    hidden_environment: `M_<KEY>` variables whose values `overrides` holds already; MaxText refuses both.

  Raises:
    ConfigError: MaxText's validators refuse a value; one line with what they say.
  """
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  base_path = str(Path(pyconfig.MAXTEXT_CONFIGS_DIR) / base_config)
  try:
    with _without_variables(hidden_environment):
      pydantic_config = pyconfig._initialize_pydantic(["", base_path], **dict(overrides))
  except (ValueError, TypeError, AssertionError, KeyError, FileNotFoundError) as error:
    raise ConfigError(f"MaxText refuses the configuration: {_one_line(error)}") from error
  rules = [[name, _fsdp_before_data(axes)] for name, axes in pydantic_config.logical_axis_rules]
  config = MaxTextConfig(pydantic_config.model_copy(update={"logical_axis_rules": rules}))
  jax.config.update("jax_use_shardy_partitioner", config.shardy)
  jax.config.update("jax_remove_size_one_mesh_axis_from_type", config.remove_size_one_mesh_axis_from_type)
  return config


def _fsdp_before_data(axes: Any) -> Any:
  """The mesh axes of a logical axis, `fsdp` in front of `data` where it has both.

  What lies along both is the batch. In MaxText's order XLA's partitioner swaps shards of it where weights are spread
  over `fsdp`, `tensor` is as large, and a device has fewer tokens than weights: half of the sequences get the results
  of the other half. Which rows a device holds is all that the order changes.
  """
  if isinstance(axes, str) or not {"data", "fsdp"} <= set(axes):
    return axes
  rest = [axis for axis in axes if axis != "data"]
  return [*rest[: rest.index("fsdp") + 1], "data", *rest[rest.index("fsdp") + 1 :]]


def _one_line(error: Exception) -> str:
  """Pydantic's and MaxText's messages span lines; the parts that matter, on one."""
  if isinstance(error, pydantic.ValidationError):
    return "; ".join(f"{'.'.join(map(str, item['loc'])) or 'configuration'}: {item['msg']}" for item in error.errors())
  return " ".join(str(error).split()) or type(error).__name__


def build_mesh(config: MaxTextConfig) -> Mesh:
  """The device mesh pre-training would use for this configuration.

  Raises:
    ConfigError: its parallelism does not fit the devices.
  """
  try:
    return maxtext_utils.get_mesh_from_config(config)
  except (ValueError, AssertionError, NotImplementedError) as error:
    raise ConfigError(
      f"ici_*_parallelism and dcn_*_parallelism do not fit {jax.device_count()} device(s): {_one_line(error)}; each"
      " group's product must be the number of devices, and one of a group may be -1 to fill what is left"
    ) from error


@contextlib.contextmanager
def mesh_context(config: MaxTextConfig, mesh: Mesh) -> Iterator[None]:
  """The mesh and the logical axis rules under which MaxText's models trace and run."""
  with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
    yield


@dataclasses.dataclass(frozen=True)
class PretrainingState:
  """What pre-training itself would build for a configuration, without any of its arrays.

  Attributes:
    create_model: makes the model with real arrays; call it under jit.
    abstract_model: the model with `jax.ShapeDtypeStruct` leaves that carry their shardings.
    tx: MaxText's optimizer over MaxText's schedule, without gradient clipping.
    schedule: learning rate by number of updates already made.
    graphdef: of the `TrainStateNNX`.
    state: abstract state of the `TrainStateNNX`; leaves are `jax.ShapeDtypeStruct` with shardings.
    opt_state: the same optimizer state as `state`'s, with optax's own types.
    trainable: the kind of parameter the optimizer is over: `nnx.Param`, or `nnx.LoRAParam` where the base is frozen.
  """

  create_model: Callable[[], nnx.Module]
  abstract_model: nnx.Module
  tx: optax.GradientTransformation
  schedule: optax.Schedule
  graphdef: nnx.GraphDef
  state: nnx.State
  opt_state: Any
  trainable: type[nnx.Param] = nnx.Param


def _create_model(config: MaxTextConfig, mesh: Mesh) -> nnx.Module:
  rngs = maxtext_utils_nnx.create_nnx_rngs(config)
  quant: Any = quantizations.configure_quantization(config)
  model = models.Transformer(config, mesh, quant=quant, rngs=rngs)
  _set_llama3_rope_factor(model, config)
  return quantizations.maybe_quantize_model(model, config)


class Llama3RotaryEmbedding(embeddings.LLaMARotaryEmbedding):
  """MaxText's `rope_type: llama3.1` with a factor of its own; MaxText's has 8 built in, Llama 3.2 has 32."""

  factor: int = 8

  def _apply_scaling_factor(self, freq: jax.Array) -> jax.Array:
    """Llama 3's rule: waves longer than 8192 slowed by `factor`, those shorter than 2048 not, between them a ramp."""
    turns_in_context = 8192 * freq / (2 * jnp.pi)
    kept = jnp.clip((turns_in_context - 1) / 3, 0, 1)
    return freq * (kept + (1 - kept) / self.factor)


def _set_llama3_rope_factor(model: nnx.Module, config: MaxTextConfig) -> None:
  """Gives a fresh model's rotary embeddings the configuration's `rope_factor`, where `rope_type` is `llama3.1`.

  MaxText reads `rope_factor` for YaRN alone, so its default there stands for the factor that is built in.
  """
  if config.rope_factor in (UNSET_ROPE_FACTOR, Llama3RotaryEmbedding.factor):
    return
  for _, node in list(nnx.iter_graph(model)):
    rotary = getattr(node, "rotary_embedding", None)
    if isinstance(rotary, embeddings.LLaMARotaryEmbedding):
      scaled = Llama3RotaryEmbedding(
        min_timescale=rotary.min_timescale,
        max_timescale=rotary.max_timescale,
        mesh=rotary.mesh,
        embedding_dims=rotary.embedding_dims,
        cast_as_fprop_dtype=rotary.cast_as_fprop_dtype,
        fprop_dtype=rotary.fprop_dtype,
        use_scale=rotary.use_scale,
        shard_mode=rotary.shard_mode,
      )
      scaled.factor = config.rope_factor
      node.rotary_embedding = scaled


def pretraining_state(
  config: MaxTextConfig,
  mesh: Mesh,
  *,
  create_model: Callable[[], nnx.Module] | None = None,
  trainable: type[nnx.Param] = nnx.Param,
) -> PretrainingState:
  """Builds, abstractly, the train state that real pre-training builds for `config` on `mesh`.

  Args:
    config: MaxText's configuration.
    mesh: the devices.
    create_model: makes the model in place of pre-training's, as one with an adapter.
    trainable: the kind of parameter the optimizer is over.
  """
  create_model = create_model or functools.partial(_create_model, config, mesh)

  # Not under `jax.set_mesh`: with a mesh set, Flax asks masked optimizer entries, which have none, for their shape.
  with logical_axis_rules(config.logical_axis_rules):
    schedule = maxtext_utils.create_learning_rate_schedule(config)
    # Muon alone looks at the model, to tell matrices from vectors.
    traced_model = nnx.eval_shape(create_model) if config.opt_type == "muon" else None
    tx = optimizers.get_optimizer(config, schedule, traced_model, mesh=mesh)

    def create_train_state() -> nnx.Module:
      model = create_model()
      return TrainStateNNX(model, nnx.Optimizer(model, tx, wrt=trainable))

    graphdef, state = nnx.split(nnx.eval_shape(create_train_state))
    shardings = sharding.nnx_construct_named_sharding(state, mesh)
    state = jax.tree.map(
      lambda leaf, placed: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed), state, shardings
    )
    abstract: Any = nnx.merge(graphdef, state)
  return PretrainingState(
    create_model=create_model,
    abstract_model=abstract.model,
    tx=tx,
    schedule=schedule,
    graphdef=graphdef,
    state=state,
    opt_state=nnx.as_pure(abstract.optimizer.opt_state),
    trainable=trainable,
  )


def train_state_graphdef(pretraining: PretrainingState, tx: optax.GradientTransformation) -> nnx.GraphDef:
  """The graph of the `TrainStateNNX` with `tx` for its optimizer; `tx` has the state tree of `pretraining.tx`."""
  train_state: Any = nnx.merge(pretraining.graphdef, pretraining.state)
  train_state.optimizer.tx = tx
  return nnx.graphdef(train_state)


def init_model(config: MaxTextConfig, pretraining: PretrainingState, mesh: Mesh) -> nnx.Module:
  """A model with freshly initialised weights, each made where its sharding places it; may run in any thread."""
  with logical_axis_rules(config.logical_axis_rules):
    return maxtext_utils_nnx.create_nnx_sharded_model(pretraining.abstract_model, pretraining.create_model, mesh=mesh)


def init_all_but_weights(config: MaxTextConfig, pretraining: PretrainingState) -> nnx.State:
  """What a fresh model has beside its weights (rng state, buffers), for one whose weights come from elsewhere."""

  def create() -> nnx.State:
    # XLA drops what nobody asks for: no weight is drawn.
    return nnx.state(pretraining.create_model(), nnx.Not(nnx.Param))

  abstract = nnx.state(pretraining.abstract_model, nnx.Not(nnx.Param))
  with logical_axis_rules(config.logical_axis_rules):
    return jax.jit(create, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract))()


def batch_sharding(config: MaxTextConfig, mesh: Mesh) -> jax.sharding.NamedSharding:
  """How pre-training places a [batch, seq] array of tokens."""
  return sharding.get_input_data_sharding(config, mesh)


def tflops_per_device(config: MaxTextConfig) -> float:
  """Model TFLOPs of one update on one device, forward and backward, by MaxText's own count.

  Over a frozen base the backward pass makes no gradients of the weights, a third of what MaxText counts for them.
  """
  total, of_weights, _ = maxtext_utils.calculate_tflops_training_per_device(config, log=False)
  return float(total - of_weights / 3) if config.lora.enable_lora else float(total)


def is_tunix_adapter(model: nnx.Module) -> bool:
  """Whether `model` is MaxText's Tunix adapter, told by its class: its one child, `base`, is the model."""
  return any(cls.__name__ == "TunixMaxTextAdapter" for cls in type(model).__mro__)


def forward(config: MaxTextConfig, model: nnx.Module, batch: Mapping[str, jax.Array], *, is_train: bool) -> jax.Array:
  """Logits [batch, seq, vocab] of a MaxText model for a batch with MaxText's keys, each [batch, seq]."""
  return model(
    decoder_input_tokens=batch["inputs"],
    decoder_positions=batch["inputs_position"],
    decoder_segment_ids=batch["inputs_segmentation"],
    enable_dropout=config.enable_dropout if is_train else False,
    decoder_target_tokens=batch["targets"],
    decoder_target_mask=batch["targets_segmentation"],
  )


def pop_attention_outputs(model: nnx.Module) -> jax.Array | None:
  """Takes what the attention of each layer gave in the last forward pass out of the model.

  Returns:
    [layers, batch, seq, emb], or None: a model gives them out where `distill_beta` is above 0 and layers are scanned.

  Raises:
    ConfigError: its layers are of several kinds, and are scanned in blocks.
  """
  name = "out_projection_activations"
  sown = nnx.pop(model, nnx.All(nnx.Intermediate, nnx.PathContains(name))).to_pure_dict()
  found = maxtext_utils.collect_intermediates_by_suffix(sown, name, ravel=False)
  if len(found) > 1:
    raise ConfigError("distill_beta: layers of several kinds, scanned in blocks, give no features; set it to 0")
  return found[0] if found else None


def hidden_states(
  config: MaxTextConfig, model: nnx.Module, batch: Mapping[str, jax.Array], *, is_train: bool
) -> jax.Array:
  """What the output head multiplies, [batch, seq, emb]: as `forward`, up to the final norm and dropout.

  `output_head` goes on from here. Of what `forward` leaves in the model (the MoE terms, dropout's counts), all is left.
  """
  parts: Any = model
  decoder = parts.decoder
  full = decoder.config
  # Under vocabulary tiling MaxText's decoder leaves the head out. The whole model is called: adapters work from there.
  decoder.config = MaxTextConfig(config._pydantic_config.model_copy(update={"num_vocab_tiling": 2}))
  try:
    forward(config, model, batch, is_train=is_train)
  finally:
    decoder.config = full
  sown = nnx.pop(decoder, nnx.All(nnx.Intermediate, nnx.PathContains("hidden_states")))
  hidden = jax.tree.leaves(sown)[-1]
  return decoder.dropout(decoder.decoder_norm(hidden), deterministic=not (is_train and config.enable_dropout))


@dataclasses.dataclass(frozen=True)
class OutputHead:
  """A model's output head as a pure function.

  Attributes:
    weights: pytree of its float arrays, in the dtype its product takes them.
    project: (weights, hidden [..., emb] from `hidden_states`) to logits [..., vocab].
  """

  weights: Any
  project: Callable[[Any, jax.Array], jax.Array]


def output_head(config: MaxTextConfig, model: nnx.Module) -> OutputHead:
  """The head that `forward` applies. `can_split_head` says whether it may be applied by itself."""
  parts: Any = model
  if not config.logits_via_embedding:
    graphdef, weights, rest = nnx.split(parts.decoder.logits_dense, nnx.Param, ...)

    def project(weights: Any, hidden: jax.Array) -> jax.Array:
      return nnx.merge(graphdef, weights, rest, copy=True)(hidden)

    return OutputHead(weights, project)

  # MaxText rounds a tied table to bfloat16 in every product; done here, once, the gradient is rounded once too.
  table = parts.token_embedder.embedding.get_value().astype(jnp.bfloat16)
  product_dtype = jnp.float32 if config.logits_dot_in_fp32 else config.dtype

  def project_tied(table: jax.Array, hidden: jax.Array) -> jax.Array:
    logits = jnp.dot(hidden, table.T, preferred_element_type=product_dtype)
    if config.normalize_embedding_logits:
      logits /= jnp.sqrt(hidden.shape[-1])
    cap = config.final_logits_soft_cap
    return jnp.tanh(logits / cap) * cap if cap else logits

  return OutputHead(table.astype(jnp.promote_types(table.dtype, config.dtype)), project_tied)


def can_split_head(config: MaxTextConfig, model: nnx.Module) -> bool:
  """Whether `hidden_states` and `output_head` give what `forward` does.

  Quantized heads keep statistics, an adapter on the head works inside the model alone, and explicit sharding and
  weights kept in host memory want what MaxText wraps around.
  """
  if config.quantization or config.parameter_memory_host_offload:
    return False
  if config.shard_mode == common_types.ShardMode.EXPLICIT:
    return False
  parts: Any = model
  dense = getattr(parts.decoder, "logits_dense", None)
  return dense is None or not jax.tree.leaves(nnx.state(dense, nnx.LoRAParam))


def pop_load_balance_loss(model: nnx.Module) -> jax.Array | None:
  """Takes what the forward pass sowed out of the model; the mean of its MoE load-balance losses, if it has any."""
  intermediates = nnx.pop(model, nnx.Intermediate).to_pure_dict()
  losses = maxtext_utils.collect_intermediates_by_suffix(intermediates, "moe_lb_loss")
  return jnp.mean(jnp.concatenate(losses)) if losses else None


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


_GENERATING = frozenset(
  common_types.DecoderBlockType(name)
  for name in ("llama2", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
)
_NOT_GENERATING = ("use_multimodal", "use_audio", "quantize_kvcache", "using_pipeline_parallelism", "moba", "fused_qkv")


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
    return nnx.eval_shape(lambda: _create_model(config, mesh))


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
