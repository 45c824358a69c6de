"""A run in words: what it will do, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
from etils import epath
from flax import nnx

from maxtext_posttrain.checkpointing.locations import steps_in
from maxtext_posttrain.checkpointing.manager import checkpointing_enabled
from maxtext_posttrain.report import Reporter
from maxtext_posttrain.report.figures import readable_bytes

if TYPE_CHECKING:
  from maxtext_posttrain.trainers.base import Session


def parameter_count(session: Session) -> int:
  """The model's parameters, an adapter's left out."""
  built = session.pretraining if session.lora is None else session.lora.base
  return _count(built.state["model"], nnx.Param)


def trained_count(session: Session) -> int:
  """The parameters that updates change: all of them, or an adapter's."""
  return _count(session.pretraining.state["model"], session.pretraining.trainable)


def _count(model: nnx.State, kind: type[nnx.Param]) -> int:
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.filter_state(model, kind)))


def describe_adapter(session: Session) -> str:
  """The adapter a run trains, in words."""
  lora = session.maxtext.lora
  modules = nnx.filter_state(session.pretraining.state["model"], nnx.LoRAParam)
  base = f"quantised to {lora.lora_weight_qtype}" if lora.lora_weight_qtype else "frozen"
  if lora.lora_weight_qtype and lora.lora_tile_size:
    base += f" in blocks of {lora.lora_tile_size}"
  return (
    f"LoRA of rank {lora.lora_rank}, alpha {lora.lora_alpha:g} on {len(jax.tree.leaves(modules)) // 2} kernels; the"
    f" base is {base}"
  )


def sequences_of_an_update(session: Session) -> int:
  """Sequences that go through the model in one update; two for each row where rows are of pairs."""
  return math.prod(session.batch_specs["train"]["inputs"].shape[:-1])


def describe(session: Session) -> Iterator[str]:
  """The plan of a run that has been built and not started, line by line."""
  mt, data = session.maxtext, session.datasets.train
  parameters = parameter_count(session)
  sequences = sequences_of_an_update(session)
  yield f"run         {session.objective.name} {mt.run_name}: {mt.steps} steps on {session.mesh.size} device(s)"
  yield f"model       {mt.model_name}: {parameters:,} parameters, {mt.num_decoder_layers} layers"
  if session.lora is not None:
    trained = trained_count(session)
    yield f"trained     {trained:,} parameters, {trained / parameters:.3%} of the model's: {describe_adapter(session)}"
  tokens = sequences * mt.max_target_length
  yield (
    f"batch       {sequences} sequences of {mt.max_target_length} tokens = {tokens:,} tokens a step, in"
    f" {mt.gradient_accumulation_steps} micro-batch(es)"
  )
  total = "repeating" if data.total_batches is None else f"{data.total_batches} in all"
  yield f"data        {data.rows} sequences an epoch, {data.batches_per_epoch} batches an epoch, {total}"
  for number, line in enumerate(session.fit.lines()):
    yield f"{'' if number else 'memory':<11} {line}"
  if session.compiled is not None:
    temporaries = readable_bytes(session.compiled.memory.temp_size_in_bytes)
    yield f"compiled    in {session.compiled.seconds:.1f} s: {temporaries} of temporaries a device, by XLA's own count"
  if checkpointing_enabled(session.config) and mt.enable_checkpointing:
    kept = mt.max_num_checkpoints_to_keep or "all"
    yield f"checkpoints {session.checkpoint_directory}<step>/items every {mt.checkpoint_period} steps, {kept} kept"
  else:
    yield "checkpoints none are read or written"
  yield f"restored    {_restored(session)}"


def _restored(session: Session) -> str:
  mt = session.maxtext
  steps = steps_in(epath.Path(session.checkpoint_directory)) if checkpointing_enabled(session.config) else ()
  if steps:
    over = f", over the base {mt.load_parameters_path or 'drawn from the seed'}" if session.lora is not None else ""
    return f"everything, from {session.checkpoint_directory}{steps[-1]}{over}"
  if session.lora is not None:
    base = f"the base, from {mt.load_parameters_path}" if mt.load_parameters_path else "nothing: a fresh base"
    adapter = mt.lora.lora_restore_path
    return base + (f"; the adapter, from {adapter}" if adapter else ", and a fresh adapter over it")
  if mt.load_parameters_path:
    return f"weights, from {mt.load_parameters_path}"
  if mt.load_full_state_path:
    return f"everything, from {mt.load_full_state_path}"
  return f"nothing: {session.objective.describe_start(session.config)}"


def print_end(session: Session, reporter: Reporter, *, done: int, exhausted: bool, stopped: bool) -> None:
  """Prints where the run ended and how pre-training goes on from it."""
  mt = session.maxtext
  why = "stopped by a signal" if stopped else "its epochs are done" if exhausted else "all steps done"
  last = reporter.last.get("train", {})
  loss = f", loss {last['loss']:.4g}" if last else ""
  print(f"{session.objective.name} ended at step {done} of {mt.steps} ({why}){loss}", flush=True)
  if not (checkpointing_enabled(session.config) and mt.enable_checkpointing):
    return
  # A run that a signal stops before its first update writes none, nor does one without save_checkpoint_on_completion.
  if done not in steps_in(epath.Path(session.checkpoint_directory)):
    print(f"no checkpoint of step {done} was written", flush=True)
    return
  print(f"checkpoint: {session.checkpoint_directory}{done}/items", flush=True)
  if session.lora is not None:
    print(
      f"it holds the adapter; posttrain merge {session.run_directory} OUT makes full weights, from which pre-training"
      " starts with load_parameters_path",
      flush=True,
    )
    return
  by_name = f"with run_name={mt.run_name} (steps at least {done + 2}), or "
  print(
    f"pre-training goes on from it {'' if session.objective.checkpoint_role else by_name}in a run of its own"
    f" with load_full_state_path={session.checkpoint_directory}{done}/items",
    flush=True,
  )
