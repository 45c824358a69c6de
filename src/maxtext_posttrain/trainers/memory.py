"""Whether a run fits its devices: what it takes of each, as planned, against what there is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from maxtext_posttrain import maxtext_lora, memory
from maxtext_posttrain.errors import ConfigError
from maxtext_posttrain.maxtext_api import MaxTextConfig
from maxtext_posttrain.memory import GIB, Decoder, MemoryEstimate, Share
from maxtext_posttrain.trainers.outputs import logit_positions

if TYPE_CHECKING:
  from maxtext_posttrain.trainers.base import Session

_TENSOR_AXES = ("tensor", "tensor_transpose", "tensor_sequence")


def decoder(config: MaxTextConfig) -> Decoder:
  """The sizes of MaxText's configuration."""
  experts = config.num_experts_per_tok if config.num_experts > 1 else 1
  return Decoder(
    layers=config.num_decoder_layers,
    emb=config.emb_dim,
    heads=config.num_query_heads,
    kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    mlp=config.mlp_dim * experts,
    vocab=config.vocab_size,
    itemsize=jnp.dtype(config.dtype).itemsize,
    remat_policy=config.remat_policy or "none",
    kept=frozenset(config.tensors_on_device or ()),
    scores=config.attention == "dot_product",
  )


def estimate(session: Session) -> MemoryEstimate:
  """The estimate for a run whose state is built abstractly."""
  mt, mesh, state = session.maxtext, session.mesh, session.pretraining.state
  model, tensor = decoder(mt), _tensor(mesh)
  share = _share(session, tensor)
  trained = nnx.filter_state(state["model"], session.pretraining.trainable)
  params = nnx.filter_state(state["model"], nnx.Param)
  frozen = {name: memory.device_bytes(each) for name, each in session.frozen.abstract.items()}
  held = {
    "weights": memory.device_bytes(state["model"]),
    "optimizer": memory.device_bytes(state["optimizer"]),
    **frozen,
  }
  gradients = memory.device_bytes(trained) * (2 if mt.gradient_accumulation_steps > 1 else 1)
  working = max(memory.layer_bytes(model, share), memory.logit_bytes(model, share))
  for each in session.frozen.maxtext.values():
    other = decoder(each)
    working += memory.logit_bytes(other, share, gradient=False)
    working = max(working, memory.forward_bytes(other, share))
  update = {
    "gradients": gradients,
    "saved activations": memory.saved_bytes(model, share),
    "activations at work": working,
    "gathered weights": memory.gathered_bytes(params, model, tensor=tensor),
  }
  return MemoryEstimate(held, update, _rollout(session, model, share, tensor))


def _tensor(mesh: Mesh) -> int:
  return math.prod(mesh.shape.get(axis, 1) for axis in _TENSOR_AXES)


