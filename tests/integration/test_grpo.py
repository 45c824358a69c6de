"""GRPO with a real model: exactness, the engine against the trainer, hand-back, and what goes wrong around it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxtext_posttrain.config import load_config
from maxtext_posttrain.data.prompts import prompt_tokenizer
from maxtext_posttrain.errors import GenerationError, PostTrainError
from maxtext_posttrain.report import read_metrics
from maxtext_posttrain.rollout.text import chat_stops
from maxtext_posttrain.rollout.tunix_rollout import NativeRollout
from tests.support import runs
from tests.support.grpo import arguments, train, write_run

pytestmark = pytest.mark.slow

CONFIG = """\
base_config: [quickstart/grpo.yml]
base_emb_dim: 16
base_mlp_dim: 32
base_num_decoder_layers: 1
hf_train_files: {data}/sums.jsonl
hf_eval_files: {data}/sums_eval.jsonl
steps: 8
checkpoint_period: 3
max_num_checkpoints_to_keep: 9
eval_interval: 4
eval_per_device_batch_size: 8
per_device_batch_size: 4
gradient_accumulation_steps: 2
batch_size: 4
matmul_precision: highest
decode_sampling_temperature: 0.8
reward_weights: {{{rewards}: 1.0, finished: 0.1}}
enable_tensorboard: false
"""
# Sixteen sequences a rollout are two updates of two micro-batches of four, made twice: a rollout is four updates.
KEYS = ("rl.num_iterations=2", "rl.use_rollout_logps=false", "rl.grpo_beta=0.05", "rl.importance_sampling_cap=2.0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
  folder = tmp_path_factory.mktemp("grpo")
  return write_run(folder, CONFIG, rewards=f'"{folder}/mine.py:even"')


def metrics(run: Path) -> list[dict[str, Any]]:
  clocked = ("_seconds", "_per_second", "_per_device", "mfu")
  return [
    {key: value for key, value in record.items() if not key.endswith(clocked)}
    for record in read_metrics(run / "metrics.jsonl")
  ]


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Path:
  train(arguments(folder, "uninterrupted", *KEYS))
  return folder / "uninterrupted"


def test_the_actor_is_where_reinforcement_learning_keeps_it(uninterrupted: Path):
  assert sorted(path.name for path in (uninterrupted / "checkpoints").iterdir()) == ["actor"]
  steps = sorted(int(path.name) for path in (uninterrupted / "checkpoints" / "actor").iterdir())
  assert steps == [3, 6, 8]
  names = {path[0] for path in runs.items(uninterrupted / "checkpoints" / "actor" / "8")}
  assert names == {"params", "opt_state", "step", "nnx_aux"}


@pytest.mark.parametrize("step", [3, 6])
def test_resumed_inside_a_rollout_it_comes_to_the_same_bits(folder: Path, uninterrupted: Path, step: int):
  run = folder / f"resumed-{step}"
  run.mkdir()
  for name in ("metrics.jsonl", "samples.jsonl", "run.json"):
    shutil.copy(uninterrupted / name, run / name)
  shutil.copytree(uninterrupted / "checkpoints" / "actor" / str(step), run / "checkpoints" / "actor" / str(step))
  train(arguments(folder, run.name, *KEYS))
  runs.assert_same_items(
    runs.items(run / "checkpoints" / "actor" / "8"), runs.items(uninterrupted / "checkpoints" / "actor" / "8")
  )
  assert metrics(run) == metrics(uninterrupted)
  assert (run / "samples.jsonl").read_text() == (uninterrupted / "samples.jsonl").read_text()


def test_killed_in_the_middle_of_a_rollouts_updates_it_comes_to_the_same_bits(folder: Path, uninterrupted: Path):
  """A SIGKILL after update 7 of the second rollout's 5 to 8; the checkpoint before lies inside that rollout too."""
  run = folder / "killed"
  argv = arguments(folder, run.name, *KEYS)
  process = runs.GrpoProcess(argv, folder / "killed.log")
  assert process.wait_for(run, 7), process.output()
  process.kill()
  actor = run / "checkpoints" / "actor"
  assert sorted(path.name for path in actor.iterdir() if path.name.isdigit())[:2] == ["3", "6"]
  shutil.rmtree(actor / "8", ignore_errors=True)
  resumed = runs.GrpoProcess(argv, folder / "killed.last.log")
  assert resumed.wait() == 0, resumed.output()
  assert "step 6 of 8, ready" in resumed.output()
  runs.assert_same_items(runs.items(actor / "8"), runs.items(uninterrupted / "checkpoints" / "actor" / "8"))
  assert metrics(run) == metrics(uninterrupted)
  assert (run / "samples.jsonl").read_text() == (uninterrupted / "samples.jsonl").read_text()


