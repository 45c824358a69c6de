from __future__ import annotations

import pytest
from data_fakes import make_config

from maxtext_posttrain.data import DataOptions
from maxtext_posttrain.errors import ConfigError


def test_missing_keys_have_defaults():
  class Bare:
    max_target_length = 16
    vocab_size = 100

  options = DataOptions.from_config(Bare())
  assert (options.dataset_type, options.columns, options.packing) == ("hf", ("messages",), True)
  assert (options.num_epoch, options.shuffle, options.completion_only) == (None, True, True)
  assert (options.max_bad_rows, options.seed, options.max_segments) == (0.01, 0, None)
  assert not options.configured
  assert not DataOptions.from_config(Bare(), "eval").configured


def test_files_may_be_a_name_or_a_list():
  assert DataOptions.from_config(make_config(hf_train_files="a.jsonl")).files == ("a.jsonl",)
  assert DataOptions.from_config(make_config(hf_train_files=["a.jsonl", "b.json"])).files == ("a.jsonl", "b.json")


def test_grain_has_keys_of_its_own():
  config = make_config(dataset_type="grain", hf_train_files="a.jsonl", hf_path="x/y", grain_train_files="b.parquet")
  options = DataOptions.from_config(config)
  assert (options.files, options.hub_path, options.files_key) == (("b.parquet",), "", "grain_train_files")


def test_evaluation_is_one_pass_in_order():
  options = DataOptions.from_config(
    make_config(hf_eval_files="e.jsonl", num_epoch=3, enable_data_shuffling=True), "eval"
  )
  assert (options.files, options.num_epoch, options.shuffle) == (("e.jsonl",), 1, False)


def test_evaluation_columns_default_to_those_of_training():
  config = make_config(train_data_columns=["a", "b"], eval_data_columns=None)
  assert DataOptions.from_config(config, "eval").columns == ("a", "b")


def test_training_files_do_not_bring_a_hub_evaluation_split_with_them():
  config = make_config(hf_path="owner/chat", hf_eval_split="test_sft")
  assert DataOptions.from_config(config, "eval").configured
  config.hf_train_files = "mine.jsonl"
  assert not DataOptions.from_config(config, "eval").configured


def test_format_names_as_hf_path_are_no_data_set():
  assert DataOptions.from_config(make_config(hf_path="json", hf_eval_split="test"), "eval").hub_path == ""


def test_the_token_is_not_shown():
  assert "secret" not in repr(DataOptions.from_config(make_config(hf_access_token="secret")))


def test_all_problems_are_listed():
  config = make_config(
    dataset_type="tfds",
    train_data_columns=["a", "b", "c"],
    max_target_length=1,
    num_epoch=0,
    data_shuffle_seed=-1,
    max_bad_rows=float("nan"),
    vocab_size=0,
  )
  with pytest.raises(ConfigError) as caught:
    DataOptions.from_config(config)
  keys = ["dataset_type", "train_data_columns", "max_target_length", "num_epoch", "data_shuffle_seed", "max_bad_rows"]
  assert [problem.split("=")[0] for problem in caught.value.problems] == [*keys, "vocab_size"]
