"""The Python API: the command line's configuration, without its process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import maxtext_posttrain
from maxtext_posttrain import DPO, SFT, Config, inspect_checkpoint, load_config
from maxtext_posttrain.api import key_arguments
from maxtext_posttrain.errors import CheckpointError, ConfigError, ReportError
from maxtext_posttrain.handback import base_config, pretraining_command
from maxtext_posttrain.report.run_folder import RunFolder, run_directory
from maxtext_posttrain.trainers.signals import StopRequest
from tests.support import broken
from tests.support.report_runs import make_run

YAML = "run_name: r\nbase_output_directory: out\nsteps: 5\ndataset_type: synthetic\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
  path = tmp_path / "run.yml"
  path.write_text(YAML, encoding="utf-8")
  return path


def test_keys_lie_over_the_file_as_on_the_command_line(file: Path):
  config = SFT(
    file,
    steps=7,
    learning_rate=1e-5,
    packing=False,
    num_epoch=None,
    train_data_columns=["question", "answer"],
    lora={"enable_lora": True, "lora_rank": 4, "lora_alpha": 8.0},
    lora_fresh_base=True,
    **{"dpo.dpo_beta": 0.25},
  ).config
  typed = load_config(
    [
      str(file),
      "steps=7",
      "learning_rate=1e-5",
      "packing=false",
      "num_epoch=null",
      "train_data_columns=[question,answer]",
      "lora.enable_lora=true",
      "lora.lora_rank=4",
      "lora.lora_alpha=8",
      "lora_fresh_base=true",
      "dpo.dpo_beta=0.25",
    ]
  )
  assert config.as_dict() == typed.as_dict()
  assert (config.steps, config.learning_rate, config.lora.lora_rank) == (7, 1e-5, 4)


def test_text_stays_text_and_paths_are_spelled():
  assert key_arguments({"run_name": "007", "hf_train_files": Path("a b.jsonl"), "enable_wandb": True}) == [
    "run_name=007",
    "hf_train_files=a b.jsonl",
    "enable_wandb=true",
  ]


def test_paths_inside_a_group_are_spelled_too_and_nothing_else_is():
  assert key_arguments({"teacher_overrides": {"load_parameters_path": Path("a b/items")}}) == [
    'teacher_overrides={"load_parameters_path": "a b/items"}'
  ]
  with pytest.raises(TypeError, match="a key can't hold set"):
    key_arguments({"lora": {"lora_rank": {4}}})


def test_a_loaded_configuration_is_taken_as_it_is(file: Path):
  config = load_config([str(file)])
  assert isinstance(config, Config)
  assert SFT(config).config is config
  with pytest.raises(ConfigError, match="SFT: a loaded configuration is complete, and keys"):
    SFT(config, steps=3)
  with pytest.raises(ConfigError, match="DPO: a loaded configuration is complete, and a configuration of sft"):
    DPO(config)


def test_what_is_wrong_is_said_as_on_the_command_line(file: Path):
  with pytest.raises(ConfigError) as refused:
    SFT(file, stepz=3, learning_rate="fast")
  assert len(refused.value.problems) == 2


def test_the_package_offers_what_it_names_and_imports_nothing_for_it():
  for name in maxtext_posttrain.__all__:
    assert getattr(maxtext_posttrain, name).__name__ == name
  with pytest.raises(AttributeError, match="no attribute 'PPO'"):
    maxtext_posttrain.PPO  # noqa: B018
  code = (
    "import sys, maxtext_posttrain; from maxtext_posttrain import SFT;"
    " print(sorted({'jax', 'maxtext', 'flax', 'numpy'} & set(sys.modules)))"
  )
  assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_run_names_its_newest_checkpoint_for_the_next_one(tmp_path: Path):
  run = RunFolder.read(make_run(tmp_path / "r", checkpoints={2: 10, 10: 10}))
  assert run.newest.step == 10
  assert run.newest.items == tmp_path / "r" / "checkpoints" / "10" / "items"
  assert run.newest.items.is_dir()
  assert repr(run) == f"RunFolder({str(tmp_path / 'r')!r}: step 4, checkpoints 2, 10)"
  with pytest.raises(ReportError, match="holds no checkpoint"):
    _ = RunFolder.read(make_run(tmp_path / "none")).newest


def test_metrics_of_a_run_in_a_bucket_lie_here():
  assert run_directory("gs://bucket/runs", "r") == Path("runs/r")
  assert run_directory("out", "r") == Path("out/r")


def test_inspecting_says_what_the_command_says_and_leaves_the_platform_alone(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  broken.write_step(tmp_path / "r" / "checkpoints" / "5", broken.adamw_items(5), {"scan_layers": True})
  monkeypatch.delenv("JAX_PLATFORMS")
  said = inspect_checkpoint(tmp_path / "r").splitlines()
  assert said[0] == str(tmp_path / "r" / "checkpoints" / "5")
  assert "  step         5 (folder 5)" in said
  assert "JAX_PLATFORMS" not in os.environ
  assert len(inspect_checkpoint(tmp_path / "r", leaves=True).splitlines()) > len(said)
  with pytest.raises(CheckpointError, match="no such path"):
    inspect_checkpoint(tmp_path / "absent")


def test_pretraining_goes_on_with_the_runs_model_tokenizer_and_the_given_data(tmp_path: Path):
  config = SFT(
    "quickstart/sft.yml", run_name="r", base_output_directory=tmp_path, gradient_clipping_threshold=0.5
  ).config
  command = pretraining_command(
    config,
    step=40,
    steps=45,
    data={"dataset_type": "grain", "learning_rate": 1e-4, "grain_train_files": tmp_path / "t"},
  )
  assert command[:4] == [sys.executable, "-m", "maxtext.trainers.pre_train.train", str(base_config())]
  keys = dict(argument.split("=", 1) for argument in command[4:])
  assert len(keys) == len(command) - 4
  assert (keys["run_name"], keys["steps"], keys["base_output_directory"]) == ("r", "45", str(tmp_path))
  assert (keys["dataset_type"], keys["learning_rate"], keys["grain_train_files"]) == (
    "grain",
    "0.0001",
    f"{tmp_path}/t",
  )
  assert (keys["tokenizer_type"], keys["base_emb_dim"]) == ("sentencepiece", "64")
  assert Path(keys["tokenizer_path"]).is_file()
  assert not {"hf_train_files", "chat_template", "use_sft", "log_every"} & set(keys)


def test_pretraining_starts_elsewhere_from_a_path(tmp_path: Path):
  config = SFT("quickstart/sft.yml", run_name="r", base_output_directory=tmp_path).config
  keys = dict(
    argument.split("=", 1)
    for argument in pretraining_command(
      config, step=40, steps=45, way="load_full_state_path", new_run_name="p", data={"dataset_type": "synthetic"}
    )[4:]
  )
  assert keys["run_name"] == "p"
  assert keys["load_full_state_path"] == f"{tmp_path}/r/checkpoints/40/items"


def test_a_run_in_another_thread_leaves_signals_to_the_main_one():
  seen = []

  def listen():
    with StopRequest().listening() as stop:
      seen.append(stop())

  thread = threading.Thread(target=listen)
  thread.start()
  thread.join()
  assert seen == [False]