def test_an_engine_that_dies_ends_the_run_and_loses_nothing(
  folder: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
):
  """It answers evaluations, of 8 prompts a call, and the first rollout, of 16 completions, and dies in the second."""
  rollouts: list[int] = []
  generate = NativeRollout.generate

  def dying(self: NativeRollout, prompts: Any, rollout_config: Any, **kwargs: Any) -> Any:
    if len(prompts) == 16:
      rollouts.append(len(rollouts))
      if len(rollouts) == 2:
        raise GenerationError("the engine died")
    return generate(self, prompts, rollout_config, **kwargs)

  argv = arguments(folder, "died", *KEYS)
  with monkeypatch.context() as patch:
    patch.setattr(NativeRollout, "generate", dying)
    with pytest.raises(PostTrainError, match="the engine died"):
      train(argv)
  actor = folder / "died" / "checkpoints" / "actor"
  assert [path.name for path in actor.iterdir()] == ["3"]
  train(argv)
  runs.assert_same_items(runs.items(actor / "8"), runs.items(uninterrupted / "checkpoints" / "actor" / "8"))


LORA = ("lora.enable_lora=true", "lora.lora_rank=4", "lora.lora_alpha=8", "lora_fresh_base=true", "learning_rate=1e-2")


@pytest.fixture(scope="module")
def adapter(folder: Path) -> Any:
  """A run with an adapter, still in memory."""
  return train(arguments(folder, "adapter", *KEYS, *LORA))


def test_an_adapter_is_sampled_from_and_its_base_is_the_reference(folder: Path, adapter: Any):
  # No second copy of the weights is held.
  assert adapter.frozen.abstract == {}
  records = [record for record in read_metrics(folder / "adapter" / "metrics.jsonl") if record["kind"] == "train"]
  assert len(records) == 8
  assert max(record["engine_gap"] for record in records) < 1e-4
  # The engine writes with the adapter: else the ratio of the second rollout's first update would not be 1.
  assert [record["ratio"] for record in records[::4]] == pytest.approx([1.0, 1.0], abs=1e-5)
  assert records[0]["kl"] == pytest.approx(0.0, abs=1e-8)
  assert records[4]["kl"] > 1e-5
  assert records[4]["importance_weight"] == pytest.approx(1.0, abs=1e-3)


def test_the_adapter_alone_is_saved_and_a_run_goes_on_with_it(folder: Path, adapter: Any):
  steps = folder / "adapter" / "checkpoints" / "actor"
  saved = runs.items(steps / "8")
  assert {path[-1] for path in saved if path[0] == "params"} == {"kernel_lora_a", "kernel_lora_b"}
  run = folder / "adapter-resumed"
  run.mkdir()
  for name in ("metrics.jsonl", "samples.jsonl", "run.json"):
    shutil.copy(folder / "adapter" / name, run / name)
  shutil.copytree(steps / "6", run / "checkpoints" / "actor" / "6")
  train(arguments(folder, run.name, *KEYS, *LORA))
  runs.assert_same_items(runs.items(run / "checkpoints" / "actor" / "8"), saved)
  assert metrics(run) == metrics(folder / "adapter")


