"""What a trainer states: its data, its loss, its extra models. Everything else is the base's."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxtext_posttrain.config import Config
from maxtext_posttrain.data import BATCH_KEYS, BatchIterator, PreparedData
from maxtext_posttrain.maxtext_api import MaxTextConfig

if TYPE_CHECKING:
  from maxtext_posttrain.trainers.base import Session

Batch = Mapping[str, jax.Array]
BatchSpec = Mapping[str, jax.ShapeDtypeStruct]


class TrainBatches(Protocol):
  """Micro-batches in order, with a position that can be saved and restored.

  Attributes:
    total_batches: micro-batches from the first to the last, or None without end.
  """

  total_batches: int | None

  def __iter__(self) -> Iterator[dict[str, np.ndarray]]: ...

  def __next__(self) -> dict[str, np.ndarray]: ...

  def metrics(self) -> dict[str, float]:
    """What there is to say of the micro-batch that came last, for its update's metrics."""
    ...

  def get_state(self) -> dict[str, Any]:
    """The position after the micro-batches already yielded, as JSON."""
    ...

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes to a saved position."""
    ...

  def close(self) -> None:
    """Ends whatever works for it."""
    ...


@dataclasses.dataclass(frozen=True)
class FrozenModel:
  """A model that a loss reads and no update changes: a reference, a teacher.

  Attributes:
    maxtext: its configuration; the run's own, or another.
    items: its weights, as `load_parameters_path` names them. None is what the run itself starts from.
  """

  maxtext: MaxTextConfig
  items: str | None = None


@dataclasses.dataclass(frozen=True)
class LossContext:
  """What a loss may look at beside the live model and the batch.

  Attributes:
    config: our configuration of the run.
    maxtext: MaxText's, of the live model.
    step: updates made before this one, int32 scalar; what a schedule goes by.
    is_train: False in evaluation.
    frozen: the models of `Objective.frozen_models`, by its names.
    frozen_maxtext: their configurations.
  """

  config: Config
  maxtext: MaxTextConfig
  step: jax.Array
  is_train: bool
  frozen: Mapping[str, nnx.Module] = dataclasses.field(default_factory=dict)
  frozen_maxtext: Mapping[str, MaxTextConfig] = dataclasses.field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossOutput:
  """A micro-batch's loss and metrics, all float32 scalars.

  Attributes:
    loss_sum: summed over what the objective's `weight` counts.
    totals: metrics that add up over micro-batches.
    means: metrics summed like the loss; they are shown divided by the weight.
  """

  loss_sum: jax.Array
  totals: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
  means: dict[str, jax.Array] = dataclasses.field(default_factory=dict)


class Objective(abc.ABC):
  """One way to post-train a model.

  Attributes:
    name: of its command.
    weight_name: what `weight` counts, as the metrics call it.
    evaluates_itself: `evaluation` says how good the model is, and no loss over evaluation data.
    checkpoint_role: the folder between `checkpoints` and the steps, with its slash, as reinforcement learning has one.
  """

  name: str
  weight_name: str = "trained_tokens"
  evaluates_itself: bool = False
  checkpoint_role: str = ""

  @abc.abstractmethod
  def prepare_data(self, config: Config) -> PreparedData:
    """Reads and tokenises the run's data; may run before MaxText is imported, in another process."""

  @abc.abstractmethod
  def loss(self, model: nnx.Module, batch: Batch, context: LossContext) -> LossOutput:
    """The loss of one micro-batch; traced, once for training and once for evaluation."""

  @abc.abstractmethod
  def weight(self, batch: Batch) -> jax.Array:
    """What the sum of a micro-batch's loss is divided by, a scalar."""

  def batch_spec(self, config: Config, maxtext: MaxTextConfig, batch: int) -> BatchSpec:
    """Shapes and dtypes of one micro-batch of `batch` rows; the first axis is the one devices share."""
    del config
    return {key: jax.ShapeDtypeStruct((batch, maxtext.max_target_length), jnp.int32) for key in BATCH_KEYS}

  def frozen_models(self, config: Config, maxtext: MaxTextConfig) -> Mapping[str, FrozenModel]:
    """The models its loss reads beside the live one, by name."""
    del config, maxtext
    return {}

  def init_weights(
    self, model: nnx.Module, frozen: Mapping[str, nnx.Module], config: Config, maxtext: MaxTextConfig
  ) -> None:
    """Changes fresh weights before the first step; not called where weights were restored or loaded.

    Args:
      model: the live model.
      frozen: the models of `frozen_models`, with their weights.
      config: our configuration of the run.
      maxtext: MaxText's.
    """
    del model, frozen, config, maxtext

  def describe_start(self, config: Any) -> str:
    """The weights that a run has after `start`, in words."""
    del config
    return "fresh weights"

  def evaluation_metrics(self, loss: float) -> dict[str, float]:
    """What an evaluation shows beside its mean loss and the means."""
    del loss
    return {}

  def before_training(self, session: Session, completed: int) -> None:
    """Called once, with the weights restored and before the first batch is asked for; by default does nothing.

    Args:
      session: the run.
      completed: updates behind it.
    """
    del session, completed

  def passes(self, config: Config) -> float:
    """Model FLOPs of one update, as a multiple of a forward and backward pass over one sequence for each row."""
    del config
    return 1.0

  def completions_at_once(self, config: Config, maxtext: MaxTextConfig) -> int:
    """Completions that the trainer's own engine writes at once, for the estimate of memory; 0 where it writes none."""
    del config, maxtext
    return 0

  def batches(self, session: Session, rows: BatchIterator) -> TrainBatches:
    """What the updates train on, made of the data's own batches; where weights are needed, those of `session.trainer`.

    It is asked for once, before a saved position is restored.
    """
    del session
    return rows

  def evaluation(self, session: Session) -> Callable[[], dict[str, float]] | None:
    """With `evaluates_itself`, what makes an evaluation's metrics; None without evaluation data."""
    del session
    return None
