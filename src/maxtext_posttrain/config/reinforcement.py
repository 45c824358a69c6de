"""What a configuration says of GRPO beside MaxText's `rl: {…}`, and what of it can't be."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

TRAINER = "grpo"

AGGREGATIONS = ("token-mean", "sequence-mean-token-mean", "sequence-mean", "sequence-mean-token-scale")
ADVANTAGE_SCALES = ("std", "mean", "none")
ENGINES = ("native", "vllm")
VLLM_OWNED = (
  "model",
  "tokenizer",
  "skip_tokenizer_init",
  "load_format",
  "dtype",
  "max_model_len",
  "logprobs_mode",
  "logits_processors",
  "trust_remote_code",
  "generation_config",
  "tensor_parallel_size",
  "pipeline_parallel_size",
  "data_parallel_size",
)
"""Of vLLM's arguments, those that the engine itself sets."""
VLLM_MISSING = (
  "vLLM is not installed; pip install 'maxtext-posttrain[vllm]' (CUDA), or make vllm-env (CPU) and run with"
  " .venv-vllm/bin/python, or set rollout_engine=native"
)
LEAST_VLLM_TEMPERATURE = 0.01
"""Below it vLLM takes another temperature than it is told."""
_VLLM_KEYS = ("vllm_engine_args", "rollout_check_period")
_ONE_REPLICA = ("rollout_tensor_parallelism", "rollout_data_parallelism", "rollout_expert_parallelism")


ELSEWHERE: Mapping[str, str] = {
  "num_generations": "say rl.num_generations",
  "num_iterations": "say rl.num_iterations",
  "grpo_beta": "say rl.grpo_beta",
  "grpo_epsilon": "say rl.grpo_epsilon",
  "epsilon_high": "say rl.epsilon_high",
  "loss_algo": "say rl.loss_algo",
  "loss_agg_mode": "say rl.loss_agg_mode",
  "use_rollout_logps": "say rl.use_rollout_logps",
  "force_on_policy_ratio": "say rl.force_on_policy_ratio",
  "log_sampler_trainer_agreement": "the agreement is always logged, as engine_gap; leave this key out",
  "num_batches": "say how long to train in updates: steps=…, of which a batch makes rl.num_iterations",
  "train_fraction": "say how long to train in updates: steps=…",
  "train_micro_batch_size": "say per_device_batch_size and gradient_accumulation_steps",
  "eval_batch_size": "say eval_per_device_batch_size",
  "num_test_batches": "say eval_steps",
  "reward_functions": "say reward_weights={file.py:function: weight}",
  "reward_functions_path": "say reward_weights={file.py:function: weight}",
  "reward_exact_answer": "say reward_weights={exact_answer: …}",
  "reward_exact_format_match": "say reward_weights={tagged_format: …}",
  "reward_white_space_format_match": "say reward_weights={exact_answer: …}",
  "reward_partial_format_match": "there is no such reward here; write one and name it in reward_weights",
  "reward_ratio_guess_to_answer_high": "there is no such reward here; write one and name it in reward_weights",
  "reward_ratio_guess_to_answer_low": "there is no such reward here; write one and name it in reward_weights",
  "penalty_incorrect_format": "there is no such reward here; write one and name it in reward_weights",
  "penalty_incorrect_answer": "there is no such reward here; write one and name it in reward_weights",
  "math_verify_timeout": "say reward_worker_timeout_seconds",
  "math_verify_num_procs": "say reward_num_workers",
  "dataset_processor_path": "name the prompts' and the answers' columns: train_data_columns=[question,answer]",
  "rl.use_agentic_rollout": "agents are not supported",
  "rl.max_concurrency": "agents are not supported",
  "rl.off_policy_steps": "agents are not supported",
  "rl.reshard_chunk_size": "the engine shares the trainer's weights; leave this key out",
  "rl.log_sampler_trainer_agreement": "the agreement is always logged, as engine_gap; leave this key out",
}
"""MaxText's keys for RL that nothing here reads, and what to say instead."""


def problems(value: Callable[[str], Any], is_set: Callable[[str], bool], at: Callable[[str], str]) -> Iterator[str]:
  """What is wrong with the keys of GRPO, one line each.

  Args:
    value: a key's value.
    is_set: whether someone set the key.
    at: `where: key=value`, for the start of a line.
  """
  for name, instead in ELSEWHERE.items():
    if is_set(name):
      yield f"{at(name)}: {instead}"
  yield from _loss_problems(value, at)
  yield from _rollout_problems(value, at)
  yield from _engine_problems(value, is_set, at)
  yield from _reward_problems(value, at)


