"""The part of the door to MaxText's internals that LoRA needs: its Qwix path (pinned: maxtext 0.2.5, qwix 0.1.8).

MaxText trains adapters by Qwix: the model's `__call__` is intercepted, and each matrix product of a chosen module with
its kernel W becomes x W + (alpha / rank) (x A) B. A and B are `nnx.LoRAParam`s beside the kernel, `kernel_lora_a`
[inputs, rank] and `kernel_lora_b` [rank, outputs], where scanned layers stack them along `param_scan_axis` as they
stack the kernel. With `lora_weight_qtype` the kernel itself is replaced by Qwix's quantised array (QLoRA).

We build on MaxText's provider settings, its table of module paths and its Qwix calls, and differ in three things:
adapters are made under `jit`, without device arrays of their own; a product keeps the dtype it has without an adapter
(MaxText's computation in bfloat16 over float32 weights fails otherwise); and the table is also asked by `decoder_block`
where `model_name` says nothing, for unscanned layers of every family too.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import qwix
import yaml
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import Mesh
from maxtext.configs import pyconfig
from maxtext.utils import lora_utils

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.errors import ConfigError
from maxtext_posttrain.lora.kernels import KERNEL, LORA_A, LORA_B, adapted_kernels, merged_kernel, misfit, stacked_axis
from maxtext_posttrain.maxtext_api import MaxTextConfig, PretrainingState

FAMILIES = ("llama2", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3", "olmo3")
"""Decoder blocks whose adapters are tested here: their dense kernels; experts stay frozen."""

_NOT_ADAPTED = ("using_pipeline_parallelism", "quantization", "use_qwix_quantization", "parameter_memory_host_offload")
_LISTED = 12
_TABLE = Path("post_train") / "lora_module_path.yml"


class _Provider(qwix.LoraProvider):
  """MaxText's provider, whose products keep their dtype."""

  def dot_general(self, lhs: Any, rhs: Any, dimension_numbers: Any, *args: Any, **kwargs: Any) -> jax.Array:
    """The product with its adapter's part, in the dtype the product alone has."""
    result = super().dot_general(lhs, rhs, dimension_numbers, *args, **kwargs)
    wanted = args[1] if len(args) > 1 else kwargs.get("preferred_element_type")
    if wanted is None:
      wanted = jnp.promote_types(lhs.dtype, rhs.dtype) if isinstance(rhs, jax.Array) else lhs.dtype
    return result.astype(wanted)


def lora_enabled(config: MaxTextConfig) -> bool:
  """Whether the run trains an adapter."""
  return bool(config.lora.enable_lora)


def without_lora(config: MaxTextConfig) -> MaxTextConfig:
  """The configuration of the base model alone."""
  lora = config.lora.model_copy(update={"enable_lora": False, "lora_weight_qtype": None, "lora_tile_size": None})
  return MaxTextConfig(config._pydantic_config.model_copy(update={"lora": lora}))


def module_path(config: MaxTextConfig) -> str:
  """The regular expression of the modules that get an adapter: the configuration's, or MaxText's for the family."""
  if config.lora.lora_module_path:
    return config.lora.lora_module_path
  table = yaml.safe_load((Path(pyconfig.MAXTEXT_CONFIGS_DIR) / _TABLE).read_text(encoding="utf-8"))
  names = [name for name in table if name != "default"]
  given = (str(config.model_name).lower(), config.decoder_block.value)
  name = next((name for text in given for name in names if text.startswith(name)), "default")
  # The layer's number is optional: scanned layers have none, unscanned ones are `layers_0`.
  return re.sub(r"layers(\)?)/", r"layers(?:_[0-9]+|/[0-9]+)?\1/", table[name])


def check_supported(config: MaxTextConfig) -> None:
  """Refuses models that MaxText's LoRA can't adapt, or that are untested here.

  Raises:
    ConfigError: says what, and what can be.
  """
  if config.decoder_block.value not in FAMILIES:
    raise ConfigError(
      f"lora.enable_lora: decoder_block={config.decoder_block.value} has no adapters here; known are"
      f" {', '.join(FAMILIES)}"
    )
  for key in _NOT_ADAPTED:
    value = getattr(config, key, False)
    if value:
      shown = getattr(value, "value", value)
      raise ConfigError(f"lora.enable_lora: {key}={shown} does not go with adapters; leave it out")
  tile = config.lora.lora_tile_size
  if config.lora.lora_weight_qtype is None and tile:
    raise ConfigError(f"lora.lora_tile_size={tile}: sizes the blocks of a quantised base; set lora.lora_weight_qtype")