def test_the_metrics_say_what_happened(uninterrupted: Path):
  train_records = [record for record in read_metrics(uninterrupted / "metrics.jsonl") if record["kind"] == "train"]
  assert [record["step"] for record in train_records] == list(range(1, 9))
  for record in train_records:
    # Engine and trainer, float32, at the temperature that was sampled at.
    assert record["engine_gap"] < 1e-4
    assert record["importance_weight"] == pytest.approx(1.0, abs=1e-3)
    assert np.isfinite(record["loss"])
    assert record["loss_weight"] == 8
    assert record["reward_failures"] == 0
    assert {"kl", "entropy", "clipped_low", "clipped_high", "reward/even", "reward/finished", "reward_std"} <= set(
      record
    )
  # Each rollout's first update compares the policy with itself.
  assert [record["ratio"] for record in train_records[::4]] == pytest.approx([1.0, 1.0], abs=1e-5)
  assert train_records[0]["kl"] == pytest.approx(0.0, abs=1e-8)
  assert train_records[7]["kl"] > 0
  assert ["rollout_seconds" in record for record in train_records] == [True, False, False, False] * 2
  evaluations = [record for record in read_metrics(uninterrupted / "metrics.jsonl") if record["kind"] == "eval"]
  assert [(record["step"], record["prompts"]) for record in evaluations] == [(0, 200), (4, 200), (8, 200)]


def test_samples_carry_their_rewards(uninterrupted: Path):
  samples = [json.loads(line) for line in (uninterrupted / "samples.jsonl").read_text().splitlines()]
  assert [sample["step"] for sample in samples] == [1, 1, 5, 5]
  for sample in samples:
    assert sample["reward"] == pytest.approx(
      sum(value * (0.1 if name == "finished" else 1.0) for name, value in sample["rewards"].items())
    )


def test_pretraining_goes_on_from_the_actor(folder: Path, uninterrupted: Path, tmp_path: Path):
  overrides = load_config(arguments(folder, "uninterrupted", *KEYS), trainer="grpo").maxtext_overrides()
  from maxtext_posttrain.handback import pretraining_arguments

  items = f"{uninterrupted}/checkpoints/actor/8/items"
  jobs = []
  for way in ("load_full_state_path", "load_parameters_path"):
    argv = pretraining_arguments(
      overrides, way=way, run_name="uninterrupted", step=8, steps=10 if way == "load_full_state_path" else 2,
      new_run_name=f"pretraining-{way}",
    )  # fmt: skip
    argv = [argument for argument in argv if not argument.startswith(f"{way}=")]
    jobs.append([*argv, f"{way}={items}", "dataset_type=synthetic"])
  full, weights = runs.pretraining(jobs, tmp_path)
  assert (full["error"], weights["error"]) == (None, None), full["log"][-3000:]
  assert min(full["losses"]) == 8
  assert min(weights["losses"]) == 0


def test_one_update_a_rollout_with_the_engines_log_probabilities(folder: Path):
  session = train(
    arguments(folder, "engine", "batch_size=null", "steps=3", "rl.num_generations=4", "eval_interval=-1",
              "rl.grpo_beta=0", "rl.loss_algo=gspo-token", "rl.loss_agg_mode=token-mean",
              "rl.mask_truncated_completions=true", "rl.advantage_scale=mean")
  )  # fmt: skip
  # Without a penalty no reference is held.
  assert session.frozen.abstract == {}
  for record in read_metrics(folder / "engine" / "metrics.jsonl"):
    assert "kl" not in record
    assert record["engine_gap"] < 1e-4
    assert record["masked_completions"] == record["truncated_completions"] * 8


MISBEHAVE = {
  "raises": ("raise ValueError('bad')", "ValueError: bad"),
  "hangs": ("import time; time.sleep(1000)", "it took longer than 1 s"),
  "is-nan": ("return [float('nan')] * len(prompts)", "it returned nan, not a finite number"),
  "is-infinite": ("return [float('inf')] * len(prompts)", "it returned inf, not a finite number"),
  "short": ("return [1.0] * (len(prompts) - 1)", "it returned 3 numbers for 4 completions"),
  "long": ("return [1.0] * (len(prompts) + 1)", "it returned 5 numbers for 4 completions"),
  "text": ("return 'good'", "it returned str, not a list of numbers"),
  "ends": ("import os; os._exit(3)", "its process ended (exit code 3)"),
}


