"""Preference optimisation for real, on a tiny model: numbers, references, exactness, and pre-training that goes on."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxtext_posttrain.config import load_config
from maxtext_posttrain.handback import pretraining_arguments
from maxtext_posttrain.report import read_metrics
from tests.support import runs
from tests.support.cli import run_cli

pytestmark = pytest.mark.slow

STEPS = 4
BASE = """\
base_config: [quickstart/dpo.yml]
base_emb_dim: 16
base_mlp_dim: 32
base_num_decoder_layers: 1
base_num_query_heads: 2
base_num_kv_heads: 1
head_dim: 8
per_device_batch_size: 2
gradient_accumulation_steps: 2
dropout_rate: 0.1
enable_dropout: true
steps: 4
checkpoint_period: 2
eval_interval: 2
eval_steps: 2
enable_tensorboard: false
log_every: 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
  folder = tmp_path_factory.mktemp("dpo")
  (folder / "dpo.yml").write_text(BASE, encoding="utf-8")
  return folder


def arguments(folder: Path, name: str, *extra: str) -> list[str]:
  return [str(folder / "dpo.yml"), f"base_output_directory={folder}", f"run_name={name}", *extra]


def trained(folder: Path, name: str, *extra: str) -> Path:
  """A finished run, in a process of its own."""
  process = runs.DpoProcess(arguments(folder, name, *extra), folder / f"{name}.log")
  assert process.wait() == 0, process.output()
  return folder / name


def records(run: Path, kind: str) -> list[dict[str, Any]]:
  return [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == kind]


@pytest.fixture(scope="module")
def frozen(folder: Path) -> Path:
  return trained(folder, "frozen")


@pytest.fixture(scope="module")
def precomputed(folder: Path) -> Path:
  return trained(folder, "precomputed", "dpo.reference=precomputed")


def test_a_policy_starts_as_its_reference(frozen: Path):
  """Loss ln 2 and no margin before the first update, with dropout in the model's configuration, packed, accumulated."""
  first = records(frozen, "train")[0]
  np.testing.assert_allclose(first["loss"], np.log(2), rtol=1e-6)
  for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
    assert abs(first[name]) < 1e-5
  assert 0.0 < first["logps/accuracies"] < 1.0
  assert first["logps/chosen"] < -20
  # Two micro-batches of two rows hold more pairs than rows.
  assert first["pairs"] > 4
  assert first["trained_tokens"] < first["tokens"]
  start = records(frozen, "eval")[0]
  np.testing.assert_allclose(start["loss"], np.log(2), rtol=1e-6)
  assert start["pairs"] == 8


def test_precomputed_log_probs_are_the_frozen_models(frozen: Path, precomputed: Path):
  for ours, theirs in zip(records(precomputed, "train"), records(frozen, "train"), strict=True):
    for name in ("loss", "grad_norm", "logps/chosen", "logps/rejected"):
      np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-5, err_msg=name)
    assert ours["pairs"] == theirs["pairs"]
    assert abs(ours["rewards/margins"] - theirs["rewards/margins"]) < 2e-5
  with np.load(precomputed / "reference_log_probs.npz") as archive:
    assert sorted(archive) == ["evaluation", "key", "train"]


@pytest.mark.parametrize("reference", ["adapter_off", "frozen", "precomputed"])
def test_an_adapter_is_compared_with_the_base_below_it(folder: Path, reference: str):
  """The base with the adapter off, a copy of it, or what it said before: the same numbers."""
  adapter = ["lora.enable_lora=true", "lora_fresh_base=true", "lora.lora_rank=2", "lora.lora_alpha=4"]
  run = trained(folder, f"lora-{reference}", *adapter, f"dpo.reference={reference}", "learning_rate=1e-1")
  train = records(run, "train")
  np.testing.assert_allclose(train[0]["loss"], np.log(2), rtol=1e-6)
  assert abs(train[-1]["rewards/margins"]) > 1e-3
  other = folder / "lora-adapter_off"
  if other.exists():
    for ours, theirs in zip(train, records(other, "train"), strict=True):
      for name in ("loss", "rewards/chosen", "rewards/rejected", "logps/chosen"):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("reference", ["frozen", "precomputed"])
def test_a_kill_in_the_middle_changes_no_bit(folder: Path, reference: str, request: pytest.FixtureRequest):
  expected: Path = request.getfixturevalue(reference)
  name = f"killed-{reference}"
  argv = arguments(folder, name, f"dpo.reference={reference}", "checkpoint_period=1")
  process = runs.DpoProcess(argv, folder / f"{name}.log")
  run = folder / name
  assert process.wait_for(run, 3), process.output()
  process.kill()
  process = runs.DpoProcess(argv, folder / f"{name}.last.log")
  assert process.wait() == 0, process.output()
  assert "dpo: step 0 " not in process.output()
  if reference == "precomputed":
    assert "log-probabilities read from" in process.output()
  last = f"checkpoints/{STEPS}"
  runs.assert_same_items(runs.items(run / last), runs.items(expected / last))
  assert runs.metrics(run) == runs.metrics(expected)


