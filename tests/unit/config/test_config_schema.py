"""The committed schema and the static view against the installed MaxText."""

from __future__ import annotations

import enum
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from maxtext_posttrain.config import OUR_KEYS, load_config
from maxtext_posttrain.config.lookup import Folders
from maxtext_posttrain.config.schema import Schema
from maxtext_posttrain.config.values import coerce, describe_type
from maxtext_posttrain.errors import ConfigError

ROOT = Path(__file__).parents[3]

# What MaxText itself changes after it has read a value.
COMPUTED = {
  "attn_logits_soft_cap",  # 0 becomes None
  "final_logits_soft_cap",
  "custom_mesh_and_rule_for_eval",  # falls back to the training's
  "logical_axis_rules_for_eval",
  "dump_hlo_gcs_dir",  # paths and flags put together
  "dump_hlo_xla_flags",
  "dump_jaxpr_gcs_dir",
  "eval_per_device_batch_size",  # 0 becomes per_device_batch_size
  "ici_context_parallelism",
  "learning_rate_schedule_steps",  # -1 becomes steps
  "mu_dtype",  # becomes weight_dtype
  "num_slices",  # from the devices
  "pipeline_parallel_layers",  # -1 becomes all layers
  "quantization_local_shard_count",
}
FILLED = {"tokenizer_path", "hf_path", "hf_eval_split"}  # given a value where they are empty
INHERITED = ("local_sa_", "eval_local_sa_", "local_use_splash", "eval_local_use_splash")


def test_every_default_of_base_yml_is_of_its_type():
  schema = Schema.load()
  text = Folders.find({}).root.read_text(encoding="utf-8")
  for name, value in yaml.safe_load(text).items():
    coerce(schema.keys[name].spec, value)


def test_every_key_has_a_type_in_words():
  for key in Schema.load().keys.values():
    assert describe_type(key.spec)
    if not key.ours:
      continue
    assert OUR_KEYS[key.name].doc.endswith(".")
    coerce(key.spec, key.default)


def test_maxtexts_keys_keep_maxtexts_names_and_types():
  """Ours that are MaxText's too take all that MaxText's take."""
  schema = Schema.load()
  shared = {name for name, key in OUR_KEYS.items() if key.from_maxtext}
  assert shared == {name for name in OUR_KEYS if name in schema.maxtext_specs}


@pytest.mark.slow
def test_committed_schema_is_in_step_with_maxtext():
  generator = _generator()
  assert generator.SCHEMA_PATH.read_text(encoding="utf-8") == generator.schema_text(), (
    "run scripts/generate_schema.py and commit what it writes"
  )


def _generator() -> ModuleType:
  spec = importlib.util.spec_from_file_location("generate_schema", ROOT / "scripts" / "generate_schema.py")
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules["generate_schema"] = module
  spec.loader.exec_module(module)
  return module


@pytest.mark.slow
@pytest.mark.parametrize(
  "argv",
  [
    ["configs/quickstart/sft.yml", "lora.lora_rank=4", "adamw_mask=[bias]", "max_bad_rows=3"],
    [
      "configs/sft.yml",
      "run_name=r",
      "base_output_directory=runs",
      "steps=7",
      "model_name=llama2-7b",
      "hardware=cpu",
      "dataset_type=synthetic",
      "logical_axis_rules=[['mlp', 'tensor']]",
      "override_model_config=true",
      "base_num_decoder_layers=2",
      "attention=dot_product",
      "skip_jax_distributed_system=true",
    ],
  ],
  ids=["quickstart", "named model"],
)
def test_maxtext_reads_the_same_values(argv: list[str], monkeypatch: pytest.MonkeyPatch):
  from maxtext_posttrain import maxtext_api

  monkeypatch.chdir(ROOT)
  config = load_config(argv, environ={})
  maxtext = maxtext_api.build_config(config.maxtext_overrides())
  schema = Schema.load()
  differ = {}
  for name in config.sources:
    if name in COMPUTED or name.startswith(INHERITED) or name not in schema.maxtext_specs or name == "chat_template":
      continue
    group, _, rest = name.partition(".")
    theirs = getattr(maxtext, group)
    if rest:
      theirs = theirs[rest] if isinstance(theirs, Mapping) else getattr(theirs, rest)
    ours = config[name]
    if name == "logical_axis_rules":
      # The one value that is not MaxText's own: see below.
      ours, theirs = (
        [[rule, sorted(_plain(axes)) if isinstance(axes, list | tuple) else axes] for rule, axes in rules]
        for rules in (ours, theirs)
      )
    if (name == "num_epoch" and ours is None) or (name in FILLED and not ours):
      continue
    if _plain(ours) != _plain(theirs):
      differ[name] = (ours, theirs)
  assert differ == {}


