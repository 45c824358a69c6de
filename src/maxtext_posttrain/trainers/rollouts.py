"""From prompts to what GRPO trains on: completions, their rewards and advantages, as batches with a position.

A rollout is P prompts with G completions each. Its sequences make K updates, and these are made μ times over
(`rl.num_iterations`). A position inside a rollout is saved with what is left of it to train on, so that a run that is
killed there goes on with the same bits.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from maxtext_posttrain.data import Batch, BatchIterator
from maxtext_posttrain.data.batches import empty_batch
from maxtext_posttrain.data.prompts import RolloutShape
from maxtext_posttrain.errors import DataError
from maxtext_posttrain.losses.grpo import Aggregation, loss_weights

_STATE_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """One completion, ready to train on.

  Attributes:
    tokens: of prompt and completion, int32 [n].
    prompt: how many of them are the prompt's.
    old: log-probabilities of the completion's tokens by the policy that wrote them, float32 [n − prompt].
    engine: the same as the engine says, float32 [n − prompt].
    advantage: over its group.
    trained: whether it counts in the loss.
  """

  tokens: npt.NDArray[np.int32]
  prompt: int
  old: npt.NDArray[np.float32]
  engine: npt.NDArray[np.float32]
  advantage: float
  trained: bool


@dataclasses.dataclass(frozen=True)
class Rollout:
  """The completions of a batch of prompts; None stands for a row that only fills the batch.

  Attributes:
    trajectories: P · G of them, those of a prompt one after the other.
    metrics: of the rollout as a whole.
    timings: metrics that belong to the first update alone.
  """

  trajectories: Sequence[Trajectory | None]
  metrics: Mapping[str, float]
  timings: Mapping[str, float]


class Collector(Protocol):
  """Makes rollouts with the weights as they are when it is called."""

  def collect(self, rows: npt.NDArray[np.int32], number: int) -> Rollout:
    """Completes the prompts `rows` [P]; `number` counts rollouts from the run's first."""
    ...


def rollout_batch(trajectories: Sequence[Trajectory | None], length: int, aggregation: Aggregation) -> Batch:
  """Trajectories as arrays: MaxText's keys [rows, length] int32, and what the loss reads beside them.

  Position t reads token t and predicts token t + 1; `targets_segmentation` is 1 where that is a trained token of the
  completion. `old_log_probs` and `engine_log_probs` [rows, length] float32 stand at the same positions,
  `advantages` and `weights`, what each sequence adds to the loss's divisor, are [rows] float32.
  """
  rows = len(trajectories)
  batch = empty_batch(rows, length, pad_id=0)
  batch["old_log_probs"] = np.zeros((rows, length), np.float32)
  batch["engine_log_probs"] = np.zeros((rows, length), np.float32)
  batch["advantages"] = np.zeros(rows, np.float32)
  for row, each in enumerate(trajectories):
    if each is None:
      continue
    count = len(each.tokens) - 1
    batch["inputs"][row, :count] = each.tokens[:-1]
    batch["targets"][row, :count] = each.tokens[1:]
    batch["inputs_position"][row, :count] = batch["targets_position"][row, :count] = np.arange(count)
    batch["inputs_segmentation"][row, :count] = 1
    said = slice(each.prompt - 1, count)
    batch["targets_segmentation"][row, said] = int(each.trained)
    batch["old_log_probs"][row, said] = each.old
    batch["engine_log_probs"][row, said] = each.engine
    batch["advantages"][row] = each.advantage
  present = np.array([each is not None for each in trajectories], bool)
  batch["weights"] = loss_weights(batch["targets_segmentation"] != 0, present, aggregation)
  return batch


