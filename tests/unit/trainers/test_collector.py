"""Rollouts from an engine's answers: what is asked, what follows from the rewards, and answers that are none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tunix.rl.rollout import base_rollout

from maxtext_posttrain.data.prompts import PromptRows, RolloutShape
from maxtext_posttrain.errors import TrainingError
from maxtext_posttrain.losses.grpo import group_advantages
from maxtext_posttrain.rewards.pool import Scores
from maxtext_posttrain.trainers.collector import CollectorSettings, RolloutCollector

STOP = 9
PROMPTS = PromptRows([[1, 2], [3], [4, 5, 6]], ["one", "two", "three"], ["a", "b", "c"])
SHAPE = RolloutShape(prompts=2, generations=2, updates=1, iterations=1, accumulation=2, micro_batch=2, length=8)


class FakeEngine:
  """Answers with given completions; remembers what it was asked."""

  def __init__(self, completions: list[list[int]], **changes: Any):
    self.answer = {
      "text": [f"text {index}" for index in range(len(completions))],
      "tokens": [np.array(each) for each in completions],
      "logprobs": [np.full(len(each), -0.5, np.float32) for each in completions],
      **changes,
    }
    self.asked: list[Any] = []
    self.params: list[Any] = []

  def update_params(self, params: Any, filter_types: Any = None) -> None:
    self.params.append(params)

  def generate(self, prompts: Any, rollout_config: Any) -> Any:
    self.asked.append((prompts, rollout_config))
    return SimpleNamespace(**self.answer)


class FakeRewards:
  def __init__(self, rewards: list[float], failures: int = 0):
    self.rewards = rewards
    self.failures = failures
    self.seen: list[Any] = []

  def score(self, groups: Any) -> Scores:
    self.seen = groups
    rewards = np.array(self.rewards[: sum(map(len, groups))], np.float64)
    return Scores({"mine.py:f": rewards}, rewards, {"mine.py:f": self.failures}, {"mine.py:f": "bad"}, 0.1)


def collect(engine: FakeEngine, rewards: FakeRewards, *, rows: Any = (2, 0), number: int = 3, **options: Any):
  settings = CollectorSettings(
    sampling=base_rollout.RolloutConfig(max_tokens_to_generate=4),
    ends=((STOP,), (20, 21)),
    seed=7,
    **options.pop("settings", {}),
  )
  collector = RolloutCollector(
    prompts=PROMPTS,
    engine=engine,  # pyright: ignore[reportArgumentType]
    weights=lambda: "weights",
    rewards=rewards,  # pyright: ignore[reportArgumentType]
    settings=settings,
    shape=SHAPE,
    **options,
  )
  rollout: Any = collector.collect(np.array(rows, np.int32), number)
  return rollout


GOOD = [[11, STOP], [12, 13, 14, 15], [STOP], [16, STOP]]


def test_what_is_asked_and_what_comes_of_it():
  engine, rewards = FakeEngine(GOOD), FakeRewards([1, 0, 1, 1])
  rollout = collect(engine, rewards)
  ((prompts, config),) = engine.asked
  assert prompts == [[4, 5, 6], [4, 5, 6], [1, 2], [1, 2]]
  assert config.seed == (7 << 32) + 3
  assert engine.params == ["weights"]
  sample = rewards.seen[0][1]
  assert (sample.prompt, sample.completion, sample.answer, sample.tokens, sample.truncated) == (
    "three", "text 1", "c", 4, True,
  )  # fmt: skip
  first = rollout.trajectories[0]
  assert first.tokens.tolist() == [4, 5, 6, 11, STOP]
  assert (first.prompt, first.old.tolist(), first.trained) == (3, [-0.5, -0.5], True)
  have = [each.advantage for each in rollout.trajectories]
  np.testing.assert_allclose(have, group_advantages([1, 0, 1, 1], 2))
  assert rollout.metrics["reward"] == 0.75
  assert rollout.metrics["reward/f"] == 0.75
  assert rollout.metrics["zero_spread_groups"] == 0.5
  assert rollout.metrics["truncated_completions"] == 0.25
  assert (rollout.metrics["completion_tokens_min"], rollout.metrics["completion_tokens_max"]) == (1, 4)
  assert rollout.timings["rollout_tokens_per_second"] > 0


def test_other_rollouts_have_other_seeds():
  engine = FakeEngine(GOOD)
  for number in (0, 1):
    collect(engine, FakeRewards([1, 0, 1, 1]), number=number)
  assert engine.asked[0][1].seed != engine.asked[1][1].seed


def test_rows_that_are_not_there_are_not_asked():
  engine = FakeEngine(GOOD[:2])
  rollout = collect(engine, FakeRewards([1, 0]), rows=(2, -1))
  assert len(engine.asked[0][0]) == 2
  assert [each is None for each in rollout.trajectories] == [False, False, True, True]


def test_a_rollout_of_nothing_but_padding():
  engine = FakeEngine([])
  rollout = collect(engine, FakeRewards([]), rows=(-1, -1))
  assert (engine.asked, rollout.metrics) == ([], {})
  assert rollout.trajectories == [None] * 4


def test_truncated_completions_are_masked_if_asked():
  rollout = collect(FakeEngine(GOOD), FakeRewards([1, 0, 1, 1]), settings={"mask_truncated": True})
  assert [each.trained for each in rollout.trajectories] == [True, False, True, True]
  assert rollout.metrics["masked_completions"] == 1


def test_completions_with_no_end_are_all_masked():
  rollout = collect(FakeEngine([[1, 2]] * 4), FakeRewards([1, 0, 1, 1]), settings={"mask_truncated": True})
  assert not any(each.trained for each in rollout.trajectories)
  assert rollout.metrics["truncated_completions"] == 1


def test_completions_that_are_their_end_alone():
  rollout = collect(FakeEngine([[STOP]] * 4, text=[""] * 4), FakeRewards([0, 0, 0, 0]))
  assert [each.advantage for each in rollout.trajectories] == [0] * 4
  assert rollout.metrics["zero_spread_groups"] == 1


def test_old_log_probabilities_by_the_trainer():
  def by_trainer(batch: Any) -> np.ndarray:
    return np.arange(batch["inputs"].size, dtype=np.float32).reshape(batch["inputs"].shape)

  rollout = collect(FakeEngine(GOOD), FakeRewards([1, 0, 1, 1]), old_log_probs=by_trainer)
  # The first completion's two tokens are predicted at positions 2 and 3 of its row, the second row begins at 8.
  assert rollout.trajectories[0].old.tolist() == [2, 3]
  assert rollout.trajectories[1].old.tolist() == [10, 11, 12, 13]
  assert rollout.trajectories[0].engine.tolist() == [-0.5, -0.5]


def test_failed_rewards_are_told():
  told: list[str] = []
  rollout = collect(FakeEngine(GOOD), FakeRewards([0, 0, 1, 1], failures=1), on_trouble=told.append)
  assert told == ["rollout 4: reward mine.py:f failed in 1 of 2 calls, first: bad"]
  assert rollout.metrics["reward_failures"] == 1


def test_samples_have_their_rewards():
  told: list[Any] = []
  collect(
    FakeEngine(GOOD), FakeRewards([1, 0, 1, 1]), on_samples=lambda number, samples: told.append((number, samples))
  )
  ((number, samples),) = told
  assert number == 3
  assert (samples[1].completion, samples[1].reward, samples[1].truncated) == ("text 1", 0.0, True)


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"tokens": [np.array([1])] * 3}, "3 completions"),
    ({"logprobs": None}, "0 lists of log-probabilities"),
    ({"tokens": [np.array([], int), *[np.array([1])] * 3]}, "no token for prompt 0"),
    ({"logprobs": [np.zeros(1)] * 4}, "2 tokens and 1 log-probabilities"),
    ({"logprobs": [np.full(len(each), np.nan) for each in GOOD]}, "not finite"),
    ({"logprobs": [np.full(len(each), -np.inf) for each in GOOD]}, "not finite"),
  ],
)
def test_an_engine_that_answers_something_else(changes: dict[str, Any], says: str):
  with pytest.raises(TrainingError, match=says):
    collect(FakeEngine(GOOD, **changes), FakeRewards([1, 0, 1, 1]))


def test_an_end_of_several_tokens_ends_a_completion_too():
  rollout = collect(FakeEngine([[11, 20, 21], [20], [21, 20], [11, STOP]]), FakeRewards([1, 0, 1, 1]))
  assert rollout.metrics["truncated_completions"] == 0.5
