"""Makes rollouts: the engine writes, the reward pool scores, the group's advantages follow."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tunix.rl.rollout import base_rollout

from maxtext_posttrain.data import Batch
from maxtext_posttrain.data.batches import PADDING_ROW
from maxtext_posttrain.data.prompts import PromptRows
from maxtext_posttrain.errors import TrainingError
from maxtext_posttrain.losses.grpo import AdvantageScale, Aggregation, group_advantages, zero_spread
from maxtext_posttrain.rewards.pool import Scores
from maxtext_posttrain.rewards.sample import RewardSample
from maxtext_posttrain.rewards.shared import Rewards
from maxtext_posttrain.trainers.rollouts import Rollout, RolloutShape, Trajectory, rollout_batch

LogProbs = Callable[[Batch], npt.NDArray[np.float32]]


@dataclasses.dataclass(frozen=True)
class CollectorSettings:
  """How completions are written and judged.

  Attributes:
    sampling: Tunix's settings of the engine; the seed is set anew for each rollout.
    ends: the last tokens of a completion that ended by itself, of one token or more each.
    seed: of all rollouts, below 2**32.
    scale: of the advantages.
    epsilon: of the advantages.
    mask_truncated: completions that were cut count in their group and not in the loss.
    aggregation: of the loss.
  """

  sampling: base_rollout.RolloutConfig
  ends: Sequence[tuple[int, ...]]
  seed: int = 0
  scale: AdvantageScale = "std"
  epsilon: float = 1e-6
  mask_truncated: bool = False
  aggregation: Aggregation = "token-mean"


@dataclasses.dataclass(frozen=True)
class WrittenSample:
  """One completion with what became of it, for the report.

  Attributes:
    prompt: what was asked.
    answer: the row's own answer.
    completion: what the model wrote.
    reward: the weighted sum.
    rewards: of each function.
    advantage: over its group.
    tokens: of the completion.
    truncated: it was cut at its limit.
  """

  prompt: str
  answer: str
  completion: str
  reward: float
  rewards: Mapping[str, float]
  advantage: float
  tokens: int
  truncated: bool


class RolloutCollector:
  """Completes prompts with the trainer's weights as they are now, and scores what came of it."""

  def __init__(
    self,
    *,
    prompts: PromptRows,
    engine: base_rollout.BaseRollout,
    weights: Callable[[], Any],
    rewards: Rewards,
    settings: CollectorSettings,
    shape: RolloutShape,
    engine_weights: Callable[[Any], Any] = lambda weights: weights,
    old_log_probs: LogProbs | None = None,
    on_samples: Callable[[int, Sequence[WrittenSample]], None] | None = None,
    on_trouble: Callable[[str], None] = print,
  ):
    """Takes the parts.

    Args:
      prompts: by number.
      engine: writes completions, and says their log-probabilities.
      weights: the policy's, once the update before has made them.
      rewards: scores completions.
      settings: see `CollectorSettings`.
      shape: the sizes.
      engine_weights: makes the engine's weights of the policy's, where these hold an adapter.
      old_log_probs: a micro-batch to the policy's own log-probabilities [rows, length]; None takes the engine's.
      on_samples: is handed the rollout's number and every completion of it.
      on_trouble: is told of reward calls that failed, a line each.
    """
    self._prompts = prompts
    self._engine = engine
    self._weights = weights
    self._engine_weights = engine_weights
    self._rewards = rewards
    self._settings = settings
    self._shape = shape
    self._old_log_probs = old_log_probs
    self._on_samples = on_samples
    self._on_trouble = on_trouble

  def collect(self, rows: npt.NDArray[np.int32], number: int) -> Rollout:
    """Completes the prompts `rows` [P], each G times; `number` counts rollouts from the run's first.

    Raises:
      TrainingError: the engine's answer is not what was asked for.
    """
    settings, shape = self._settings, self._shape
    clock = [time.perf_counter()]
    weights = self._weights()
    clock.append(time.perf_counter())
    self._engine.update_params(self._engine_weights(weights))
    clock.append(time.perf_counter())
    asked = [int(row) for row in rows if row != PADDING_ROW]
    # Tunix's engines are declared to take texts; ours take tokens too.
    ids: list[Any] = [self._prompts.tokens[row] for row in asked for _ in range(shape.generations)]
    seed: Any = (settings.seed << 32) | (number & 0xFFFFFFFF)
    output = self._engine.generate(ids, dataclasses.replace(settings.sampling, seed=seed)) if ids else None
    tokens = [] if output is None else [np.asarray(each, np.int32) for each in output.tokens]
    log_probs = [] if output is None else [np.asarray(each, np.float32) for each in output.logprobs or ()]
    texts = [] if output is None else output.text
    _check(tokens, log_probs, len(ids))
    clock.append(time.perf_counter())
    truncated = [not any(tuple(each[-len(end) :].tolist()) == end for end in settings.ends) for each in tokens]
    samples = [
      RewardSample(self._prompts.texts[row], text, self._prompts.answers[row], len(each), cut)
      for row, text, each, cut in zip(np.repeat(asked, shape.generations), texts, tokens, truncated, strict=True)
    ]
    size = shape.generations
    scores = self._rewards.score([samples[start : start + size] for start in range(0, len(samples), size)])
    advantages = group_advantages(scores.rewards, size, scale=settings.scale, epsilon=settings.epsilon)
    clock.append(time.perf_counter())
    trajectories = [
      Trajectory(
        tokens=np.concatenate([np.asarray(prompt, np.int32), each]),
        prompt=len(prompt),
        old=engine,
        engine=engine,
        advantage=float(advantage),
        trained=not (cut and settings.mask_truncated),
      )
      for prompt, each, engine, advantage, cut in zip(ids, tokens, log_probs, advantages, truncated, strict=True)
    ]
    placed = self._placed(rows, trajectories)
    if self._old_log_probs is not None:
      placed = self._with_old_log_probs(placed, self._old_log_probs)
    clock.append(time.perf_counter())
    self._tell(number, samples, scores, advantages)
    seconds = np.diff(clock)
    written = sum(map(len, tokens))
    timings = {
      "update_wait_seconds": float(seconds[0]),
      "weight_transfer_seconds": float(seconds[1]),
      "rollout_seconds": float(seconds[2]),
      "reward_seconds": float(seconds[3]),
      "log_prob_seconds": float(seconds[4]),
      "rollout_tokens_per_second": written / float(seconds[2]),
    }
    return Rollout(placed, _metrics(scores, size, tokens, truncated, settings.mask_truncated), timings)

  def _placed(self, rows: npt.NDArray[np.int32], trajectories: Sequence[Trajectory]) -> list[Trajectory | None]:
    """The trajectories with None for those of rows that only fill the batch."""
    left = iter(trajectories)
    return [next(left) if row != PADDING_ROW else None for row in rows for _ in range(self._shape.generations)]

  def _with_old_log_probs(
    self, trajectories: Sequence[Trajectory | None], old_log_probs: LogProbs
  ) -> list[Trajectory | None]:
    size = self._shape.micro_batch
    result: list[Trajectory | None] = []
    for start in range(0, len(trajectories), size):
      part = trajectories[start : start + size]
      values = old_log_probs(rollout_batch(part, self._shape.length, self._settings.aggregation))
      for each, row in zip(part, values, strict=True):
        if each is not None:
          old = np.asarray(row[each.prompt - 1 : len(each.tokens) - 1], np.float32)
          each = dataclasses.replace(each, old=old)
        result.append(each)
    return result

  def _tell(
    self, number: int, samples: Sequence[RewardSample], scores: Scores, advantages: npt.NDArray[np.float32]
  ) -> None:
    for name, count in scores.failures.items():
      if count:
        calls = len(samples) // self._shape.generations
        self._on_trouble(
          f"rollout {number + 1}: reward {name} failed in {count} of {calls} calls, first: {scores.first_errors[name]}"
        )
    if self._on_samples is None:
      return
    written = [
      WrittenSample(
        prompt=sample.prompt,
        answer=sample.answer,
        completion=sample.completion,
        reward=float(scores.rewards[index]),
        rewards={name: float(values[index]) for name, values in scores.by_function.items()},
        advantage=float(advantages[index]),
        tokens=sample.tokens,
        truncated=sample.truncated,
      )
      for index, sample in enumerate(samples)
    ]
    self._on_samples(number, written)


