"""GRPO: the model completes prompts, rewards score what it wrote, and what beat its group is made likelier.

It runs on the base that all trainers share, with Tunix's `PeftTrainer` below and an engine behind Tunix's
`BaseRollout`. Tunix's own `RLCluster` and `GRPOLearner` (0.1.7) could not be made exact from outside:

- A resumed learner skips as many batches of prompts as it had made micro-batch updates, which with `num_iterations`
  above 1 are several times as many, and what is left of the rollout it was killed in is lost.
- Prompts and completions cross as text and are masked where an id equals the pad id, so an eos that is the pad goes.
- The cluster builds an optimizer and a copy of the weights of its own before a checkpoint manager can be put in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tunix.rl.rollout import base_rollout

from maxtext_posttrain import hosts, maxtext_api, maxtext_lora
from maxtext_posttrain.checkpointing.names import ACTOR
from maxtext_posttrain.config import Config
from maxtext_posttrain.data import BATCH_KEYS, BatchIterator, PreparedData
from maxtext_posttrain.data import Batch as HostBatch
from maxtext_posttrain.data.prompts import PromptDataset, prepare_prompts, prompt_tokenizer
from maxtext_posttrain.errors import ConfigError
from maxtext_posttrain.losses.grpo import (
  GrpoSettings,
  aggregate,
  metric_sum,
  token_losses,
  truncated_importance_weights,
)
from maxtext_posttrain.maxtext_api import MaxTextConfig
from maxtext_posttrain.report.completions import SAMPLES
from maxtext_posttrain.report.metrics_file import MetricsFile
from maxtext_posttrain.rewards.pool import RewardPool
from maxtext_posttrain.rewards.sample import RewardSettings
from maxtext_posttrain.rewards.shared import Rewards, SharedRewards
from maxtext_posttrain.rollout.engines import build_rollout
from maxtext_posttrain.rollout.text import completion_ends
from maxtext_posttrain.trainers import outputs
from maxtext_posttrain.trainers.collector import CollectorSettings, LogProbs, RolloutCollector, WrittenSample
from maxtext_posttrain.trainers.objective import (
  Batch,
  BatchSpec,
  FrozenModel,
  LossContext,
  LossOutput,
  Objective,
)
from maxtext_posttrain.trainers.rollouts import RolloutBatches

if TYPE_CHECKING:
  from maxtext_posttrain.trainers.base import Session

REFERENCE = "reference"

_ROWS = ("advantages", "weights")
_TOKENS = ("old_log_probs", "engine_log_probs")
_FORWARD_SHARE = 1 / 3
"""Of a forward and backward pass's FLOPs, those of the forward pass."""
_DEFAULT_REWARD_PROCESSES = 4


