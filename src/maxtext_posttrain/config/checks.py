"""What is wrong with a configuration whose every value has the right type: found without building anything."""

from __future__ import annotations

import errno
import glob
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from maxtext_posttrain.config import preferences, reinforcement
from maxtext_posttrain.config.layers import SET_KINDS, Kind, Resolved
from maxtext_posttrain.config.lookup import ASSET_SCHEME, Folders, resolve_asset
from maxtext_posttrain.config.trainers import SWITCHES, title
from maxtext_posttrain.config.values import plain

_AT_LEAST: Mapping[str, float] = {
  "base_emb_dim": 1,
  "base_mlp_dim": 1,
  "base_num_decoder_layers": 1,
  "base_num_kv_heads": 1,
  "base_num_query_heads": 1,
  "checkpoint_period": 1,
  "checkpoint_storage_concurrent_gb": 1,
  "checkpoint_storage_device_host_concurrent_gb": 1,
  "checkpoint_storage_target_data_file_size_bytes": 1,
  "data_shuffle_seed": 0,
  "eval_per_device_batch_size": 0,
  "head_dim": 1,
  "learning_rate_final_fraction": 0,
  "adam_eps": 0,
  "adam_eps_root": 0,
  "adam_weight_decay": 0,
  "log_period": 1,
  "max_num_checkpoints_to_keep": 1,
  "max_target_length": 2,
  "num_experts": 1,
  "num_vocab_tiling": 1,
  "steps": 1,
  "vocab_size": 1,
}
_BELOW_ONE = ("adam_b1", "adam_b2", "muon_beta")
_LARGEST_SEED = 2**32 - 1

UNSUPPORTED: Mapping[str, str] = {
  "colocated_python_data_input": "reading data on remote hosts is not supported",
  "elastic_enabled": "elastic training is not supported",
  "enable_continuous_checkpointing": "continuous checkpointing is not supported; use checkpoint_period",
  "enable_diloco": "DiLoCo is not supported",
  "enable_emergency_checkpoint": "emergency checkpoints are not supported; use checkpoint_period",
  "enable_multi_tier_checkpointing": "multi-tier checkpoints are not supported; use checkpoint_period",
  "enable_rampup_batch_size": "a growing batch size is not supported",
  "formatting_func_path": "formatting functions are not supported; write the data as messages or two columns",
  "grain_train_mixture_config_path": "data mixtures are not supported",
  "optimizer_memory_host_offload": "an optimizer kept in host memory is not supported",
  "use_audio": "audio models are not supported",
  "use_indexer": "sparse attention indexers are not supported",
  "use_m3_model": "m3 models are not supported",
  "use_multimodal": "multimodal models are not supported",
}
"""Switches of MaxText that our trainers would otherwise ignore, and why they must stay off."""

LORA_QTYPES = ("nf4", "int4", "int8", "float8_e4m3fn", "float8_e5m2")
"""What a frozen base's kernels can be quantised to under QLoRA: Qwix's names of the types that are tested here."""

_DATASET_TYPES = ("hf", "grain", "synthetic")
_FILE_FORMATS = ("json", "parquet")
_CHAT_COLUMNS = (
  (1, 2),
  "one column of messages, or two different ones: the user's text and the assistant's",
)
_PAIR_COLUMNS = (
  (2, 3),
  "three different columns, the prompt's and those of the chosen and the rejected completion, or two, chosen and"
  " rejected, that both hold the prompt too",
)
_VOCABULARY_FILES = (".model", ".tiktoken", ".json")


