"""Trains with TRL's `GRPOTrainer` on the CPU what `grpo_step.py` trains with this package, and notes what it does.

  python _trl_grpo_side.py RESULT.json key=value ...

As `_trl_side.py`, whose model and recorder it uses. Completions come from transformers' `generate`. RESULT.json has
`phases` too: for each rollout the seconds of generation, rewards and log-probabilities outside of updates.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch  # pyright: ignore[reportMissingImports]  # in another interpreter
from _trl_side import Recorder, build_model, run, training_arguments
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]


class RolloutRecorder(Recorder):
  """A recorder of rollouts, by phases; what the collator sees are prompts and is not counted."""

  def __init__(self) -> None:
    super().__init__()
    self.result["phases"] = []

  def observe_phases(self, trainer: GRPOTrainer) -> None:
    """Wraps the methods that the phases of a rollout are."""
    rollout, generate = trainer._generate_and_score_completions, trainer._generate
    rewards, log_probs = trainer._calculate_rewards, trainer._get_per_token_logps_and_entropies

    def observed_rollout(inputs: Any) -> Any:
      self.result["phases"].append({"rollout": 0.0, "rewards": 0.0, "log_probs": 0.0})
      batch = rollout(inputs)
      rows, tokens = batch["completion_ids"].shape[0], int(batch["completion_mask"].sum())
      prompts = int(batch["prompt_mask"].sum())
      self.result["positions"].append(rows * (batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1]))
      self.result["tokens"].append(prompts + tokens)
      self.result["trained_tokens"].append(tokens)
      return batch

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
      def call(*args: Any, **kwargs: Any) -> Any:
        started = time.monotonic()
        result = method(*args, **kwargs)
        # Inside an update the log-probabilities are the update's.
        if name != "log_probs" or not torch.is_grad_enabled():
          self.result["phases"][-1][name] += time.monotonic() - started
        return result

      return call

    trainer._generate_and_score_completions = observed_rollout
    trainer._generate = timed("rollout", generate)
    trainer._calculate_rewards = timed("rewards", rewards)
    trainer._get_per_token_logps_and_entropies = timed("log_probs", log_probs)


def reward_function(name: str) -> Callable[..., list[float]]:
  """A reward function of this package, `file.py:function`, as TRL calls them."""
  path, _, function = name.rpartition(":")
  spec = importlib.util.spec_from_file_location("rewards", path)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)

  def reward(prompts: Any, completions: Any, answer: list[str], **_: Any) -> list[float]:
    return getattr(module, function)(
      [prompt[-1]["content"] for prompt in prompts], [completion[0]["content"] for completion in completions], answer
    )

  return reward


def prompts(path: str) -> Dataset:
  """Rows of question and answer as TRL wants them."""
  rows: Any = load_dataset("json", data_files=path, split="train")
  return rows.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]}, remove_columns=["question"])


def build_trainer(keys: Mapping[str, str], recorder: RolloutRecorder) -> GRPOTrainer:
  """The trainer for MaxText's keys."""
  arguments = training_arguments(keys)
  del arguments["max_length"]
  generations, sequences = int(keys["rl.num_generations"]), int(keys["per_device_batch_size"])
  config = GRPOConfig(
    **arguments,
    num_generations=generations,
    steps_per_generation=int(keys["batch_size"]) * generations // sequences,
    num_iterations=1,
    max_completion_length=int(keys["max_target_length"]) - int(keys["max_prefill_predict_length"]),
    temperature=float(keys["decode_sampling_temperature"]),
    beta=0.0,
    epsilon=float(keys["rl.grpo_epsilon"]),
    loss_type="grpo",
    scale_rewards="group",
    use_vllm=False,
  )
  model = build_model(keys)
  trainer = GRPOTrainer(
    model=model,
    reward_funcs=[reward_function(keys["reward"])],
    args=config,
    train_dataset=prompts(keys["hf_train_files"]),
    processing_class=AutoTokenizer.from_pretrained(keys["tokenizer_path"]),
    callbacks=[recorder],
  )
  recorder.observe_phases(trainer)
  return trainer


if __name__ == "__main__":
  rollouts = RolloutRecorder()
  run(lambda keys, _: build_trainer(keys, rollouts), rollouts)
