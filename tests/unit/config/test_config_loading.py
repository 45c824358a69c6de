"""What a good configuration comes to: values, where they came from, what MaxText is told."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from maxtext_posttrain.config import OUR_KEYS, Config, Group, describe_config, load_config, load_model_config
from maxtext_posttrain.config.saved import save_config
from maxtext_posttrain.config.schema import Schema
from maxtext_posttrain.errors import ConfigError

GOOD = "run_name: r\nbase_output_directory: out\nsteps: 5\ndataset_type: synthetic\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  monkeypatch.chdir(tmp_path)
  return tmp_path


@pytest.fixture
def load(folder: Path):
  def load_text(yaml: str = "", *args: str, environ: dict[str, str] | None = None) -> Config:
    (folder / "c.yml").write_text(GOOD + yaml)
    return load_config(["c.yml", *args], environ=environ or {})

  return load_text


# What a key's text on the command line comes to.
ARGUMENTS: list[tuple[str, str, Any]] = [
  ("log_period=7", "log_period", 7),
  ("log_period=1_000", "log_period", 1000),
  ("log_period=1e3", "log_period", 1000),
  ("log_period=0x10", "log_period", 16),
  (" log_period = 7 ", "log_period", 7),
  ("learning_rate=2e-5", "learning_rate", 2e-5),
  ("learning_rate=2.e-5", "learning_rate", 2e-5),
  ("learning_rate=.5", "learning_rate", 0.5),
  ("learning_rate=1", "learning_rate", 1.0),
  ("per_device_batch_size=4", "per_device_batch_size", 4),
  ("per_device_batch_size=0.5", "per_device_batch_size", 0.5),
  ("packing=no", "packing", False),
  ("packing=True", "packing", True),
  ("packing=1", "packing", True),
  ("run_name=007", "run_name", "007"),
  ("run_name=true", "run_name", "true"),
  ("run_name=2024-01-02", "run_name", "2024-01-02"),
  ("run_name=a=b=c", "run_name", "a=b=c"),
  ("run_name='quoted name'", "run_name", "quoted name"),
  ("run_name=naïve-日本", "run_name", "naïve-日本"),
  ("prompt=[INST] hi [/INST]", "prompt", "[INST] hi [/INST]"),
  ("chat_template={% for m in messages %}{{ m.content }}${x}{% endfor %}", "chat_template", None),
  ("train_data_columns=messages", "train_data_columns", ["messages"]),
  ("train_data_columns=[question,answer]", "train_data_columns", ["question", "answer"]),
  ("train_data_columns=['question', 'answer']", "train_data_columns", ["question", "answer"]),
  ("train_data_columns=('question', 'answer')", "train_data_columns", ["question", "answer"]),
  ("train_image_column=[a, b]", "train_image_column", ["a", "b"]),
  ("compress_ratios=[0, 4]", "compress_ratios", [0, 4]),
  ("adamw_mask=", "adamw_mask", []),
  ("max_num_checkpoints_to_keep=None", "max_num_checkpoints_to_keep", None),
  ("max_num_checkpoints_to_keep=null", "max_num_checkpoints_to_keep", None),
  ("hf_name=none", "hf_name", None),
  ("hf_name=null.csv", "hf_name", "null.csv"),
  ("max_bad_rows=3", "max_bad_rows", 3),
  ("max_bad_rows=0.05", "max_bad_rows", 0.05),
  ("lora.lora_rank=8", "lora.lora_rank", 8),
  ("lora={lora_rank: 8}", "lora.lora_rank", 8),
  ("dpo.algo=orpo", "dpo.algo", "orpo"),
  ("formatting_func_kwargs.a.b=3", "formatting_func_kwargs", {"a": {"b": 3}}),
  ("formatting_func_kwargs={a: [1, x]}", "formatting_func_kwargs", {"a": [1, "x"]}),
  ("data_sharding=[[data, fsdp]]", "data_sharding", [["data", "fsdp"]]),
]


@pytest.mark.parametrize(("argument", "key", "value"), ARGUMENTS, ids=[argument for argument, _, _ in ARGUMENTS])
def test_argument(argument: str, key: str, value: Any, load):
  config = load("", argument)
  value = argument.partition("=")[2] if value is None and key == "chat_template" else value
  assert config[key] == value
  assert type(config[key]) is type(value)
  assert config.sources[key] == "command line"


@pytest.mark.parametrize(
  ("text", "value"),
  [("2.e-5", 2e-5), ("1e-5", 1e-5), ("1E5", 1e5), ("+.5", 0.5), ("1_0.5", 10.5), ("'3e-4'", 3e-4), ("1", 1.0)],
)
def test_floats_in_yaml_as_maxtext_reads_them(text: str, value: float, load):
  config = load(f"learning_rate: {text}\n")
  assert config.learning_rate == value
  assert type(config.learning_rate) is float


def test_words_for_null_and_lists_in_yaml(load):
  config = load("max_num_checkpoints_to_keep: None\nhf_name: null\ntrain_data_columns: messages\nmu_dtype: ''\n")
  assert config.max_num_checkpoints_to_keep is None
  assert config.hf_name is None
  assert config.train_data_columns == ["messages"]
  assert config.mu_dtype == ""


def test_same_value_twice_is_no_conflict(load):
  assert load("", "steps=6", "steps=6").steps == 6


def test_two_keys_of_a_free_mapping(load):
  config = load(
    "formatting_func_kwargs: {a: 1, b: {c: 2}}\n", "formatting_func_kwargs.b.d=3", "formatting_func_kwargs.e=4"
  )
  assert config.formatting_func_kwargs == {"a": 1, "b": {"c": 2, "d": 3}, "e": 4}


def test_defaults_are_maxtexts_and_ours(load):
  config = load()
  assert (config.learning_rate, config.adam_b2, config.checkpoint_period) == (3e-5, 0.95, 10_000)
  assert config.max_num_checkpoints_to_keep is None
  assert config.lora.lora_rank == 0
  assert config.eval_interval == -1
  ours = {name: key for name, key in OUR_KEYS.items() if key.trainer in (None, "sft")}
  assert {name: config[name] for name in ours} == {name: key.default for name, key in ours.items()}
  assert config.num_epoch is None
  assert config.sources["learning_rate"] == "MaxText base.yml"
  assert config.sources["lora.lora_rank"] == "MaxText default"
  assert config.sources["log_every"] == "maxtext-posttrain default"


# base_config.


def test_chain_of_files_and_their_sources(folder: Path):
  (folder / "sub").mkdir()
  (folder / "top.yml").write_text(GOOD + "packing: false\nlearning_rate: 1e-3\nlora: {lora_rank: 4, lora_alpha: 2}\n")
  (folder / "sub/mid.yml").write_text("base_config: ../top.yml\nlearning_rate: 2e-3\n")
  (folder / "c.yml").write_text("base_config: sub/mid.yml\nlora:\n  lora_rank: 8\n")
  config = load_config(["c.yml", "steps=9"], environ={})
  assert (config.packing, config.learning_rate, config.steps) == (False, 2e-3, 9)
  assert (config.lora.lora_rank, config.lora.lora_alpha) == (8, 2.0)
  wanted = {
    "packing": "top.yml",
    "learning_rate": "sub/mid.yml",
    "lora.lora_rank": "c.yml",
    "lora.lora_alpha": "top.yml",
    "steps": "command line",
    "use_sft": "the sft trainer",
  }
  assert {name: config.sources[name] for name in wanted} == wanted
  assert config.path == Path("c.yml")


def test_several_bases_are_laid_over_each_other_once_each(folder: Path):
  (folder / "root.yml").write_text(GOOD + "log_period: 1\n")
  (folder / "a.yml").write_text("base_config: root.yml\nlog_period: 2\n")
  (folder / "b.yml").write_text("base_config: root.yml\nprompt: b\n")
  (folder / "c.yml").write_text("base_config: [a.yml, b.yml]\n")
  config = load_config(["c.yml"], environ={})
  assert (config.log_period, config.prompt) == (2, "b")


def test_bases_are_found_in_our_configs_and_in_maxtexts(folder: Path):
  (folder / "c.yml").write_text("base_config: sft.yml\n" + GOOD)
  config = load_config(["c.yml"], environ={})
  assert config.sources["opt_type"] == "configs/sft.yml"
  (folder / "c.yml").write_text("base_config: post_train/sft.yml\n" + GOOD)
  config = load_config(["c.yml"], environ={})
  assert config.sources["train_split"] == "MaxText post_train/sft.yml"
  assert config.train_split == "train_sft"


def test_a_file_is_never_its_own_base(folder: Path):
  (folder / "sft.yml").write_text("base_config: sft.yml\n" + GOOD)
  assert load_config(["sft.yml"], environ={}).sources["opt_type"] == "configs/sft.yml"


def test_configuration_by_its_name_in_our_configs(folder: Path):
  config = load_config(
    ["sft.yml", "run_name=r", "base_output_directory=o", "steps=1", "dataset_type=synthetic"], environ={}
  )
  assert config.sources["packing"] == "configs/sft.yml"


def test_anchors_and_merges(load):
  config = load("lora: &a {lora_rank: 4, lora_alpha: 1}\ndpo: {algo: orpo}\n")
  assert config.lora.lora_alpha == 1.0
  config = load("formatting_func_kwargs:\n  a: &a {x: 1, y: 2}\n  b: {<<: *a, y: 3}\n")
  assert config.formatting_func_kwargs == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


def test_file_with_bom_and_windows_lines(folder: Path):
  (folder / "c.yml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
  assert load_config(["c.yml"], environ={}).steps == 5


# The environment.


def test_environment_sets_keys(load):
  config = load("", environ={"M_LEARNING_RATE": "1e-3", "M_PACKING": "false", "M_LOG_EVERY": "3", "M_NO_SUCH_KEY": "1"})
  assert (config.learning_rate, config.packing, config.log_every) == (1e-3, False, 3)
  assert config.sources["packing"] == "M_PACKING in the environment"
  assert set(config.environment) == {"M_LEARNING_RATE", "M_PACKING", "M_LOG_EVERY"}
  assert config.maxtext_overrides()["packing"] is False


def test_process_environment_is_the_default(folder: Path, monkeypatch: pytest.MonkeyPatch):
  (folder / "c.yml").write_text(GOOD)
  monkeypatch.setenv("M_STEPS", "77")
  assert load_config(["c.yml"]).steps == 77


def test_what_maxtext_takes_from_other_variables(folder: Path):
  (folder / "c.yml").write_text(GOOD.replace("run_name: r\n", ""))
  config = load_config(["c.yml"], environ={"JOBSET_NAME": "job", "HF_TOKEN": "s3cret"})
  assert (config.run_name, config.hf_access_token) == ("job", "s3cret")
  assert config.sources["run_name"] == "JOBSET_NAME in the environment"


def test_maxtext_configs_dir_names_another_base(folder: Path, load):
  (folder / "mine").mkdir()
  (folder / "mine/base.yml").write_text("learning_rate: 0.25\nlogical_axis_rules: []\n")
  config = load("", environ={"MAXTEXT_CONFIGS_DIR": str(folder / "mine")})
  assert config.learning_rate == 0.25
  assert config.sources["learning_rate"] == "MaxText base.yml"


# ${...}


def test_references(load):
  config = load(
    "prompt: ${run_name}-${oc.env:USER_NAME}-${oc.env:ABSENT,x}\nlog_period: ${steps}\nadamw_mask: ['${run_name}']\n",
    "hf_name=${prompt}!",
    environ={"USER_NAME": "ada"},
  )
  assert config.prompt == "r-ada-x"
  assert config.log_period == 5
  assert config.adamw_mask == ["r"]
  assert config.hf_name == "r-ada-x!"


# A model's file.


def test_model_file_lies_under_what_the_user_set(load):
  config = load("model_name: llama2-7b\nvocab_size: 32000\n")
  assert (config.base_emb_dim, config.base_num_decoder_layers) == (4096, 32)
  assert config.sources["base_emb_dim"] == "maxtext model llama2-7b.yml"
  overrides = config.maxtext_overrides()
  assert overrides["model_name"] == "llama2-7b"
  assert "base_emb_dim" not in overrides
  config = load("model_name: llama2-7b\noverride_model_config: true\nbase_emb_dim: 64\n")
  assert (config.base_emb_dim, config.base_num_decoder_layers) == (64, 32)
  assert config.sources["base_emb_dim"] == "c.yml"


def test_instruct_models_share_the_base_models_file(load):
  assert load("", "model_name=llama3.1-8b-Instruct").sources["base_emb_dim"] == "maxtext model llama3.1-8b.yml"


@pytest.mark.slow
def test_every_model_file_of_maxtext_loads(load):
  names = Schema.load().keys["model_name"].spec["enum"]
  unsupported = ("is not supported", "are not supported", "MaxText ships no")
  loaded = 0
  for name in names:
    if name == "default":
      continue
    try:
      loaded += load("", f"model_name={name}").model_name == name
    except ConfigError as error:
      strange = [problem for problem in error.problems if not any(word in problem for word in unsupported)]
      assert strange == [], name
  assert loaded >= 60


def test_rules_merge_as_in_maxtext(load):
  base = load().logical_axis_rules
  config = load("", "logical_axis_rules=[['norm', 'fsdp']]")
  assert config.logical_axis_rules == [rule for rule in base if rule[0] != "norm"] + [["norm", "fsdp"]]
  assert "override_logical_axis_rules" not in config.maxtext_overrides()
  config = load("logical_axis_rules: [['norm', 'fsdp']]\n")  # a YAML file's list replaces, as OmegaConf merges it
  assert config.logical_axis_rules == [["norm", "fsdp"]]
  assert config.maxtext_overrides()["override_logical_axis_rules"] is True
  config = load("", "model_name=llama2-7b")
  assert config.logical_axis_rules == [rule for rule in base if rule[0] != "norm"] + [["norm", "fsdp"]]


# Steps.


def test_steps_minus_one_takes_the_schedules(load):
  config = load("learning_rate_schedule_steps: 40\n", "steps=-1")
  assert config.steps == 40
  assert config.maxtext_overrides()["steps"] == 40


def test_epochs_in_place_of_steps(folder: Path):
  (folder / "c.yml").write_text(GOOD.replace("steps: 5\n", "num_epoch: 2\n"))
  config = load_config(["c.yml"], environ={})
  assert config.num_epoch == 2
  assert "steps" not in config.maxtext_overrides()


# What MaxText is told.


def test_overrides_are_what_was_set_and_maxtext_has(load):
  config = load(
    "max_bad_rows: 2\nlora: {lora_rank: 4}\nhf_train_files: [a, b]\nnum_epoch: null\n"
    "chat_template: '{% generation %}x{% endgeneration %}'\n",
    "packing=false",
    "hf_eval_files=e",
  )
  assert config.maxtext_overrides() == {
    "run_name": "r",
    "base_output_directory": "out",
    "steps": 5,
    "dataset_type": "synthetic",
    "use_sft": True,
    "lora": {"lora_rank": 4},
    "packing": False,
    "hf_train_files": "a,b",
    "hf_eval_files": "e",
  }
  config.maxtext_overrides()["lora"]["lora_rank"] = 99
  assert config.maxtext_overrides()["lora"] == {"lora_rank": 4}


@pytest.mark.parametrize(("file", "path"), [("a.jsonl", "json"), ("a.parquet", "parquet")])
def test_maxtext_is_told_a_format_where_only_files_are_named(file: str, path: str, folder: Path):
  (folder / file).touch()
  (folder / "c.yml").write_text(
    f"{GOOD}hf_train_files: {file}\ntokenizer_path: maxtext://tokenizers/tokenizer.llama2\n".replace("synthetic", "hf")
    + "train_data_columns: messages\n"
  )
  config = load_config(["c.yml"], environ={})
  assert config.hf_path == ""
  assert config.maxtext_overrides()["hf_path"] == path


# The view.


def test_attributes_items_and_get(load):
  config = load("", "lora.lora_rank=8")
  assert isinstance(config.lora, Group)
  assert config.lora.lora_rank == config["lora"]["lora_rank"] == config["lora.lora_rank"] == 8
  assert "steps" in config
  assert "lora" in config
  assert "lora.lora_rank" in config
  assert "stpes" not in config
  assert config.get("stpes") is None
  assert config.get("stpes", 3) == 3
  assert config.get("steps") == 5
  assert getattr(config, "stpes", 7) == 7
  with pytest.raises(KeyError):
    _ = config["stpes"]
  with pytest.raises(AttributeError, match=r"no key lora\.rnk"):
    _ = config.lora.rnk


def test_nothing_can_be_changed(load):
  config = load("train_data_columns: [a, b]\n")
  for target in (config, config.lora):
    with pytest.raises(AttributeError, match="cannot be changed"):
      target.steps = 3
    with pytest.raises(AttributeError, match="cannot be changed"):
      del target.steps
  config.train_data_columns.append("c")
  assert config.train_data_columns == ["a", "b"]
  with pytest.raises(TypeError):
    config.sources["steps"] = "x"  # type: ignore[index]
  assert copy.deepcopy(config) is config


def test_no_key_hides_behind_the_views_own_names():
  taken = {name for name in dir(Config) if not name.startswith("_")}
  assert taken & {name.partition(".")[0] for name in Schema.load().keys} == set()


def test_secrets_are_masked(load):
  config = load("", "hf_access_token=s3cret")
  assert config.hf_access_token == "s3cret"
  assert config.as_dict()["hf_access_token"] == "***"
  for text in (describe_config(config), repr(config), str(config.as_dict())):
    assert "s3cret" not in text
  with pytest.raises(ConfigError) as error:
    load("hf_access_token: 12345\n")
  assert "12345" not in str(error.value)


def test_as_dict_is_nested_and_plain(load):
  values = load("", "lora.lora_rank=8").as_dict()
  assert values["lora"]["lora_rank"] == 8
  assert type(values["lora"]) is dict
  assert "lora.lora_rank" not in values


def test_describe_lists_every_key_with_its_source(load):
  config = load("prompt: 'two words # not a comment'\n", "lora.lora_rank=8")
  lines = describe_config(config).splitlines()
  assert len(lines) == len(config.sources) > 800
  shown = {line.split(" = ")[0]: line.split(" = ", 1)[1] for line in lines}
  assert list(shown) == sorted(shown)
  assert shown["lora.lora_rank"].split() == ["8", "#", "command", "line"]
  assert shown["steps"].split() == ["5", "#", "c.yml"]
  assert shown["prompt"].startswith('"two words # not a comment"  ')
  assert shown["max_num_checkpoints_to_keep"].split() == ["null", "#", "MaxText", "base.yml"]


def test_the_saved_configuration_comes_to_the_same_without_the_files_it_was_made_of(tmp_path: Path):
  config = load_config(["configs/quickstart/sft.yml", "steps=7", "lora.lora_rank=4", "hf_access_token=secret"])
  save_config(config, tmp_path)
  text = (tmp_path / "config.yml").read_text()
  assert "secret" not in text
  assert "base_config" not in text
  again = load_model_config([str(tmp_path / "config.yml")])
  different = {key for key in config.sources if config[key] != again[key]}
  assert different == {"hf_access_token"}


def test_a_model_is_described_where_its_data_are_gone(tmp_path: Path):
  file = tmp_path / "config.yml"
  file.write_text("hf_train_files: gone.jsonl\nvocab_size: 0\n")
  with pytest.raises(ConfigError) as caught:
    load_model_config([str(file)])
  assert caught.value.problems == [f"{file}, line 2: vocab_size=0: must be at least 1"]