def _share(session: Session, tensor: int) -> Share:
  """One device's part of a micro-batch."""
  spec = session.batch_specs["train"]["inputs"]
  *local, length = spec.sharding.shard_shape(spec.shape)
  rows, local_rows = math.prod(spec.shape[1:-1]), math.prod(local[1:])
  tokens = local_rows * length
  held = logit_positions(session.maxtext, session.pretraining.abstract_model, (rows, spec.shape[-1]))
  return Share(tokens, spec.shape[-1], min(tokens, -(-held * tokens // (rows * spec.shape[-1]))), tensor)


def _rollout(session: Session, model: Decoder, share: Share, tensor: int) -> dict[str, int]:
  """Completions by the native engine, which takes stacked layers apart; what vLLM takes is its own to say."""
  config, mt = session.config, session.maxtext
  completions = session.objective.completions_at_once(config, mt)
  if not completions:
    return {}
  spec = session.batch_specs["train"]["inputs"]
  shards = max(1, math.prod(spec.shape[1:]) // share.tokens)
  prompt = _power_of_two(mt.max_prefill_predict_length)
  room = _power_of_two(mt.max_target_length - mt.max_prefill_predict_length)
  sequences = -(-_power_of_two(max(completions, session.mesh.size)) // shards)
  writing = Share(sequences, prompt + room, sequences, tensor)
  weights = nnx.filter_state(
    (session.pretraining if session.lora is None else session.lora.base).state["model"], nnx.Param
  )
  held = memory.device_bytes(weights)
  folded = maxtext_lora.lora_enabled(mt)
  copies = held if mt.scan_layers or folded else 0
  if jnp.dtype(mt.weight_dtype) != jnp.dtype(mt.dtype):
    copies += held * jnp.dtype(mt.dtype).itemsize // jnp.dtype(mt.weight_dtype).itemsize
  prefill = Share(sequences * prompt, prompt, sequences, tensor)
  return {
    "weights for generating": copies,
    "keys and values": memory.cache_bytes(model, writing),
    "prompts at work": memory.forward_bytes(model, prefill),
    "logits": memory.logit_bytes(model, writing),
  }


def _power_of_two(number: int) -> int:
  return 1 << (max(number, 1) - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class Fit:
  """An estimate against what a device has.

  Attributes:
    estimate: the run's.
    limit: bytes of a device, None where unknown.
  """

  estimate: MemoryEstimate
  limit: int | None

  @property
  def fits(self) -> bool:
    """Whether there is enough, as far as that is known."""
    return self.limit is None or self.estimate.total <= self.limit

  def lines(self) -> Iterator[str]:
    """The estimate for reading."""
    each = self.estimate
    yield f"{_gib(each.total)} a device, estimated" + (f", of {_gib(self.limit)}" if self.limit is not None else "")
    yield f"all along: {_parts(each.held)}"
    yield f"in an update: {_parts(each.update)}"
    if each.rollout:
      yield f"in a rollout: {_parts(each.rollout)}"

  def refusal(self, maxtext: MaxTextConfig) -> str:
    """What is wrong, and what to change."""
    assert self.limit is not None
    return (
      f"memory: the run needs about {_gib(self.estimate.total)} on each device, which has {_gib(self.limit)}:"
      f" {_parts(self.estimate.worst)}; {', or '.join(_advice(self, maxtext))}; memory_check=warn runs it all the same"
    )


def check_fit(config: Any, maxtext: MaxTextConfig, fit: Fit) -> None:
  """Stops a run that can't fit, unless `memory_check` says otherwise.

  Raises:
    ConfigError: it does not fit; one line on what needs how much, and what to change.
  """
  if fit.fits or config.memory_check == "off":
    return
  if config.memory_check == "error":
    raise ConfigError(fit.refusal(maxtext))
  print(f"warning: {fit.refusal(maxtext)}", flush=True)


def limit_of(config: Any, mesh: Mesh) -> int | None:
  """Bytes that the run may use of each device: as configured, or as the device says."""
  if config.device_memory_gib is not None:
    return int(config.device_memory_gib * GIB)
  return memory.device_memory(mesh.devices.flat[0])


def _advice(fit: Fit, maxtext: MaxTextConfig) -> Iterator[str]:
  """What makes the largest parts smaller, the cheapest first."""
  assert fit.limit is not None
  held, worst = fit.estimate.held, fit.estimate.worst
  frozen = [name for name in held if name not in ("weights", "optimizer")]
  fixed = sum(held.values()) + fit.estimate.update["gradients"]
  if fixed < fit.limit:
    if "activations at work" in worst and maxtext.num_vocab_tiling == 1 and not maxtext.quantization:
      yield "set num_vocab_tiling=8"
    if maxtext.remat_policy not in (None, "none", "full"):
      yield "set remat_policy=full"
    yield "lower per_device_batch_size (gradient_accumulation_steps makes up for it) or max_target_length"
  if frozen == ["reference"]:
    yield "train without a reference model (rl.grpo_beta=0, dpo.reference=precomputed)"
  if not maxtext.lora.enable_lora:
    yield "set lora.enable_lora=true"
  if fixed >= fit.limit:
    yield "take more devices (ici_fsdp_parallelism)"


def _parts(parts: Mapping[str, int]) -> str:
  return ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())


def _gib(size: int) -> str:
  return f"{size / GIB:.1f} GiB" if size >= GIB // 10 else f"{size / (1 << 20):.1f} MiB"