def test_rewards_that_misbehave_in_every_way_cost_their_scores_alone(folder: Path, capsys: pytest.CaptureFixture[str]):
  """Beside them a sound one still teaches, and the checkpoint is there. The chat's ends of turn are ordinary text."""
  source = "".join(
    f"def {name.replace('-', '_')}(prompts, completions, answers):\n  {body}\n\n\n"
    for name, (body, _) in MISBEHAVE.items()
  )
  (folder / "misbehave.py").write_text(source)
  weights = {f"{folder}/mine.py:even": 1.0}
  weights |= {f"{folder}/misbehave.py:{name.replace('-', '_')}": 0.5 for name in MISBEHAVE}
  session = train(
    arguments(folder, "misbehave", "batch_size=null", "steps=1", "eval_interval=-1", "rl.num_generations=4",
              f"reward_weights={json.dumps(weights)}", "reward_worker_timeout_seconds=1", "reward_failure_score=-1",
              "chat_template=chatml", "max_prefill_predict_length=64", "max_target_length=72")
  )  # fmt: skip
  (record,) = [each for each in read_metrics(folder / "misbehave" / "metrics.jsonl") if each["kind"] == "train"]
  # Two prompts: two calls of each function.
  assert record["reward_failures"] == 2 * len(MISBEHAVE)
  assert record["reward"] == pytest.approx(record["reward/even"] - 0.5 * len(MISBEHAVE))
  assert record["zero_spread_groups"] < 1
  assert record["grad_norm"] > 0
  told = capsys.readouterr().out
  for name, (_, says) in MISBEHAVE.items():
    line = f"reward {folder}/misbehave.py:{name.replace('-', '_')} failed in 2 of 2 calls, first: "
    assert [text for text in told.splitlines() if line in text and says in text], name
  assert (folder / "misbehave" / "checkpoints" / "actor" / "1" / "items").is_dir()
  # As `posttrain generate` and `eval` end answers: at eos, and at what the template writes after a turn.
  tokenizer = prompt_tokenizer(session.config)
  _, sequences = chat_stops(tokenizer)
  players = session.objective._players
  assert sequences
  assert set(players._ends) == {(tokenizer.eos_id,), *sequences}
  assert players.engine._sampling(players._sampling).stop_sequences == sequences


def test_a_reward_that_fails_now_and_then_ends_nothing(folder: Path):
  (folder / "bad.py").write_text(
    "import os\nCALLS = []\n"
    "def bad(prompts, completions, answers):\n"
    "  CALLS.append(1)\n"
    "  if len(CALLS) % 3 == 0: os._exit(1)\n"
    "  if len(CALLS) % 3 == 1: raise ValueError('bad')\n"
    "  return [float('nan')] * len(prompts)\n"
  )
  train(
    arguments(folder, "bad", "batch_size=null", "steps=2", "eval_interval=-1", "rl.grpo_beta=0",
              f'reward_weights={{"{folder}/bad.py:bad": 1.0}}', "reward_failure_score=-2.0")
  )  # fmt: skip
  for record in read_metrics(folder / "bad" / "metrics.jsonl"):
    assert (record["reward"], record["reward_failures"], record["zero_spread_groups"]) == (-2.0, 2, 1.0)
    # Nothing to learn from, and nothing that is not finite.
    assert record["grad_norm"] == 0.0
  assert (folder / "bad" / "checkpoints" / "actor" / "2" / "items").is_dir()


@pytest.mark.parametrize(
  ("extra", "says"),
  [
    (("per_device_batch_size=3", "batch_size=null"), "are not whole groups"),
    (("batch_size=3",), "is no multiple of the 8 sequences"),
    (("reward_weights={gone.py:f: 1}",), "gone.py: no such file"),
    (("max_prefill_predict_length=4",), "prompt too long"),
    (("train_data_columns=[question,solution]",), "has no column 'solution'"),
    (("rl.force_on_policy_ratio=true", "rl.num_iterations=1"), "is for one update a rollout, and batch_size=4 makes 2"),
    (("load_parameters_path=gone/items",), "gone/items"),
    (("tokenizer_path=gone.model",), "gone.model"),
    (("hf_train_files=gone.jsonl",), "gone.jsonl"),
    (("lora.enable_lora=true", "lora.lora_rank=4", "lora.lora_alpha=8"), "load_parameters_path is missing"),
  ],
)
def test_what_cannot_be_is_said_in_one_line(folder: Path, extra: tuple[str, ...], says: str):
  name = f"refused-{abs(hash(extra))}"
  with pytest.raises(PostTrainError) as refused:
    train(arguments(folder, name, *extra))
  assert says in str(refused.value)
  assert "\n" not in str(refused.value)
  assert not (folder / name / "checkpoints" / "actor" / "8").exists()