class RolloutBatches(Iterator[Batch]):
  """The micro-batches of one rollout after another, with a position that can be saved and restored.

  Attributes:
    total_batches: micro-batches from the first to the last, or None without end.
  """

  def __init__(
    self,
    prompts: BatchIterator,
    shape: RolloutShape,
    collector: Collector,
    *,
    aggregation: Aggregation,
    mine: Sequence[int] | None = None,
    on_close: Callable[[], None] = lambda: None,
  ):
    """Takes the parts.

    Args:
      prompts: batches of `shape.prompts` prompts: `row`, their numbers.
      shape: the sizes.
      collector: makes rollouts of them.
      aggregation: how the loss weighs sequences.
      mine: places in a micro-batch whose rows this process trains on; None is all of them.
      on_close: ends whatever works for the collector.
    """
    self.total_batches = None if prompts.total_batches is None else prompts.total_batches * shape.micro_batches
    self._prompts = prompts
    self._shape = shape
    self._collector = collector
    self._aggregation: Aggregation = aggregation
    self._mine = mine
    self._on_close = on_close
    self._rollout: Rollout | None = None
    self._number = 0
    self._served = 0

  def __next__(self) -> Batch:
    shape = self._shape
    if self._rollout is None or self._served == shape.micro_batches:
      rows = next(self._prompts)["row"]
      self._rollout = self._collector.collect(rows, self._number)
      self._number += 1
      self._served = 0
    start = self._served % (shape.updates * shape.accumulation) * shape.micro_batch
    self._served += 1
    trajectories = self._rollout.trajectories[start : start + shape.micro_batch]
    batch = rollout_batch(trajectories, shape.length, self._aggregation)
    return batch if self._mine is None else {key: values[list(self._mine)] for key, values in batch.items()}

  def metrics(self) -> dict[str, float]:
    """Of the rollout that the last micro-batch belongs to; its timings where that was of the rollout's first update."""
    if self._rollout is None:
      return {}
    first = self._served <= self._shape.accumulation
    return {**self._rollout.metrics, **(self._rollout.timings if first else {})}

  def get_state(self) -> dict[str, Any]:
    """The position after the micro-batches already yielded, as JSON: with the rollout, where some of it is left."""
    left = self._rollout is not None and self._served < self._shape.micro_batches
    return {
      "version": _STATE_VERSION,
      "prompts": self._prompts.get_state(),
      "rollouts": self._number,
      "served": self._served if left else 0,
      "shape": dataclasses.asdict(self._shape),
      "rollout": _to_json(self._rollout) if left and self._rollout is not None else None,
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes to a saved position.

    Raises:
      DataError: it belongs to other data or sizes, or is no position.
    """
    try:
      number, served, stored = int(state["rollouts"]), int(state["served"]), state["rollout"]
      if state["version"] != _STATE_VERSION or number < 0 or not 0 <= served <= self._shape.micro_batches:
        raise ValueError(f"version {state['version']}, {number} rollouts, {served} micro-batches")
      shape = dataclasses.asdict(self._shape)
      changed = [f"{key} was {state['shape'].get(key)}, is {value}" for key, value in shape.items()]
      changed = [text for text, key in zip(changed, shape, strict=True) if state["shape"].get(key) != shape[key]]
      if stored is not None and changed:
        raise DataError(
          f"the saved position lies inside a rollout of other sizes: {'; '.join(changed)}; restore them, or start a"
          " new run from the weights with load_parameters_path"
        )
      rollout = None if stored is None else _from_json(stored, self._shape)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
      raise DataError(f"the saved data position is none of a GRPO run: {error}") from error
    self._prompts.set_state(state["prompts"])
    self._rollout, self._number, self._served = rollout, number, served

  def close(self) -> None:
    """Ends reading prompts, and what works for the collector."""
    try:
      self._prompts.close()
    finally:
      self._on_close()


def _to_json(rollout: Rollout) -> dict[str, Any]:
  """A rollout as JSON: arrays end to end, in base64, float32 bit for bit."""
  present = [each for each in rollout.trajectories if each is not None]

  def packed(arrays: Sequence[Any], dtype: Any) -> str:
    flat = np.concatenate([np.asarray(array, dtype) for array in arrays]) if arrays else np.zeros(0, dtype)
    return base64.b64encode(flat.tobytes()).decode("ascii")

  return {
    "present": [each is not None for each in rollout.trajectories],
    "trained": [each.trained for each in present],
    "tokens": packed([each.tokens for each in present], np.int32),
    "old": packed([each.old for each in present], np.float32),
    "engine": packed([each.engine for each in present], np.float32),
    "advantages": packed([[each.advantage] for each in present], np.float32),
    "prompt": [each.prompt for each in present],
    "length": [len(each.tokens) for each in present],
    "metrics": dict(rollout.metrics),
  }


def _from_json(stored: Mapping[str, Any], shape: RolloutShape) -> Rollout:
  """A rollout from `_to_json`; sizes that do not fit are a ValueError."""
  present = [bool(each) for each in stored["present"]]
  lengths, prompts = np.asarray(stored["length"], np.int64), np.asarray(stored["prompt"], np.int64)
  count = sum(present)
  if len(present) != shape.prompts * shape.generations or not len(lengths) == len(prompts) == count:
    raise ValueError(f"{len(present)} sequences, {len(lengths)} of them with a length")
  if count and not ((prompts > 0) & (prompts < lengths) & (lengths <= shape.length + 1)).all():
    raise ValueError("a sequence's length is out of its range")

  def unpacked(name: str, dtype: Any, size: int) -> Any:
    array = np.frombuffer(base64.b64decode(stored[name], validate=True), dtype)
    if array.size != size:
      raise ValueError(f"{name} holds {array.size} numbers, not {size}")
    return array

  said = lengths - prompts
  tokens = np.split(unpacked("tokens", np.int32, int(lengths.sum())), np.cumsum(lengths)[:-1])
  old = np.split(unpacked("old", np.float32, int(said.sum())), np.cumsum(said)[:-1])
  engine = np.split(unpacked("engine", np.float32, int(said.sum())), np.cumsum(said)[:-1])
  advantages = unpacked("advantages", np.float32, count)
  each = iter(range(count))
  trajectories: list[Trajectory | None] = []
  for is_there in present:
    index = next(each) if is_there else -1
    trajectories.append(
      Trajectory(
        tokens=tokens[index],
        prompt=int(prompts[index]),
        old=old[index],
        engine=engine[index],
        advantage=float(advantages[index]),
        trained=bool(stored["trained"][index]),
      )
      if is_there
      else None
    )
  metrics = {str(key): float(value) for key, value in stored["metrics"].items()}
  return Rollout(trajectories, metrics, {})
