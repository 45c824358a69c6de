"""GRPO with vLLM writing the completions: it trains, the check at its start bites, and an engine's end is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from maxtext_posttrain.errors import GenerationError
from maxtext_posttrain.report import read_metrics
from tests.support.grpo import arguments, train, write_run

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

CONFIG = """\
base_config: [quickstart/grpo.yml]
base_emb_dim: 32
base_mlp_dim: 32
base_num_query_heads: 2
base_num_kv_heads: 1
head_dim: 32
base_num_decoder_layers: 1
hf_train_files: {data}/sums.jsonl
hf_eval_files: {data}/sums_eval.jsonl
steps: 4
checkpoint_period: 2
eval_interval: 2
eval_per_device_batch_size: 8
eval_steps: 2
per_device_batch_size: 8
matmul_precision: highest
decode_sampling_temperature: 0.8
decode_sampling_top_k: 50
rl: {{use_rollout_logps: false, grpo_beta: 0.0}}
reward_weights: {{"{folder}/mine.py:even": 1.0, finished: 0.1}}
rollout_engine: vllm
rollout_check_period: 2
enable_tensorboard: false
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
  folder = tmp_path_factory.mktemp("vllm_grpo")
  return write_run(folder, CONFIG, folder=str(folder))


def test_it_trains_with_what_vllm_writes(folder: Path, monkeypatch: pytest.MonkeyPatch):
  from maxtext_posttrain.rollout.vllm_rollout import VllmRollout

  gaps: list[float] = []
  check = VllmRollout.check
  monkeypatch.setattr(VllmRollout, "check", lambda self: gaps.append(check(self)))
  train(arguments(folder, "run"))
  # Of five sets of weights every second is checked; what an evaluation was made with is not handed over again.
  assert len(gaps) == 3
  assert max(gaps) < 1e-3
  records = [record for record in read_metrics(folder / "run" / "metrics.jsonl") if record["kind"] == "train"]
  assert [record["step"] for record in records] == [1, 2, 3, 4]
  for record in records:
    assert record["engine_gap"] < 1e-3
    assert np.isfinite(record["loss"])
    assert record["weight_transfer_seconds"] > 0
  assert any(record["grad_norm"] > 0 for record in records)
  evaluations = [record for record in read_metrics(folder / "run" / "metrics.jsonl") if record["kind"] == "eval"]
  assert [record["step"] for record in evaluations] == [0, 2, 4]
  steps = sorted(path.name for path in (folder / "run" / "checkpoints" / "actor").iterdir())
  assert steps == ["2", "4"]


def test_an_adapter_reaches_vllm_folded_into_its_base(folder: Path):
  # The gap is to the live adapter's log-probabilities: what vLLM got without it would be far away after an update.
  adapter = (
    "lora.enable_lora=true",
    "lora_fresh_base=true",
    "lora.lora_rank=4",
    "lora.lora_alpha=64.0",
    "learning_rate=3.e-2",
  )
  train(arguments(folder, "adapter", "eval_interval=-1", "rollout_check_period=1", *adapter))
  records = [record for record in read_metrics(folder / "adapter" / "metrics.jsonl") if record["kind"] == "train"]
  assert [record["step"] for record in records] == [1, 2, 3, 4]
  assert max(record["engine_gap"] for record in records) < 1e-3
  assert any(record["grad_norm"] > 0 for record in records)


def test_an_engine_that_dies_ends_the_run_in_one_line_and_leaves_the_checkpoint(
  folder: Path, monkeypatch: pytest.MonkeyPatch
):
  from maxtext_posttrain.rollout.vllm_rollout import VllmRollout

  calls: list[int] = []
  complete = VllmRollout._complete

  def dying(self: VllmRollout, prompts: Any, options: Any) -> Any:
    calls.append(len(prompts))
    if len(calls) == 3:
      core = self._engine._llm.llm_engine.engine_core
      monkeypatch.setattr(core, "get_output", lambda: (_ for _ in ()).throw(RuntimeError("out of memory\ntrace")))
    return complete(self, prompts, options)

  monkeypatch.setattr(VllmRollout, "_complete", dying)
  with pytest.raises(GenerationError) as died:
    train(arguments(folder, "dies", "eval_interval=-1", "rollout_check_period=0"))
  message = str(died.value)
  assert "stopped amid a batch of 8 completions: RuntimeError: out of memory" in message
  assert "\n" not in message
  steps = sorted(path.name for path in (folder / "dies" / "checkpoints" / "actor").iterdir())
  assert steps == ["2"]


def test_weights_that_vllm_computes_otherwise_are_found_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch):
  from maxtext_posttrain.rollout.vllm_engine import VllmEngine

  load = VllmEngine.load

  def wrong(self: VllmEngine, weights: nnx.State) -> None:
    load(self, jax.tree.map(lambda leaf: leaf * 1.1 if leaf.ndim > 1 else leaf, weights))

  monkeypatch.setattr(VllmEngine, "load", wrong)
  with pytest.raises(GenerationError, match=r"from the trainer's, more than 0\.001"):
    train(arguments(folder, "wrong", "eval_interval=-1"))