class GRPO(Objective):
  """The clipped objective over groups of completions, less a penalty for leaving the reference."""

  name = "grpo"
  weight_name = "loss_weight"
  evaluates_itself = True
  checkpoint_role = f"{ACTOR}/"

  def prepare_data(self, config: Config) -> PreparedData:
    """Prompts with answers; see `maxtext_posttrain.data.prompts`."""
    return prepare_prompts(config)

  def batch_spec(self, config: Config, maxtext: MaxTextConfig, batch: int) -> BatchSpec:
    """MaxText's keys, and what `rollout_batch` puts beside them."""
    spec = dict(super().batch_spec(config, maxtext, batch))
    spec |= {key: jax.ShapeDtypeStruct((batch, maxtext.max_target_length), jnp.float32) for key in _TOKENS}
    return spec | {key: jax.ShapeDtypeStruct((batch,), jnp.float32) for key in _ROWS}

  def frozen_models(self, config: Config, maxtext: MaxTextConfig) -> Mapping[str, FrozenModel]:
    """The weights the run starts from, where there is a penalty for leaving them; of an adapter these are the base."""
    held = config.rl.grpo_beta and not maxtext_lora.lora_enabled(maxtext)
    return {REFERENCE: FrozenModel(maxtext)} if held else {}

  def loss(self, model: nnx.Module, batch: Batch, context: LossContext) -> LossOutput:
    """The objective summed as `rl.loss_agg_mode` has it; the metrics are means over tokens. Dropout is off."""
    config, maxtext = context.config, context.maxtext
    settings = loss_settings(config)
    temperature = float(config.decode_sampling_temperature)
    mask = batch["targets_segmentation"] != 0
    found = outputs.token_outputs(maxtext, model, batch, is_train=False, with_entropy=True, temperature=temperature)
    balance = maxtext_api.pop_load_balance_loss(model)
    # What the trainer itself made of the completions, as far as it has looked at them with the weights that wrote them.
    current = jax.lax.stop_gradient(found.log_probs)
    old = current if old_from_current(config, updates_of(config, maxtext)) else batch["old_log_probs"]
    engine = batch["engine_log_probs"]
    by_trainer = current if config.rl.use_rollout_logps else old
    cap = config.rl.importance_sampling_cap
    weights = None if cap is None else truncated_importance_weights(old, engine, mask, cap)
    reference = None
    if config.rl.grpo_beta:
      frozen, its = context.frozen.get(REFERENCE), context.frozen_maxtext.get(REFERENCE, maxtext)
      if frozen is None:
        frozen = maxtext_lora.without_adapter(maxtext, model)
      reference = outputs.token_outputs(its, frozen, batch, is_train=False, temperature=temperature).log_probs
    losses = token_losses(
      settings,
      log_probs=found.log_probs,
      old_log_probs=old,
      advantages=batch["advantages"],
      mask=mask,
      reference=reference,
      weights=weights,
    )
    loss_sum = aggregate(losses.loss, mask, settings.aggregation, token_scale=settings.token_scale)
    values = {
      "entropy": found.entropy,
      "ratio": losses.ratio,
      "clipped_low": losses.clipped_low,
      "clipped_high": losses.clipped_high,
      "engine_gap": jnp.abs(by_trainer - engine),
    }
    if reference is not None:
      values["kl"] = losses.kl
    if weights is not None:
      values["importance_weight"] = weights
    means = {
      name: metric_sum(jax.lax.stop_gradient(value), mask, settings.aggregation) for name, value in values.items()
    }
    if balance is not None and context.is_train:
      loss_sum += balance * self.weight(batch)
    totals = {
      "tokens": jnp.sum(batch["inputs_segmentation"] != 0).astype(jnp.float32),
      "trained_tokens": jnp.sum(mask).astype(jnp.float32),
    }
    return LossOutput(loss_sum, totals=totals, means=means)

  def weight(self, batch: Batch) -> jax.Array:
    """Trained tokens, or sequences; see `losses.grpo.loss_weights`."""
    return jnp.sum(batch["weights"])

  def passes(self, config: Config) -> float:
    """One forward and backward, and the reference's forward where there is a penalty."""
    return 1.0 + (_FORWARD_SHARE if config.rl.grpo_beta else 0.0)

  def completions_at_once(self, config: Config, maxtext: MaxTextConfig) -> int:
    """Those of one rollout, or of what `rollout_micro_batch_size` makes of it; another engine's are not counted."""
    if config.rollout_engine != "native":
      return 0
    return _rollout_size(config, prompts_of(config, maxtext))

  def batches(self, session: Session, rows: BatchIterator) -> RolloutBatches:
    """Rollouts of the prompts, with the live weights."""
    # What `prepare_data` made.
    config, dataset = session.config, cast("PromptDataset", session.datasets.train)
    updates = updates_of(config, session.maxtext)
    if config.rl.force_on_policy_ratio and updates > 1:
      raise ConfigError(
        f"rl.force_on_policy_ratio=true: is for one update a rollout, and batch_size={config.batch_size} makes"
        f" {updates}; leave one of them out"
      )
    self._players = Players(session, max_completions=_rollout_size(config, dataset.shape.prompts))
    return RolloutBatches(
      rows,
      dataset.shape,
      self._players.collector(dataset),
      aggregation=config.rl.loss_agg_mode,
      mine=dataset.mine,
      on_close=self._players.close,
    )

  def evaluation(self, session: Session) -> Callable[[], dict[str, float]] | None:
    """The most probable completions of the held-out prompts, scored."""
    dataset = cast("PromptDataset | None", session.datasets.evaluation)
    if dataset is None:
      return None
    return lambda: self._players.evaluate(dataset, limit=session.maxtext.eval_steps)


def loss_settings(config: Config) -> GrpoSettings:
  """The numbers of the objective, from the configuration."""
  rl = config.rl
  return GrpoSettings(
    algorithm=rl.loss_algo,
    aggregation=rl.loss_agg_mode,
    epsilon_low=rl.grpo_epsilon,
    epsilon_high=rl.grpo_epsilon if rl.epsilon_high is None else rl.epsilon_high,
    beta=rl.grpo_beta,
    token_scale=completion_limit(config),
  )


def completion_limit(config: Config) -> int:
  """Tokens that a completion may have."""
  return config.max_target_length - config.max_prefill_predict_length