def _rule(config: MaxTextConfig) -> dict[str, Any]:
  lora = config.lora
  rule = {"module_path": module_path(config), "weight_qtype": lora.lora_weight_qtype, "tile_size": lora.lora_tile_size}
  return {key: value for key, value in rule.items() if value}


def _call_arguments(mesh: Mesh) -> dict[str, Any]:
  tokens, positions = lora_utils._prepare_dummy_inputs(mesh)
  return {"decoder_input_tokens": tokens, "decoder_positions": positions, "enable_dropout": False}


def adapted(config: MaxTextConfig, mesh: Mesh, model: nnx.Module) -> nnx.Module:
  """`model` with a fresh adapter, B zero, on each module that the configuration chooses; call it under a trace.

  A is drawn from `init_weights_seed`. With `lora_weight_qtype` those modules' kernels are quantised.

  Raises:
    ConfigError: a module was chosen that no adapter can be on, or none was; says what there is.
  """
  check_supported(config)
  chosen = module_path(config)
  try:
    provider = _Provider(rank=config.lora.lora_rank, alpha=config.lora.lora_alpha, **_rule(config))
    result: Any = qwix.apply_lora_to_model(
      model, provider, rngs=nnx.Rngs(params=config.init_weights_seed), **_call_arguments(mesh)
    )
  except (re.error, ValueError, TypeError, NotImplementedError, AssertionError) as error:
    raise ConfigError(f"{_describe(config)}: Qwix can't adapt the model: {' '.join(str(error).split())}") from error
  for _, node in nnx.iter_graph(result):
    if isinstance(node, nnx.Module) and hasattr(node, "qwix_rngs"):
      del node.qwix_rngs
    if isinstance(node, nnx.LoRAParam):
      # Replicated, as MaxText has them. They got the kernel's axis names, which are more than they have axes.
      node.set_metadata("out_sharding", None)
      node.set_metadata("sharding_names", None)
  nnx.pop(result, nnx.Intermediate)
  _check_adapters(chosen, model, result, config.param_scan_axis)
  return result


def _describe(config: MaxTextConfig) -> str:
  settings = {"rank": config.lora.lora_rank, **_rule(config)}
  return "lora: " + ", ".join(f"{key}={value}" for key, value in settings.items())


def _check_adapters(chosen: str, model: nnx.Module, result: nnx.Module, scan_axis: int) -> None:
  adapters = _shapes(result, nnx.LoRAParam)
  weights = _shapes(model, nnx.Param)
  dense = sorted(
    {"/".join(map(str, path[:-1])) for path, shape in weights.items() if path[-1] == KERNEL and len(shape) > 1}
  )
  listed = ", ".join(dense[:_LISTED]) + (f" and {len(dense) - _LISTED} more" if len(dense) > _LISTED else "")
  if not adapters:
    raise ConfigError(f"lora.lora_module_path={chosen}: matches no module with a kernel; there are {listed}")
  for path in adapters:
    if path[-1] not in (LORA_A, LORA_B):
      raise ConfigError(
        f"lora.lora_module_path={chosen}: {'/'.join(map(str, path))}: only dense kernels can be merged again; there are"
        f" {listed}"
      )
  for path, a, b in adapted_kernels(adapters):
    problem = misfit(weights[path], a, b, stacked_axis(path, scan_axis))
    if problem is not None:
      raise ConfigError(f"lora.lora_module_path={chosen}: {'/'.join(map(str, path))}: {problem}")


def _shapes(model: nnx.Module, kind: type[nnx.Param]) -> dict[tuple[Any, ...], tuple[int, ...]]:
  return {tuple(path): leaf.get_value().shape for path, leaf in nnx.to_flat_state(nnx.state(model, kind))}


def without_adapter(config: MaxTextConfig, model: nnx.Module) -> nnx.Module:
  """The same model computing as if it had no adapter: the base of a DPO reference, with no second copy of its weights.

  Usable in a traced loss. For QLoRA it is the quantised base.

  Args:
    config: of the run.
    model: adapted; it stays as it is.
  """
  plain = nnx.merge(*nnx.split(model))
  if config.lora.lora_weight_qtype is None:
    plain.__class__ = type(model)._unquantized_type  # type: ignore[attr-defined]
    return plain
  provider = qwix.PtqProvider([qwix.QuantizationRule(**_rule(config))])
  return qwix.quantize_model(plain, provider, skip_nnx_init=True, **_call_arguments(config_mesh(model)))


