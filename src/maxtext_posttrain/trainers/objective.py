"""What a trainer states: its data, its loss, its extra models. Everything else is the base's."""

from __future__ import annotations

import abc
from typing import Any

import jax
from flax import nnx

from maxtext_posttrain.data import SftDataset
from maxtext_posttrain.maxtext_api import MaxTextConfig
from maxtext_posttrain.tokenizers import Tokenizer
from maxtext_posttrain.trainers.train_step import Batch


class Objective(abc.ABC):
  """One way to post-train a model."""

  name: str

  @abc.abstractmethod
  def datasets(self, config: Any, tokenizer: Tokenizer | None, **sharding: int) -> tuple[SftDataset, SftDataset | None]:
    """The training data, and the evaluation data where the configuration names any.

    Args:
      config: the run's configuration.
      tokenizer: None where the data needs none (synthetic).
      **sharding: `batch_size`, `eval_batch_size`, `process_index` and `process_count`.
    """

  @abc.abstractmethod
  def loss(
    self, config: MaxTextConfig, model: nnx.Module, batch: Batch, is_train: bool
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss summed over a micro-batch, and float32 scalars that add up over micro-batches."""

  @abc.abstractmethod
  def weight(self, batch: Batch) -> jax.Array:
    """What the sum of a micro-batch's loss is divided by, a scalar."""