def updates_of(config: Config, maxtext: MaxTextConfig) -> int:
  """Updates that are made of one rollout."""
  completions = prompts_of(config, maxtext) * config.rl.num_generations
  return max(1, completions // _sequences_of_an_update(maxtext)) * config.rl.num_iterations


def prompts_of(config: Config, maxtext: MaxTextConfig) -> int:
  """Prompts of one rollout."""
  return config.batch_size or _sequences_of_an_update(maxtext) // config.rl.num_generations


def _sequences_of_an_update(maxtext: MaxTextConfig) -> int:
  return maxtext.micro_batch_size_to_train_on * maxtext.gradient_accumulation_steps


def old_from_current(config: Config, updates: int) -> bool:
  """Whether the policy that wrote the completions is the one that is trained, so that its own log-probabilities do."""
  return config.rl.force_on_policy_ratio or (not config.rl.use_rollout_logps and updates == 1)


def _rollout_size(config: Config, prompts: int) -> int:
  """Completions written at once, of a rollout of so many prompts."""
  at_once = prompts if config.rollout_micro_batch_size == -1 else config.rollout_micro_batch_size
  return at_once * config.rl.num_generations


class Players:
  """What a run's rollouts are made with: the engine and the reward processes.

  Attributes:
    engine: writes completions.
    rewards: scores them.
  """

  def __init__(self, session: Session, *, max_completions: int):
    """Builds them; `session.trainer` has the model."""
    config = session.config
    self._session = session
    self._tokenizer = prompt_tokenizer(config)
    ends = completion_ends(self._tokenizer, session.maxtext.vocab_size)
    self._ends = (*((token,) for token in ends.stop_token_ids), *ends.stop_sequences)
    top_p = config.decode_sampling_nucleus_p
    self._sampling = base_rollout.RolloutConfig(
      max_tokens_to_generate=completion_limit(config),
      temperature=float(config.decode_sampling_temperature),
      top_p=None if top_p == -1 else float(top_p),
      top_k=config.decode_sampling_top_k,
      max_prompt_length=config.max_prefill_predict_length,
      eos_tokens=list(ends.stop_token_ids),
      return_logprobs=True,
    )
    # The engine knows no adapters: it is built for the base, and gets weights with the adapter folded in.
    lora = session.lora
    self.engine = build_rollout(
      config,
      rollout_actor=session.trainer.model if lora is None else lora.base.abstract_model,
      tokenizer=None,
      mesh=session.mesh,
      rollout_config=self._sampling,
      maxtext=session.maxtext if lora is None else maxtext_lora.without_lora(session.maxtext),
      texts=self._tokenizer,
      stop_sequences=ends.stop_sequences,
      written_end=ends.written,
      max_batch=max_completions,
    )
    processes = config.reward_num_workers or min(_DEFAULT_REWARD_PROCESSES, os.cpu_count() or 1)
    start = functools.partial(
      RewardPool,
      config.reward_weights,
      reward_settings(config),
      workers=(os.cpu_count() or 1) if processes == -1 else processes,
      time_limit=config.reward_worker_timeout_seconds,
      failure_score=config.reward_failure_score,
    )
    self.rewards: Rewards = SharedRewards(config.reward_weights, start) if hosts.several() else start()
    self._engine_weights = engine_weights(session)
    self._samples: MetricsFile | None = None

  def close(self) -> None:
    """Ends the engine and the reward processes, and closes the file of samples."""
    self.engine.close()
    self.rewards.close()
    if self._samples is not None:
      self._samples.close()

  def _weights(self) -> nnx.State:
    """The live weights, once they are there: else the engine would be told to have waited for them."""
    return jax.block_until_ready(self._session.trainer.model_state)

  def collector(self, dataset: PromptDataset) -> RolloutCollector:
    """What makes rollouts to train on."""
    session, config = self._session, self._session.config
    settings = CollectorSettings(
      sampling=self._sampling,
      ends=self._ends,
      seed=config.rollout_seed,
      scale=config.rl.advantage_scale,
      epsilon=config.rl.advantage_epsilon,
      mask_truncated=config.rl.mask_truncated_completions,
      aggregation=config.rl.loss_agg_mode,
    )
    recompute = not config.rl.use_rollout_logps and not old_from_current(config, updates_of(config, session.maxtext))
    return RolloutCollector(
      prompts=dataset.source,
      engine=self.engine,
      weights=self._weights,
      rewards=self.rewards,
      settings=settings,
      shape=dataset.shape,
      engine_weights=self._engine_weights,
      old_log_probs=self._trainer_log_probs() if recompute else None,
      on_samples=self._write_samples,
      on_trouble=lambda line: session.trainer.reporter.line(line),
    )

  def _trainer_log_probs(self) -> LogProbs:
    """The trainer's own log-probabilities of a micro-batch, [rows, length] float32."""
    session = self._session
    temperature = float(session.config.decode_sampling_temperature)
    graphdef = nnx.graphdef(session.pretraining.abstract_model)

    # Every process needs all of them: its rollout is the whole one.
    @functools.partial(jax.jit, out_shardings=NamedSharding(session.mesh, PartitionSpec()))
    def log_probs(state: nnx.State, batch: Mapping[str, jax.Array]) -> jax.Array:
      model = nnx.merge(graphdef, state, copy=True)
      return outputs.token_outputs(session.maxtext, model, batch, is_train=False, temperature=temperature).log_probs

    mine = session.held_rows("train") or slice(None)

    def of_batch(batch: HostBatch) -> np.ndarray:
      placed = session.place({key: batch[key][None, mine] for key in BATCH_KEYS})
      return np.asarray(log_probs(session.trainer.model_state, {key: values[0] for key, values in placed.items()}))

    return of_batch

  def _write_samples(self, number: int, samples: Sequence[WrittenSample]) -> None:
    """Appends a rollout's first completions to `samples.jsonl`, with the update that they come in first."""
    session = self._session
    count = session.config.samples_per_rollout
    if not count or not hosts.is_first():
      return
    step = session.trainer.train_steps
    if self._samples is None:
      # What a killed run wrote past its checkpoint is dropped.
      self._samples = MetricsFile(session.run_directory / SAMPLES, completed_steps=step)
    for sample in samples[:count]:
      self._samples.write("sample", step + 1, {"rollout": number + 1, **dataclasses.asdict(sample)})

  def evaluate(self, dataset: PromptDataset, *, limit: int) -> dict[str, float]:
    """The mean rewards of the most probable completion of each prompt.

    Args:
      dataset: prompts held out.
      limit: batches of them at most, where that is above 0.
    """
    session = self._session
    collector = RolloutCollector(
      prompts=dataset.source,
      engine=self.engine,
      weights=self._weights,
      rewards=self.rewards,
      settings=CollectorSettings(sampling=_greedy(self._sampling), ends=self._ends, seed=0, scale="none"),
      shape=dataset.shape,
      engine_weights=self._engine_weights,
      on_trouble=lambda line: session.trainer.reporter.line(f"evaluation, {line}"),
    )
    sums: dict[str, float] = {}
    prompts = 0
    rows = dataset.iterator()
    with contextlib.closing(rows):
      for number, batch in enumerate(rows):
        if 0 < limit <= number:
          break
        rollout = collector.collect(batch["row"], number)
        count = sum(each is not None for each in rollout.trajectories)
        prompts += count
        for name, value in rollout.metrics.items():
          if name == "reward" or name.startswith(("reward/", "completion_tokens_mean", "truncated")):
            sums[name] = sums.get(name, 0.0) + value * count
    return {**{name: value / max(prompts, 1) for name, value in sums.items()}, "prompts": prompts}


def engine_weights(session: Session) -> Callable[[nnx.State], nnx.State]:
  """Makes an engine's weights of the policy's state: an adapter is folded in, full weights stay as they are."""
  lora = session.lora
  if lora is None:
    return lambda state: state
  graphdef = nnx.graphdef(lora.run.abstract_model)
  base = nnx.filter_state(lora.base.state["model"], nnx.Param)

  def merged(state: nnx.State) -> nnx.State:
    return maxtext_lora.merged_state(session.maxtext, base, nnx.merge(graphdef, state, copy=True))

  compiled = jax.jit(merged, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, base))
  # Waited for, so that its time is not the engine's.
  return lambda state: jax.block_until_ready(compiled(state))


def reward_settings(config: Config) -> RewardSettings:
  """What the configuration says to the built-in reward functions."""
  return RewardSettings(
    reasoning=(config.reasoning_start_token, config.reasoning_end_token),
    solution=(config.solution_start_token, config.solution_end_token),
    reasoning_in_prompt=config.reasoning_start_token_in_prompt,
    most_tokens=completion_limit(config),
    overlong_tokens=config.overlong_tokens,
  )


def _greedy(sampling: base_rollout.RolloutConfig) -> base_rollout.RolloutConfig:
  return dataclasses.replace(sampling, temperature=0.0, top_k=0, top_p=None)