def _loss_problems(value: Callable[[str], Any], at: Callable[[str], str]) -> Iterator[str]:
  if value("rl.num_generations") < 2 and value("rl.advantage_scale") != "none":
    yield f"{at('rl.num_generations')}: a group of one has no advantage; must be at least 2, or rl.advantage_scale=none"
  elif value("rl.num_generations") < 1:
    yield f"{at('rl.num_generations')}: must be at least 1"
  if value("rl.grpo_beta") < 0:
    yield f"{at('rl.grpo_beta')}: must be at least 0"
  if not 0 < value("rl.grpo_epsilon") < 1:
    yield f"{at('rl.grpo_epsilon')}: must be above 0 and below 1"
  if value("rl.epsilon_high") is not None and value("rl.epsilon_high") <= 0:
    yield f"{at('rl.epsilon_high')}: must be above 0"
  if value("rl.force_on_policy_ratio") and value("rl.num_iterations") > 1:
    yield f"{at('rl.force_on_policy_ratio')}: is for one update a rollout; with rl.num_iterations above 1 leave it out"
  if value("rl.importance_sampling_cap") is not None and value("rl.use_rollout_logps"):
    yield (
      f"{at('rl.importance_sampling_cap')}: compares the engine's log-probabilities with the trainer's, which"
      " rl.use_rollout_logps leaves out; set rl.use_rollout_logps=false"
    )


def _rollout_problems(value: Callable[[str], Any], at: Callable[[str], str]) -> Iterator[str]:
  prompt, length = value("max_prefill_predict_length"), value("max_target_length")
  if prompt < 1:
    yield f"{at('max_prefill_predict_length')}: must be at least 1, the most tokens of a prompt"
  elif prompt >= length:
    yield (
      f"{at('max_prefill_predict_length')}: leaves no room for a completion; must be below max_target_length={length}"
    )
  if value("decode_sampling_temperature") <= 0:
    yield f"{at('decode_sampling_temperature')}: must be above 0; completions of one prompt have to differ"
  if value("decode_sampling_top_k") < 0:
    yield f"{at('decode_sampling_top_k')}: must be at least 0, which keeps every token"
  top_p = value("decode_sampling_nucleus_p")
  if top_p != -1 and not 0 < top_p <= 1:
    yield f"{at('decode_sampling_nucleus_p')}: must be above 0 and at most 1, or -1 to keep every token"
  if value("rollout_micro_batch_size") != -1 and value("rollout_micro_batch_size") < 1:
    yield f"{at('rollout_micro_batch_size')}: must be at least 1 prompt, or -1 for all at once"
  if value("dataset_type") == "synthetic":
    yield f"{at('dataset_type')}: prompts can't be made up; use hf or grain"


def _engine_problems(
  value: Callable[[str], Any], is_set: Callable[[str], bool], at: Callable[[str], str]
) -> Iterator[str]:
  if value("rollout_engine") != "vllm":
    for name in _VLLM_KEYS:
      if is_set(name):
        yield f"{at(name)}: is for rollout_engine=vllm; set that too, or leave this key out"
    return
  if importlib.util.find_spec("vllm") is None:
    yield f"{at('rollout_engine')}: {VLLM_MISSING}"
  for name in VLLM_OWNED:
    if name in value("vllm_engine_args"):
      yield f"{at('vllm_engine_args')}: {name} is set by the engine itself; leave it out"
  for name in _ONE_REPLICA:
    if value(name) not in (-1, 1):
      yield f"{at(name)}: rollout_engine=vllm has one replica on one device; leave this key out"
  temperature = value("decode_sampling_temperature")
  if 0 < temperature < LEAST_VLLM_TEMPERATURE:
    yield f"{at('decode_sampling_temperature')}: vLLM samples at {LEAST_VLLM_TEMPERATURE} or more"


def _reward_problems(value: Callable[[str], Any], at: Callable[[str], str]) -> Iterator[str]:
  weights = value("reward_weights")
  if not weights:
    yield f"{at('reward_weights')}: names no reward function, for example reward_weights={{exact_answer: 1.0}}"
  for name, weight in weights.items():
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
      yield f"{at('reward_weights')}: the weight of {name} is {weight!r}, not a number"
      continue
    file, colon, function = name.rpartition(":")
    if not colon:
      from maxtext_posttrain.rewards.functions import FUNCTIONS

      if name not in FUNCTIONS:
        yield f"{at('reward_weights')}: {name} is none of {', '.join(FUNCTIONS)}, nor file.py:function"
    elif not file.endswith(".py") or not function.isidentifier():
      yield f"{at('reward_weights')}: {name} is not file.py:function"
  if value("reward_worker_timeout_seconds") <= 0:
    yield f"{at('reward_worker_timeout_seconds')}: must be above 0"
  if value("reward_num_workers") < -1:
    yield f"{at('reward_num_workers')}: must be at least 0, or -1 for one process per CPU"
  room = value("max_target_length") - value("max_prefill_predict_length")
  if 0 < room < value("overlong_tokens"):
    yield f"{at('overlong_tokens')}: must be at most {room}, which a completion may have"