def merged_state(config: MaxTextConfig, base: nnx.State, model: nnx.Module) -> nnx.State:
  """The weights of the live model with its adapter folded in, as the base model's state; traceable.

  For engines that know no adapters: a rollout's, updated after each step. Under QLoRA, W is the quantised one.

  Args:
    config: of the run.
    base: state of the base model's `nnx.Param`s, abstract or not; for its structure.
    model: adapted.
  """
  weights = {tuple(path): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
  for path, module in nnx.iter_modules(model):
    kernel = getattr(module, KERNEL, None)
    if kernel is not None and not isinstance(kernel, nnx.Variable):
      array = jax.tree.map(
        lambda leaf: leaf.get_value(), kernel.array, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
      )
      weights[(*path, KERNEL)] = qwix.dequantize(array)
  scale = config.lora.lora_alpha / config.lora.lora_rank
  for path, a, b in adapted_kernels(dict(weights)):
    weights[path] = merged_kernel(weights[path], a, b, scale=scale, axis=stacked_axis(path, config.param_scan_axis))
  flat = [
    (path, leaf.replace(weights[tuple(path)].astype(leaf.get_value().dtype))) for path, leaf in nnx.to_flat_state(base)
  ]
  return nnx.from_flat_state(flat)


def config_mesh(model: nnx.Module) -> Mesh:
  """The mesh a MaxText model was built for."""
  return model.mesh  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class LoraStates:
  """What a run with an adapter is built of, abstractly.

  Attributes:
    base: what pre-training would build: full weights, and an optimizer of them.
    run: the adapted model, and an optimizer of the adapter alone.
  """

  base: PretrainingState
  run: PretrainingState


def lora_states(config: MaxTextConfig, mesh: Mesh) -> LoraStates:
  """Builds both, without arrays.

  Raises:
    ConfigError: the model can't be adapted as configured; see `adapted`.
  """
  plain = without_lora(config)
  base = maxtext_api.pretraining_state(plain, mesh)

  def create_model() -> nnx.Module:
    return adapted(config, mesh, base.create_model())

  return LoraStates(
    base, maxtext_api.pretraining_state(config, mesh, create_model=create_model, trainable=nnx.LoRAParam)
  )


def adapt(config: MaxTextConfig, mesh: Mesh, states: LoraStates, base: nnx.Module) -> nnx.Module:
  """The adapted model over a base that has its weights; `base` gives its arrays up.

  Args:
    config: of the run.
    mesh: the devices.
    states: from `lora_states`.
    base: the live base model.
  """
  base_graphdef, weights = nnx.split(base)
  graphdef, target = nnx.split(states.run.abstract_model)
  shardings = jax.tree.map(lambda leaf: leaf.sharding, target)

  def make(weights: nnx.State) -> nnx.State:
    return nnx.state(adapted(config, mesh, nnx.merge(base_graphdef, weights)))

  # Not under `jax.set_mesh`, as in `maxtext_api.pretraining_state`: what Qwix makes has its axis names set only then.
  with logical_axis_rules(config.logical_axis_rules):
    return nnx.merge(graphdef, jax.jit(make, donate_argnums=0, out_shardings=shardings)(weights))


def quantised(kernel: Any, inputs: int, qtype: str, tile_size: int | None) -> jax.Array:
  """One layer's kernel after Qwix's quantisation and back, in its own dtype, as QLoRA computes with it.

  Args:
    kernel: [*inputs, *outputs].
    inputs: how many of its axes are inputs.
    qtype: Qwix's name, as `int8` or `nf4`.
    tile_size: length of the blocks that share a scale along the last input axis; None is the whole axis.
  """
  kernel = jnp.asarray(kernel)
  tiled = {inputs - 1: tile_size} if tile_size else {}
  channelwise = [axis for axis in range(inputs, kernel.ndim) if axis not in tiled]
  array = qwix.quantize(kernel, qtype, channelwise_axes=channelwise, tiled_axes=tiled)
  return qwix.dequantize(array).astype(kernel.dtype)