@pytest.mark.parametrize(
  ("name", "keys", "start"),
  [
    ("sigmoid", [], np.log(2)),
    ("orpo", ["dpo.algo=orpo"], None),
    ("ipo", ["dpo.loss_type=ipo", "packing=false", "per_device_batch_size=60"], (1 / 0.2) ** 2),
  ],
)
def test_every_loss_learns_its_pairs(folder: Path, name: str, keys: list[str], start: float | None):
  """All pairs in each update, so that its margin and its loss are those of the update before, improved."""
  every = ["gradient_accumulation_steps=1", "eval_interval=-1", "num_epoch=4"]
  if name != "ipo":
    every.append("per_device_batch_size=18")
  run = trained(folder, name, *every, "learning_rate=1e-2", "warmup_steps_fraction=0", "checkpoint_period=9", *keys)
  train = records(run, "train")
  assert {record["pairs"] for record in train} == {60}
  if start is not None:
    np.testing.assert_allclose(train[0]["loss"], start, rtol=1e-6)
  else:
    # Without a reference rewards are log-probabilities, which the untrained model has too.
    assert train[0]["rewards/chosen"] < -0.5
  for before, after in itertools.pairwise(train):
    assert after["loss"] < before["loss"]
    assert after["rewards/margins"] > before["rewards/margins"]
    assert after["rewards/margins"] == pytest.approx(after["rewards/chosen"] - after["rewards/rejected"], abs=1e-4)
  assert train[-1]["rewards/accuracies"] > 0.6


def test_pretraining_goes_on_from_dpo(folder: Path, frozen: Path, tmp_path: Path):
  """Real pre-training takes it all, its step, optimizer and layout, and makes the next steps."""
  overrides = load_config(arguments(folder, "frozen"), trainer="dpo").maxtext_overrides()
  argv = pretraining_arguments(
    overrides, way="load_full_state_path", run_name=frozen.name, step=STEPS, steps=STEPS + 2, new_run_name="goes-on"
  )
  (result,) = runs.pretraining([[*argv, "dataset_type=synthetic"]], tmp_path)
  assert result["error"] is None, result["log"][-3000:]
  assert sorted(result["losses"]) == [STEPS, STEPS + 1]
  assert all(np.isfinite(loss) for loss in result["losses"].values())


def test_pairs_are_counted_where_the_chosen_half_trains_them():
  """Two pairs, one whose answer is in two parts, and an empty row; what the rejected half holds does not matter."""
  from maxtext_posttrain.trainers.dpo import DPO

  chosen = [[0, 1, 0, 1, 0, 2], [0, 0, 0, 1, 1, 1], [0] * 6]
  segments = np.array([[row, [0, 1, 1, 1, 1, 1]] for row in chosen], np.int32)
  assert int(DPO().weight({"targets_segmentation": segments})) == 3
  assert int(DPO().weight({"targets_segmentation": segments[:, ::-1]})) == 3


def rows(folder: Path, *values: Any) -> str:
  path = folder / "bad.jsonl"
  path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
  return f"hf_train_files={path}"


GOOD = {"prompt": "Q", "chosen": "A", "rejected": "B"}
BAD_ROWS = [
  ([{"prompt": "Q", "chosen": "A"}], "no column 'rejected'"),
  ([{"question": "Q", "good": "A", "bad": "B"}], "its columns are question, good, bad"),
  ([GOOD, {**GOOD, "chosen": ""}], "1 empty completion"),
  ([GOOD, {**GOOD, "rejected": "A"}], "1 chosen and rejected are equal"),
  ([GOOD, {**GOOD, "prompt": ""}], "1 no prompt"),
  ([GOOD, {**GOOD, "chosen": 5}], "'chosen' is a number"),
  ([GOOD, "text"], "not an object"),
  ([GOOD, {**GOOD, "prompt": [{"role": "assistant", "content": "A"}]}], "refused by the chat template"),
]


@pytest.mark.parametrize(("bad", "says"), BAD_ROWS, ids=[says for _, says in BAD_ROWS])
def test_bad_data_is_one_line(
  folder: Path, tmp_path: Path, bad: list[Any], says: str, capfd: pytest.CaptureFixture[str]
):
  argv = arguments(folder, "bad", rows(tmp_path, *bad), "num_epoch=1", "eval_interval=-1")
  outcome = run_cli(["dpo", *argv], capfd)
  assert outcome.code == 1
  (error,) = outcome.errors
  assert says in error
  assert "bad.jsonl" in error
  assert not (folder / "bad").exists()


def test_a_resumed_run_refuses_another_reference(
  folder: Path, precomputed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
  run = tmp_path / "precomputed"
  shutil.copytree(precomputed, run)
  shutil.copytree(run / "checkpoints" / str(STEPS), tmp_path / "base" / "4")
  argv = arguments(folder, "precomputed", "dpo.reference=precomputed", f"steps={STEPS + 1}")
  argv = [f"base_output_directory={tmp_path}" if part.startswith("base_output_directory=") else part for part in argv]
  outcome = run_cli(["dpo", *argv, f"load_parameters_path={tmp_path}/base/4/items"], capfd)
  assert outcome.code == 1
  (error,) = outcome.errors
  assert "reference_log_probs.npz: its log-probabilities are of other data or of another reference" in error
  (run / "reference_log_probs.npz").write_bytes(b"PK\x03\x04broken")
  outcome = run_cli(["dpo", *argv], capfd)
  assert outcome.code == 1
  assert "can't be read" in outcome.errors[0]