def _check(tokens: Sequence[npt.NDArray[Any]], log_probs: Sequence[npt.NDArray[Any]], count: int) -> None:
  if len(tokens) != count or len(log_probs) != count:
    raise TrainingError(
      f"the engine gave {len(tokens)} completions and {len(log_probs)} lists of log-probabilities for {count} prompts"
    )
  for index, (each, values) in enumerate(zip(tokens, log_probs, strict=True)):
    if not len(each):
      raise TrainingError(f"the engine gave no token for prompt {index}; not even one that ends the completion")
    if len(each) != len(values):
      raise TrainingError(f"completion {index} has {len(each)} tokens and {len(values)} log-probabilities")
    if not np.isfinite(values).all():
      raise TrainingError(
        f"completion {index}: a log-probability of the engine is not finite; the weights are damaged, or learning_rate"
        " is too high"
      )


def metric_name(function: str) -> str:
  """What a reward function's mean is called among the metrics."""
  return f"reward/{function.rpartition(':')[2]}"


def _metrics(
  scores: Scores, size: int, tokens: Sequence[npt.NDArray[Any]], truncated: Sequence[bool], mask_truncated: bool
) -> dict[str, float]:
  """Of a rollout as a whole; none where it has no completion."""
  if not tokens:
    return {}
  groups = scores.rewards.reshape(-1, size)
  lengths = np.array([len(each) for each in tokens])
  metrics = {
    "reward": float(groups.mean()),
    "reward_std": float(groups.std(axis=1, ddof=1).mean()) if size > 1 else 0.0,
    "zero_spread_groups": float(zero_spread(scores.rewards, size).mean()),
    **{metric_name(name): float(values.mean()) for name, values in scores.by_function.items()},
    "completion_tokens_mean": float(lengths.mean()),
    "completion_tokens_min": float(lengths.min()),
    "completion_tokens_max": float(lengths.max()),
    "truncated_completions": float(np.mean(truncated)),
    "reward_failures": float(sum(scores.failures.values())),
  }
  if mask_truncated:
    metrics["masked_completions"] = float(sum(truncated))
  return metrics
