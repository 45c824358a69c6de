"""Models that a run's loss reads and no update changes: built abstractly, loaded once, merged where they are traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.checkpointing.manager import MaxTextLayoutCheckpointManager
from maxtext_posttrain.maxtext_api import MaxTextConfig, PretrainingState
from maxtext_posttrain.trainers.objective import FrozenModel

_STATE = nnx.Not(nnx.Intermediate)


class FrozenModels:
  """The frozen models of one run.

  Attributes:
    maxtext: the configuration of each, by name.
    abstract: the state of each, with `jax.ShapeDtypeStruct` leaves that carry their shardings.
  """

  def __init__(
    self, models: Mapping[str, FrozenModel], *, live: MaxTextConfig, pretraining: PretrainingState, mesh: Mesh
  ):
    """Builds them abstractly.

    Args:
      models: from `Objective.frozen_models`.
      live: configuration of the live model; models of the same share what is built for it.
      pretraining: what is built for it.
      mesh: the devices.
    """
    self._models = models
    self._mesh = mesh
    self._pretraining = {
      name: pretraining if model.maxtext is live else maxtext_api.pretraining_state(model.maxtext, mesh)
      for name, model in models.items()
    }
    self.maxtext = {name: model.maxtext for name, model in models.items()}
    self.abstract = {name: each.state["model"] for name, each in self._pretraining.items()}
    self._graphdefs = {name: nnx.graphdef(each.abstract_model) for name, each in self._pretraining.items()}

  def merge(self, states: Mapping[str, nnx.State]) -> dict[str, nnx.Module]:
    """The modules of `states`, for use inside one trace."""
    return {name: nnx.merge(self._graphdefs[name], state, copy=True) for name, state in states.items()}

  def load(self, config: Any, start: Callable[[], str | None]) -> dict[str, nnx.State]:
    """Loads the weights of each.

    Args:
      config: our configuration of the run, for the storage options.
      start: names the weights the run itself started from; None where they were fresh, made from the seed.

    Raises:
      CheckpointError: weights can't be read, or don't fit their model.
    """
    states = {}
    for name, frozen in self._models.items():
      pretraining = self._pretraining[name]
      model = maxtext_api.init_model(frozen.maxtext, pretraining, self._mesh)
      items = frozen.items if frozen.items is not None else start()
      if items is not None:
        loader = MaxTextLayoutCheckpointManager(None, None, config, target=pretraining)
        loader.load_parameters(items, model, release=True)
      states[name] = nnx.state(model, _STATE)
    return states