@pytest.mark.slow
def test_the_batch_lies_along_fsdp_before_data(monkeypatch: pytest.MonkeyPatch):
  """The other way round XLA swaps shards of it: see `test_devices.py`."""
  from maxtext_posttrain import maxtext_api

  monkeypatch.chdir(ROOT)
  config = load_config(["configs/quickstart/sft.yml"], environ={})
  built = maxtext_api.build_config(config.maxtext_overrides()).logical_axis_rules
  rules = [(_plain(ours), _plain(theirs)) for ours, theirs in zip(config["logical_axis_rules"], built, strict=True)]
  before, after = ["data", "fsdp", "fsdp_transpose", "expert"], ["fsdp", "data", "fsdp_transpose", "expert"]
  assert (["activation_batch", before], ["activation_batch", after]) in rules
  assert all({"data", "fsdp"} <= set(ours[1]) for ours, theirs in rules if ours != theirs)


def _plain(value: Any) -> Any:
  """Values as YAML has them: names of enums and dtypes, lists, and '' for null."""
  if isinstance(value, enum.Enum):
    value = value.value
  if isinstance(value, list | tuple):
    return [_plain(item) for item in value]
  if hasattr(value, "itemsize"):
    return str(value)
  return "" if value is None else value


# Values MaxText's own configuration class refuses are refused here too, and the other way round.
SAME_VERDICT = [
  "steps=ten", "steps=2.5", "steps=5.0", "learning_rate=-1", "learning_rate=1e-3", "warmup_steps_fraction=2",
  "opt_type=adam", "opt_type=muon", "packing=maybe", "packing=yes", "max_num_checkpoints_to_keep=None",
  "train_data_columns=messages", "gradient_accumulation_steps=0", "lora.lora_rank=-1", "lora.lora_rank=2",
  "dropout_rate=1.5", "remat_policy=none_such", "no_such_key=1", "dtype=bfloat16", "dtype=int4", "lora=3",
  "eval_interval=x", "decoder_block=gemma", "decoder_block=gemma9", "mlp_activations=[silu,linear]",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("argument", SAME_VERDICT)
def test_same_verdict_as_maxtext(argument: str, tmp_path: Path):
  from maxtext.configs import pyconfig

  common = ["run_name=r", f"base_output_directory={tmp_path}", "dataset_type=synthetic", "hardware=cpu",
            "attention=dot_product", "skip_jax_distributed_system=true", "enable_checkpointing=false"]  # fmt: skip
  if not argument.startswith("steps"):
    common.append("steps=3")
  (tmp_path / "c.yml").write_text("base_config: base.yml\n")

  def refused(load: Any) -> bool:
    try:
      load([str(tmp_path / "c.yml"), *common, argument])
    except (ConfigError, ValueError, TypeError, KeyError, AttributeError):
      return True
    return False

  theirs = refused(lambda argv: pyconfig._initialize_pydantic(["", *argv]))
  assert refused(lambda argv: load_config(argv, environ={})) == theirs
