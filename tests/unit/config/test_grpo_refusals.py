"""Bad GRPO configurations: each is refused with its own line, and with no other line beside it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from maxtext_posttrain.config import load_config
from maxtext_posttrain.errors import ConfigError

GOOD = """\
base_config: grpo.yml
run_name: r
base_output_directory: out
steps: 5
hf_train_files: train.jsonl
tokenizer_path: maxtext://tokenizers/tokenizer.llama2
max_prefill_predict_length: 16
max_target_length: 32
"""

CASES = {
  "rl.num_generations=1": "a group of one has no advantage; must be at least 2, or rl.advantage_scale=none",
  "rl.num_iterations=0": "expected a whole number of at least 1",
  "rl.grpo_beta=-0.1": "must be at least 0",
  "rl.grpo_epsilon=0": "must be above 0 and below 1",
  "rl.grpo_epsilon=1.5": "must be above 0 and below 1",
  "rl.epsilon_high=-1": "must be above 0",
  "rl.loss_algo=ppo": "gspo-token",
  "rl.loss_agg_mode=median": "token-mean",
  "rl.advantage_scale=batch": "expected one of std, mean, none",
  "rl.advantage_epsilon=0": "above 0",
  "rl.importance_sampling_cap=2": "set rl.use_rollout_logps=false",
  "rl.force_on_policy_ratio=true rl.num_iterations=2": "is for one update a rollout",
  "rl.use_agentic_rollout=true": "agents are not supported",
  "num_generations=8": "say rl.num_generations",
  "grpo_beta=0.1": "say rl.grpo_beta",
  "loss_algo=gspo-token": "say rl.loss_algo",
  "num_batches=10": "say how long to train in updates",
  "train_micro_batch_size=2": "say per_device_batch_size and gradient_accumulation_steps",
  "reward_functions_path=mine.py": "say reward_weights=",
  "reward_exact_answer=5": "say reward_weights=",
  "batch_size=0": "1",
  "max_prefill_predict_length=32": "leaves no room for a completion; must be below max_target_length=32",
  "max_prefill_predict_length=0": "must be at least 1",
  "decode_sampling_temperature=0": "must be above 0; completions of one prompt have to differ",
  "decode_sampling_top_k=-1": "must be at least 0",
  "decode_sampling_nucleus_p=1.5": "must be above 0 and at most 1",
  "rollout_micro_batch_size=0": "must be at least 1 prompt",
  "rollout_engine=sglang": "native, vllm",
  "vllm_engine_args={seed: 1}": "is for rollout_engine=vllm",
  "rollout_check_period=2": "is for rollout_engine=vllm",
  "lora.lora_alpha=0 lora.enable_lora=true lora.lora_rank=8 lora_fresh_base=true": "must be above 0",
  "rollout_seed=-1": "0",
  "reward_weights={}": "names no reward function",
  "reward_weights={correct: 1}": "correct is none of exact_answer,",
  "reward_weights={mine.txt:f: 1}": "mine.txt:f is not file.py:function",
  "reward_weights={exact_answer: much}": "much",
  "reward_worker_timeout_seconds=0": "must be above 0",
  "reward_num_workers=-2": "must be at least 0, or -1",
  "overlong_tokens=17": "must be at most 16",
  "use_grpo=false": "the GRPO trainer does GRPO; leave this key out",
  "use_dpo=true": "it asks for DPO, which the GRPO trainer does not do",
}


VLLM_CASES = {
  "vllm_engine_args={model: other}": "model is set by the engine itself",
  "vllm_engine_args={tensor_parallel_size: 2}": "tensor_parallel_size is set by the engine itself",
  "vllm_engine_args=fast": "vllm_engine_args: expected a mapping",
  "rollout_tensor_parallelism=2": "one replica on one device",
  "rollout_data_parallelism=4": "one replica on one device",
  "rollout_check_period=-1": "at least 0",
  "decode_sampling_temperature=0.001": "vLLM samples at 0.01 or more",
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
  monkeypatch.chdir(tmp_path)
  (tmp_path / "train.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
  (tmp_path / "c.yml").write_text(GOOD)
  return "c.yml"


def test_the_good_one_is_taken(config: str):
  assert load_config([config], trainer="grpo", environ={}).rl.num_generations == 8


@pytest.mark.parametrize("arguments", CASES)
def test_refused_in_one_line(config: str, arguments: str):
  keys = [arguments] if "{" in arguments else arguments.split()
  with pytest.raises(ConfigError) as refused:
    load_config([config, *keys], trainer="grpo", environ={})
  (line,) = refused.value.problems
  assert CASES[arguments] in line
  assert arguments.split("=")[0] in line


def test_grpo_keys_are_no_other_trainers(config: str):
  with pytest.raises(ConfigError, match="is a key of grpo training"):
    load_config([config, "reward_weights={exact_answer: 1}"], trainer="sft", environ={})


@pytest.mark.parametrize("there", [True, False])
def test_the_vllm_engine_is_refused_where_there_is_none(config: str, monkeypatch: pytest.MonkeyPatch, there: bool):
  find_spec = importlib.util.find_spec
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: there or None if name == "vllm" else find_spec(name))
  if there:
    assert load_config([config, "rollout_engine=vllm"], trainer="grpo", environ={}).rollout_engine == "vllm"
    return
  with pytest.raises(ConfigError) as refused:
    load_config([config, "rollout_engine=vllm"], trainer="grpo", environ={})
  (line,) = refused.value.problems
  assert line.startswith("command line: rollout_engine=vllm: vLLM is not installed; pip install")


@pytest.mark.parametrize("arguments", VLLM_CASES)
def test_what_the_vllm_engine_does_not_take(config: str, monkeypatch: pytest.MonkeyPatch, arguments: str):
  find_spec = importlib.util.find_spec
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == "vllm" else find_spec(name))
  keys = [arguments] if "{" in arguments else arguments.split()
  with pytest.raises(ConfigError) as refused:
    load_config([config, "rollout_engine=vllm", *keys], trainer="grpo", environ={})
  (line,) = refused.value.problems
  assert VLLM_CASES[arguments] in line