class Checks:
  """Cross-field checks of a resolved configuration for one trainer."""

  def __init__(self, resolved: Resolved, trainer: str | None, folders: Folders):
    self._resolved = resolved
    self._trainer = trainer
    self._folders = folders

  def problems(self) -> Iterator[str]:
    """Every problem, one line each."""
    yield from self._ranges()
    yield from self._required()
    yield from self._combinations()
    yield from self._trainer_switches()
    if self._trainer == preferences.TRAINER:
      yield from preferences.problems(self._value, self._is_set, self._at)
    if self._trainer == reinforcement.TRAINER:
      yield from reinforcement.problems(self._value, self._is_set, self._at)
    yield from self._unsupported()
    yield from self._lora()
    yield from self._evaluation()
    yield from self._files()
    yield from self._template()
    yield from self._loggers()

  def model_problems(self) -> Iterator[str]:
    """The problems of a configuration that describes a model and asks for no training."""
    yield from self._ranges()
    if self._value("tokenizer_path"):
      yield from self._tokenizer(self._value("tokenizer_path"))
    yield from self._template()

  def teacher_problems(self) -> Iterator[str]:
    """The problems of a configuration that describes a model whose weights are read."""
    yield from self.model_problems()
    if self._value("load_parameters_path"):
      yield from self._must_exist("load_parameters_path", self._value("load_parameters_path"))

  def _value(self, name: str) -> Any:
    return self._resolved.settings[name].value

  def _is_set(self, name: str) -> bool:
    origin = self._resolved.settings[name].origin
    return origin.kind in SET_KINDS and origin.kind is not Kind.TRAINER

  def _at(self, name: str) -> str:
    """`where: key=value` for the start of a message; without the place where it is a default."""
    setting = self._resolved.settings[name]
    shown = f"{name}={plain(setting.value)}"
    kinds = (*SET_KINDS, Kind.MODEL)
    return f"{setting.origin.where}: {shown}" if setting.origin.kind in kinds else shown

  def _ranges(self) -> Iterator[str]:
    for name, low in _AT_LEAST.items():
      value = self._value(name)
      if value is not None and value < low:
        yield f"{self._at(name)}: must be at least {low}"
    if self._value("per_device_batch_size") <= 0:
      yield f"{self._at('per_device_batch_size')}: must be above 0"
    for name in _BELOW_ONE:
      if not 0 <= self._value(name) < 1:
        yield f"{self._at(name)}: must be at least 0 and below 1"
    if self._value("data_shuffle_seed") > _LARGEST_SEED:
      yield f"{self._at('data_shuffle_seed')}: must be at most {_LARGEST_SEED}"
    if self._value("eval_interval") > 0 and self._value("eval_steps") == 0:
      yield f"{self._at('eval_steps')}: must be at least 1, or -1 for all evaluation data"

  def _required(self) -> Iterator[str]:
    synthetic = self._value("dataset_type") == "synthetic"
    wanted = {
      "run_name": "name the run: run_name=my-run",
      "base_output_directory": "say where runs are kept: base_output_directory=runs, or gs://bucket/runs",
    }
    if not synthetic:
      wanted["tokenizer_path"] = (
        "name a tokenizer: a file, a folder, a hub repository, or maxtext://tokenizers/tokenizer.llama2"
      )
    for name, what in wanted.items():
      if not self._value(name) and name not in self._resolved.failed:
        yield f"{name} is missing: {what}"
    if not (self._is_set("steps") or self._value("num_epoch")) and not self._resolved.failed & {"steps", "num_epoch"}:
      yield "steps is missing: say how long to train: steps=1000, or num_epoch=1"
    yield from self._required_data()

  def _required_data(self) -> Iterator[str]:
    kind = self._value("dataset_type")
    if kind not in _DATASET_TYPES:
      yield f"{self._at('dataset_type')}: is not supported; use one of {', '.join(_DATASET_TYPES)}"
    elif kind == "grain" and not self._value("grain_train_files"):
      yield "grain_train_files is missing: name the training files, for example grain_train_files=data/*.parquet"
    elif kind == "hf" and not _names(self._value("hf_train_files")):
      path = self._value("hf_path")
      if path in _FILE_FORMATS:
        yield f"hf_train_files is missing: hf_path={path} says the files' format, not which they are"
      elif not path and not self._resolved.failed & {"hf_path", "hf_train_files"}:
        yield (
          "hf_path or hf_train_files is missing: name a data set or files, for example hf_train_files=data/train.jsonl"
        )

  def _combinations(self) -> Iterator[str]:
    if self._value("load_parameters_path") and self._value("load_full_state_path"):
      yield f"{self._at('load_parameters_path')}: load_full_state_path is set too; set one of them"
    if self._value("load_full_state_path"):
      for name, off in (("enable_checkpointing", False), ("post_train_skip_checkpointing", True)):
        if self._value(name) is off:
          yield f"{self._at(name)}: load_full_state_path restores through the run's checkpoints, which this turns off"
    warmup, decay = self._value("warmup_steps_fraction"), self._value("wsd_decay_steps_fraction")
    if self._value("lr_schedule_type") == "wsd" and warmup + decay > 1:
      yield (
        f"{self._at('warmup_steps_fraction')}: with wsd_decay_steps_fraction={plain(decay)} the warmup and the decay"
        " take more than the whole schedule; their sum must be at most 1"
      )
    if self._value("num_vocab_tiling") > 1:
      whole = [name for name in ("quantization", "parameter_memory_host_offload") if self._value(name)]
      whole += ["shard_mode"] * (self._value("shard_mode") == "explicit")
      for name in whole:
        yield f"{self._at('num_vocab_tiling')}: with {name} the output head can't be applied in parts; set it to 1"
    queries, keys = self._value("base_num_query_heads"), self._value("base_num_kv_heads")
    if keys > 0 and queries % keys:
      yield f"{self._at('base_num_query_heads')}: must be a multiple of base_num_kv_heads={keys}"
    if self._value("chat_template") and self._value("chat_template_path"):
      yield f"{self._at('chat_template_path')}: chat_template is set too; set one of them"
    run_name = self._value("run_name")
    if Path(run_name).is_absolute() or ".." in Path(run_name).parts:
      yield f"{self._at('run_name')}: must not lead out of base_output_directory; use a plain name"
    yield from self._columns("train_data_columns")
    if self._value("eval_interval") > 0:
      yield from self._columns("eval_data_columns")

  def _columns(self, name: str) -> Iterator[str]:
    columns = self._value(name)
    if self._value("dataset_type") == "synthetic":
      return
    counts, what = _PAIR_COLUMNS if self._trainer == preferences.TRAINER else _CHAT_COLUMNS
    if len(columns) not in counts or len(set(columns)) != len(columns):
      yield f"{self._at(name)}: must name {what}"

  def _trainer_switches(self) -> Iterator[str]:
    trainer = self._trainer or ""
    own = SWITCHES.get(trainer)
    if own is None:
      return
    for other, switch in SWITCHES.items():
      if switch != own and self._value(switch):
        yield f"{self._at(switch)}: it asks for {title(other)}, which the {title(trainer)} trainer does not do"
    if not self._value(own):
      yield f"{self._at(own)}: the {title(trainer)} trainer does {title(trainer)}; leave this key out"

  def _unsupported(self) -> Iterator[str]:
    for name, why in UNSUPPORTED.items():
      if self._value(name):
        yield f"{self._at(name)}: {why}"
    if self._value("mtp_num_layers") > 0:
      yield f"{self._at('mtp_num_layers')}: multi-token prediction is not supported; set it to 0"
    if self._value("training_objective") != "causal_lm":
      yield f"{self._at('training_objective')}: only causal_lm can be post-trained"
    if self._value("source_checkpoint_layout") != "orbax":
      yield f"{self._at('source_checkpoint_layout')}: only orbax checkpoints can be loaded"
    if self._value("dataset_type") != "synthetic":
      for name in ("tokenize_train_data", "tokenize_eval_data"):
        if not self._value(name):
          yield f"{self._at(name)}: data that are tokens already are not supported; give text"

  def _lora(self) -> Iterator[str]:
    if not self._value("lora.enable_lora"):
      return
    for name, usual in (("lora.lora_rank", 16), ("lora.lora_alpha", 32)):
      if self._value(name) <= 0 and name not in self._resolved.failed:
        yield f"{self._at(name)}: must be above 0 with lora.enable_lora=true, for example {name}={usual}"
    pattern = self._value("lora.lora_module_path")
    try:
      re.compile(pattern)
    except re.error as error:
      yield f"{self._at('lora.lora_module_path')}: is no regular expression: {error}"
    qtype, tile = self._value("lora.lora_weight_qtype"), self._value("lora.lora_tile_size")
    if qtype is not None and qtype not in LORA_QTYPES:
      yield f"{self._at('lora.lora_weight_qtype')}: must be one of {', '.join(LORA_QTYPES)}"
    if tile is not None and tile < 1:
      yield f"{self._at('lora.lora_tile_size')}: must be at least 1; leave it out for one scale an axis"
    if tile and qtype is None:
      yield f"{self._at('lora.lora_tile_size')}: sizes the blocks of a quantised base; set lora.lora_weight_qtype too"
    if self._value("load_full_state_path"):
      yield (
        f"{self._at('load_full_state_path')}: with lora.enable_lora=true the base is named with load_parameters_path,"
        " an adapter to begin with by lora.lora_restore_path"
      )
    elif not self._value("load_parameters_path") and not self._value("lora_fresh_base"):
      yield (
        "load_parameters_path is missing: name the base that the adapter is trained over; lora_fresh_base=true trains"
        " over weights drawn from init_weights_seed"
      )
    elif self._value("load_parameters_path") and self._value("lora_fresh_base"):
      yield f"{self._at('lora_fresh_base')}: load_parameters_path is set too; set one of them"
    if self._value("opt_type") == "muon":
      yield f"{self._at('opt_type')}: Muon is for full weight matrices, not for an adapter's; use adamw"
    if self._trainer == "distill" and self._value("student_init_from_teacher_layers") is not None:
      yield (
        f"{self._at('student_init_from_teacher_layers')}: makes a student's weights anew, and an adapter needs a base"
        " that can be read again; distil with full weights"
      )
    if self._value("lora_input_adapters_path"):
      yield (
        f"{self._at('lora_input_adapters_path')}: is for serving; an adapter to begin with is lora.lora_restore_path"
      )

  def _evaluation(self) -> Iterator[str]:
    kind = self._value("dataset_type")
    if self._value("eval_interval") <= 0 or kind not in ("hf", "grain"):
      return
    if kind == "grain" and not self._value("grain_eval_files"):
      yield f"{self._at('eval_interval')}: there are no evaluation data; set grain_eval_files, or eval_interval=-1"
    if kind == "hf" and not _names(self._value("hf_eval_files")):
      from_hub = not _names(self._value("hf_train_files")) and self._value("hf_path") and self._value("hf_eval_split")
      if not from_hub:
        keys = "hf_eval_files" if _names(self._value("hf_train_files")) else "hf_eval_files or hf_eval_split"
        yield f"{self._at('eval_interval')}: there are no evaluation data; set {keys}, or eval_interval=-1"

  def _files(self) -> Iterator[str]:
    kind = self._value("dataset_type")
    if kind == "hf":
      in_hub = bool(self._value("hf_path")) and self._value("hf_path") not in _FILE_FORMATS
      in_hub = in_hub and not _exists(self._value("hf_path"))
      if _is_local(self._value("hf_path")):
        yield from self._must_exist("hf_path", self._value("hf_path"))
      for name in ("hf_train_files", "hf_eval_files"):
        for pattern in _names(self._value(name)):
          if not in_hub or _is_local(pattern):
            yield from self._must_match(name, pattern)
    elif kind == "grain":
      for name in ("grain_train_files", "grain_eval_files"):
        if self._value(name):
          yield from self._must_match(name, self._value(name))
    if kind != "synthetic" and self._value("tokenizer_path"):
      yield from self._tokenizer(self._value("tokenizer_path"))
    for name in ("load_parameters_path", "load_full_state_path", "chat_template_path", "lora.lora_restore_path"):
      if self._value(name):
        yield from self._must_exist(name, self._value(name))
    output = self._value("base_output_directory")
    if output and not _is_remote(output) and _exists(output) and not Path(output).is_dir():
      yield f"{self._at('base_output_directory')}: is a file; name a folder"

  def _tokenizer(self, path: str) -> Iterator[str]:
    local = Path(resolve_asset(path, self._folders)).expanduser()
    in_assets = path.startswith(ASSET_SCHEME)
    if _is_remote(path) or _exists(local):
      return
    must_be_file = self._value("tokenizer_type") in ("sentencepiece", "tiktoken") or path.endswith(_VOCABULARY_FILES)
    if must_be_file or in_assets or _is_local(path):
      shipped = not in_assets and _exists(self._folders.assets / "tokenizers" / local.name)
      hint = f"; MaxText ships {ASSET_SCHEME}tokenizers/{local.name}" if shipped else ""
      yield f"{self._at('tokenizer_path')}: no such file{hint}"

  def _template(self) -> Iterator[str]:
    template = self._value("chat_template")
    if not template or "{%" in template or "{{" in template or _exists(Path(template).expanduser()):
      return
    from maxtext_posttrain.tokenizers.chat_template import builtin_names

    names = builtin_names()
    if template in names:
      return
    if "/" in template or Path(template).suffix:
      yield f"{self._at('chat_template')}: no such file"
    else:
      yield (
        f"{self._at('chat_template')}: is neither a file, nor Jinja text, nor a built-in template; built in are"
        f" {', '.join(names)}"
      )

  def _loggers(self) -> Iterator[str]:
    if self._value("enable_wandb") and importlib.util.find_spec("wandb") is None:
      yield (
        f"{self._at('enable_wandb')}: the wandb package is not installed; pip install 'maxtext-posttrain[wandb]', or"
        " set enable_wandb=false"
      )

  def _must_exist(self, name: str, path: str) -> Iterator[str]:
    if not _is_remote(path) and not _exists(resolve_asset(path, self._folders)):
      yield f"{self._at(name)}: no such file or folder"

  def _must_match(self, name: str, pattern: str) -> Iterator[str]:
    if _is_remote(pattern) or _exists(pattern):
      return
    if not glob.has_magic(pattern):
      yield f"{self._at(name)}: no such file" + ("" if pattern == self._value(name) else f": {pattern}")
    elif next(glob.iglob(pattern, recursive=True), None) is None:  # noqa: PTH207 (absolute patterns too)
      yield f"{self._at(name)}: matches no file" + ("" if pattern == self._value(name) else f": {pattern}")


def _names(value: str | Sequence[str] | None) -> list[str]:
  """A name or a list of names as a list, empty ones left out."""
  names = [] if value is None else [value] if isinstance(value, str) else value
  return [name for name in names if name]


def _exists(path: str | Path) -> bool:
  """Whether there is such a file or folder, as far as it can be told: what may not be looked at may be there."""
  try:
    return Path(path).exists()
  except PermissionError:
    return True
  except OSError as error:
    if error.errno == errno.ENAMETOOLONG:
      return False
    raise


def _is_remote(path: str) -> bool:
  return "://" in path and not path.startswith(ASSET_SCHEME)


def _is_local(path: str) -> bool:
  """Whether a name that may mean a hub repository clearly means a local path."""
  return path.startswith(("/", "./", "../", "~", ASSET_SCHEME))
