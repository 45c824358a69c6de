"""What a trainer states: its data, its loss, its extra models. Everything else is the base's."""

from __future__ import annotations

import abc
from typing import Any

import jax
from flax import nnx

from maxtext_posttrain.data import PreparedData
from maxtext_posttrain.maxtext_api import MaxTextConfig
from maxtext_posttrain.trainers.train_step import Batch


class Objective(abc.ABC):
  """One way to post-train a model."""

  name: str

  @abc.abstractmethod
  def prepare_data(self, config: Any) -> PreparedData:
    """Reads and tokenises the run's data; may run before MaxText is imported, in another process."""

  @abc.abstractmethod
  def loss(
    self, config: MaxTextConfig, model: nnx.Module, batch: Batch, is_train: bool
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss summed over a micro-batch, and float32 scalars that add up over micro-batches."""

  @abc.abstractmethod
  def weight(self, batch: Batch) -> jax.Array:
    """What the sum of a micro-batch's loss is divided by, a scalar."""
