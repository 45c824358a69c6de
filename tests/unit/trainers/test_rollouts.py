"""Rollouts as batches: what stands where, in which order, and a position that survives."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from maxtext_posttrain.data.prompts import PreparedPrompts, PromptReport, PromptRows
from maxtext_posttrain.errors import DataError
from maxtext_posttrain.trainers.rollouts import Rollout, RolloutBatches, Trajectory, rollout_batch


def trajectory(seed: int, *, prompt: int = 2, said: int = 3, trained: bool = True) -> Trajectory:
  rng = np.random.default_rng(seed)
  return Trajectory(
    tokens=rng.integers(1, 99, prompt + said).astype(np.int32),
    prompt=prompt,
    old=rng.normal(size=said).astype(np.float32),
    engine=rng.normal(size=said).astype(np.float32),
    advantage=float(np.float32(rng.normal())),
    trained=trained,
  )


class FakeCollector:
  """Two completions a prompt, made of the rollout's number and the prompt's."""

  def __init__(self) -> None:
    self.calls: list[tuple[list[int], int]] = []

  def collect(self, rows: Any, number: int) -> Rollout:
    self.calls.append((rows.tolist(), number))
    made = [None if row < 0 else trajectory(1000 * number + 2 * int(row) + j) for row in rows for j in range(2)]
    return Rollout(made, {"reward": float(number)}, {"rollout_seconds": 1.0})


def batches(*, prompts: int | None = 4, iterations: int = 2, num_epoch: int | None = None) -> tuple[Any, FakeCollector]:
  """Ten prompts; by default rollouts of 4 · 2 sequences, 2 updates of 2 micro-batches of 2, twice."""
  prepared = PreparedPrompts(
    source=PromptRows([[1]] * 10, ["q"] * 10, ["a"] * 10),
    report=PromptReport("rows"),
    num_epoch=num_epoch,
    shuffle_seed=3,
    identity={},
    prompts=prompts,
    generations=2,
    iterations=iterations,
    accumulation=2,
    length=8,
  )
  dataset = prepared.dataset(batch_size=2)
  collector = FakeCollector()
  return RolloutBatches(dataset.iterator(), dataset.shape, collector, aggregation="token-mean"), collector


def test_what_stands_where():
  each = Trajectory(
    tokens=np.array([5, 6, 7, 8, 9], np.int32),
    prompt=2,
    old=np.array([-1, -2, -3], np.float32),
    engine=np.array([-4, -5, -6], np.float32),
    advantage=0.5,
    trained=True,
  )
  batch = rollout_batch([each, None], 6, "token-mean")
  assert batch["inputs"].tolist() == [[5, 6, 7, 8, 0, 0], [0] * 6]
  assert batch["targets"].tolist()[0] == [6, 7, 8, 9, 0, 0]
  assert batch["inputs_segmentation"].tolist() == [[1, 1, 1, 1, 0, 0], [0] * 6]
  assert batch["inputs_position"].tolist()[0] == [0, 1, 2, 3, 0, 0]
  # The position of the prompt's last token predicts the first token that the model wrote; the last predicts its end.
  assert batch["targets_segmentation"].tolist() == [[0, 1, 1, 1, 0, 0], [0] * 6]
  assert batch["old_log_probs"].tolist()[0] == [0, -1, -2, -3, 0, 0]
  assert batch["engine_log_probs"].tolist()[0] == [0, -4, -5, -6, 0, 0]
  assert batch["advantages"].tolist() == [0.5, 0]
  assert batch["weights"].tolist() == [3, 0]


def test_a_completion_that_fills_the_sequence_and_one_of_one_token():
  long, short = trajectory(0, prompt=1, said=8), trajectory(1, prompt=8, said=1)
  batch = rollout_batch([long, short], 8, "sequence-mean-token-mean")
  assert batch["targets_segmentation"].sum(axis=1).tolist() == [8, 1]
  assert batch["targets"][1, 7] == short.tokens[-1]
  assert batch["weights"].tolist() == [1, 1]


def test_a_masked_completion_is_read_and_not_trained():
  batch = rollout_batch([trajectory(0, trained=False)], 8, "sequence-mean-token-scale")
  assert batch["inputs_segmentation"].sum() == 4
  assert not batch["targets_segmentation"].any()
  assert batch["weights"].tolist() == [1]
  assert rollout_batch([trajectory(0, trained=False)], 8, "sequence-mean")["weights"].tolist() == [0]


def test_each_rollout_is_trained_on_in_order_and_as_often_as_asked():
  source, collector = batches()
  first = [next(source) for _ in range(8)]
  assert [number for _, number in collector.calls] == [0]
  for one, other in zip(first[:4], first[4:], strict=True):
    for key in one:
      np.testing.assert_array_equal(one[key], other[key])
  next(source)
  assert [number for _, number in collector.calls] == [0, 1]
  assert not set(collector.calls[0][0]) & set(collector.calls[1][0])


def test_timings_come_with_the_first_update_alone():
  source, _ = batches()
  said = []
  for _ in range(4):
    next(source)
    next(source)
    said.append(source.metrics())
  assert said[0] == {"reward": 0.0, "rollout_seconds": 1.0}
  assert said[1:] == [{"reward": 0.0}] * 3


def test_the_epoch_ends_with_rows_that_are_not_there():
  source, collector = batches(num_epoch=1, iterations=1)
  # Ten prompts in batches of four are three rollouts of four micro-batches.
  assert source.total_batches == 12
  assert len(list(source)) == 12
  assert sorted(row for rows, _ in collector.calls for row in rows) == [-1, -1, *range(10)]


@pytest.mark.parametrize("taken", range(19))
def test_a_saved_position_goes_on_with_the_same_bits(taken: int):
  source, _ = batches()
  for _ in range(taken):
    next(source)
  state = json.loads(json.dumps(source.get_state()))
  expected = [next(source) for _ in range(10)]
  resumed, collector = batches()
  resumed.set_state(state)
  for want in expected:
    have = next(resumed)
    for key, values in want.items():
      np.testing.assert_array_equal(have[key], values, err_msg=key)
      assert have[key].dtype == values.dtype
  # A rollout that was under way is not made anew: the weights that wrote it are gone.
  assert collector.calls[0][1] == -(-taken // 8)


def broken(**changes: Any) -> dict[str, Any]:
  source, _ = batches()
  next(source)
  state = json.loads(json.dumps(source.get_state()))
  for path, value in changes.items():
    *parents, last = path.split("__")
    inner = state
    for parent in parents:
      inner = inner[parent]
    inner[last] = value
  return state


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"version": 9}, "version 9"),
    ({"rollouts": -1}, "-1 rollouts"),
    ({"served": 99}, "99 micro-batches"),
    ({"rollouts": None}, "none of a GRPO run"),
    ({"rollout": 5}, "none of a GRPO run"),
    ({"rollout__tokens": "!!"}, "none of a GRPO run"),
    ({"rollout__tokens": ""}, "tokens holds 0 numbers"),
    ({"rollout__length": [2] * 8}, "a sequence's length is out of its range"),
    ({"rollout__length": [10**9] * 8}, "a sequence's length is out of its range"),
    ({"rollout__present": [True]}, "none of a GRPO run"),
    ({"shape__generations": 3}, "generations was 3, is 2"),
    ({"shape": {}}, "inside a rollout of other sizes"),
    ({"prompts__identity": {}}, "belongs to other data"),
  ],
)
def test_positions_that_are_refused(changes: dict[str, Any], says: str):
  source, _ = batches()
  with pytest.raises(DataError, match=says) as refused:
    source.set_state(broken(**changes))
  assert "\n" not in str(refused.value)


def test_a_position_of_sft_is_refused():
  source, _ = batches()
  with pytest.raises(DataError, match="none of a GRPO run"):
    source.set_state({"version": 1, "position": 3, "identity": {}})


def test_sizes_may_change_between_rollouts():
  source, _ = batches()
  for _ in range(8):
    next(source)
  resumed, collector = batches(iterations=1)
  resumed.set_state(source.get_state())
  next(resumed)
  assert collector.calls[0][1] == 1
