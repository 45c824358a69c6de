"""The train state whose tree is written and read: what pre-training would build, or else what the live state says."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from flax import nnx

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.checkpointing import layout, optimizer_layout
from maxtext_posttrain.checkpointing.paths import ADAPTER_CHILD


class Target(Protocol):
  """What pre-training would build: see `maxtext_api.PretrainingState`."""

  @property
  def state(self) -> nnx.State:
    """Abstract state of the bare `TrainStateNNX`."""
    ...

  @property
  def opt_state(self) -> Any:
    """The optimizer's part with optax's own types."""
    ...


@dataclasses.dataclass(frozen=True)
class PlainTarget:
  """A target that is nothing else: a part of pre-training's, or one taken from the live state."""

  state: nnx.State
  opt_state: Any


def without_base(state: nnx.State) -> nnx.State:
  """A train state without the frozen parameters of its model."""
  kept = nnx.filter_state(state["model"], nnx.Any(nnx.LoRAParam, nnx.Not(nnx.Param)))
  return nnx.State({**state, "model": kept})


def live_target(model: nnx.Module, live: nnx.State, live_opt_state: Any) -> Target:
  """The layout taken from the live state: the adapter told by its class, the optimizer's wrappers by their types."""
  depth = 0
  while maxtext_api.is_tunix_adapter(model):
    model, depth = getattr(model, ADAPTER_CHILD), depth + 1
  bare = layout.strip_adapter(live, depth)
  if live_opt_state is None:
    return PlainTarget(bare, None)
  opt_state = optimizer_layout.strip_wrappers(live_opt_state)
  if depth:
    opt_state = optimizer_layout.strip_adapter_from_optimizer(opt_state, depth)
  step = live["optimizer"]["step"]
  optimizer = nnx.State({"step": step, "opt_state": optimizer_layout.as_nested_state(opt_state)})
  return PlainTarget(nnx.State({"model": bare["model"], "optimizer": optimizer}), opt_state)
