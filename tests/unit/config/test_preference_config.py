"""Configurations of preference optimisation: what their keys come to, and the ones that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxtext_posttrain.config import Config, load_config
from maxtext_posttrain.config.preferences import loss_name, reference_kind
from maxtext_posttrain.errors import ConfigError

START = (
  "base_config: dpo.yml\nrun_name: r\nbase_output_directory: out\nsteps: 5\n"
  "tokenizer_path: maxtext://tokenizers/tokenizer.llama2\nhf_train_files: pairs.jsonl\n"
)


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "pairs.jsonl").write_text("{}\n")
  (tmp_path / "c.yml").write_text(START)

  def load(*arguments: str) -> Config:
    return load_config(["c.yml", *arguments], trainer="dpo", environ={})

  return load


def test_what_dpo_yml_says(load):
  config = load()
  assert (config.use_dpo, config.use_sft) == (True, False)
  assert (config.dpo.algo, config.dpo.loss_type, config.dpo.dpo_beta) == ("dpo", "sigmoid", 0.1)
  assert config.train_data_columns == ["prompt", "chosen", "rejected"]
  assert config.packing is True
  assert (loss_name(config), reference_kind(config)) == ("sigmoid", "frozen")


def test_maxtext_is_not_asked_for_a_dpo_that_packs_nothing(load):
  overrides = load().maxtext_overrides()
  assert "use_dpo" not in overrides
  assert overrides["packing"] is True
  assert set(overrides["dpo"]) == {"algo", "dpo_beta", "dpo_label_smoothing", "orpo_lambda", "max_prompt_length"}


@pytest.mark.parametrize(
  ("arguments", "loss", "reference"),
  [
    (["dpo.algo=orpo"], "orpo", None),
    (["dpo.loss_type=simpo"], "simpo", None),
    (["dpo.loss_type=hinge"], "hinge", "frozen"),
    (["dpo={loss_type: ipo, reference: precomputed}"], "ipo", "precomputed"),
  ],
)
def test_losses_and_references(load, arguments, loss, reference):
  config = load(*arguments)
  assert (loss_name(config), reference_kind(config)) == (loss, reference)


REFUSED = [
  ("dpo.dpo_beta=0", "dpo.dpo_beta=0.0: must be above 0"),
  ("dpo.dpo_beta=-1", "dpo.dpo_beta=-1.0: must be above 0"),
  ("dpo.orpo_lambda=-0.1", "dpo.orpo_lambda=-0.1: must be at least 0"),
  ("dpo.dpo_label_smoothing=0.5", "must be below 0.5"),
  ("dpo.dpo_label_smoothing=1.5", "dpo.dpo_label_smoothing: "),
  ("dpo.dpo_label_smoothing=0.1 dpo.loss_type=ipo", "dpo.loss_type=ipo takes no label smoothing"),
  ("dpo.dpo_label_smoothing=0.1 dpo.loss_type=hinge", "dpo.loss_type=hinge takes no label smoothing"),
  ("dpo.loss_type=sigmiod", "dpo.loss_type: expected one of sigmoid, sigmoid_norm, hinge, ipo, simpo"),
  ("dpo.algo=ppo", "dpo.algo: expected one of dpo, orpo"),
  ("dpo.algo=orpo dpo.loss_type=ipo", "ORPO has a loss of its own"),
  ("dpo.simpo_gamma=1", "only dpo.loss_type=simpo has a target margin"),
  ("dpo.simpo_gamma=-1 dpo.loss_type=simpo", "dpo.simpo_gamma: "),
  ("dpo.reference=live", "dpo.reference: expected "),
  ("dpo.reference=frozen dpo.loss_type=simpo", "dpo.loss_type=simpo compares with no reference"),
  ("dpo.reference=adapter_off", "there is no adapter to turn off"),
  ("dpo.max_prompt_length=0", "dpo.max_prompt_length: "),
  (
    "dpo.max_prompt_length=64 max_target_length=64",
    "leaves no room for a completion; must be below max_target_length=64",
  ),
  ("dpo.bta=0.1", "unknown key dpo.bta"),
  ("dpo_beta=0.2", "unknown key dpo_beta; did you mean dpo.dpo_beta?"),
  ("dataset_type=synthetic", "preference pairs can't be made up"),
  ("sft_train_on_completion_only=false", "a prompt's tokens never count"),
  ("train_data_columns=[chosen]", "must name three different columns"),
  ("train_data_columns=[prompt,chosen,chosen]", "must name three different columns"),
  ("train_data_columns=[a,b,c,d]", "must name three different columns"),
  ("use_sft=true", "it asks for SFT, which the DPO trainer does not do"),
  ("use_dpo=false", "the DPO trainer does DPO; leave this key out"),
  ("use_grpo=true", "it asks for GRPO"),
  ("hf_train_files=none.jsonl", "no such file"),
  ("eval_interval=2", "there are no evaluation data"),
]


@pytest.mark.parametrize(("arguments", "says"), REFUSED, ids=[arguments for arguments, _ in REFUSED])
def test_refused_with_one_line(load, arguments, says):
  with pytest.raises(ConfigError) as error:
    load(*arguments.split())
  assert error.value.exit_code == 2
  (problem,) = error.value.problems
  assert problem.startswith("command line: ")
  assert says in problem


def test_other_trainers_have_no_such_keys(load):
  with pytest.raises(ConfigError, match=r"dpo\.loss_type is a key of dpo training; sft has no such key"):
    load_config(["sft.yml", "dpo.loss_type=ipo", "run_name=r"], trainer="sft", environ={})
