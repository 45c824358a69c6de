"""The Python API: the command line's configuration, without its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import maxtext_posttrain
from maxtext_posttrain import DPO, SFT, Config, load_config
from maxtext_posttrain.api import key_arguments
from maxtext_posttrain.errors import ConfigError

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
