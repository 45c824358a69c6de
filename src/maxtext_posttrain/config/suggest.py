"""The nearest known key for one that is not known."""

from __future__ import annotations

from collections.abc import Mapping

from maxtext_posttrain.config.schema import Schema

_OTHER_NAMES: Mapping[str, str] = {
  "batch_size": "per_device_batch_size",
  "checkpoint_dir": "base_output_directory",
  "dataset": "hf_path",
  "epochs": "num_epoch",
  "eval_steps_interval": "eval_interval",
  "grad_accum_steps": "gradient_accumulation_steps",
  "grad_clip": "gradient_clipping_threshold",
  "init_from": "load_parameters_path",
  "logging_steps": "log_every",
  "lr": "learning_rate",
  "max_grad_norm": "gradient_clipping_threshold",
  "max_length": "max_target_length",
  "max_seq_len": "max_target_length",
  "max_seq_length": "max_target_length",
  "max_steps": "steps",
  "micro_batch_size": "per_device_batch_size",
  "model": "model_name",
  "num_steps": "steps",
  "num_train_epochs": "num_epoch",
  "optimizer": "opt_type",
  "output_dir": "base_output_directory",
  "per_device_train_batch_size": "per_device_batch_size",
  "save_interval": "checkpoint_period",
  "save_steps": "checkpoint_period",
  "save_total_limit": "max_num_checkpoints_to_keep",
  "seed": "data_shuffle_seed",
  "seq_len": "max_target_length",
  "sequence_length": "max_target_length",
  "template": "chat_template",
  "tokenizer": "tokenizer_path",
  "train_files": "hf_train_files",
  "train_steps": "steps",
  "warmup_ratio": "warmup_steps_fraction",
  "weight_decay": "adam_weight_decay",
}
"""What other trainers call our keys."""


def unknown_key(name: str, schema: Schema, trainer: str | None) -> str:
  """One line on an unknown key, with the key that was probably meant."""
  parent = name.rpartition(".")[0]
  if parent and parent in schema.keys:
    return f"unknown key {name}: {parent} holds a single value and no keys"
  near = nearest_key(name, schema, trainer)
  if near is not None:
    return f"unknown key {name}; did you mean {near}?"
  return f"unknown key {name}; neither MaxText {schema.maxtext_version} nor this package has one like it"


def other_trainers_key(name: str, owner: str, trainer: str | None) -> str:
  """One line on a key that only another trainer has."""
  meant = _OTHER_NAMES.get(name)
  return f"{name} is a key of {owner} training; {trainer} has no such key" + (
    f"; did you mean {meant}?" if meant else ""
  )


def nearest_key(name: str, schema: Schema, trainer: str | None) -> str | None:
  """The known key most like `name`, or None."""
  from difflib import get_close_matches

  word = name.strip().lower().replace("-", "_")
  candidates = [key.name for key in schema.keys.values() if not key.derived and key.belongs_to(trainer)]
  candidates += [group for group in sorted(schema.groups) if any(name.startswith(f"{group}.") for name in candidates)]
  by_last_part = {candidate.rpartition(".")[2]: candidate for candidate in reversed(candidates)}
  if word in schema.keys and word in candidates:
    return word
  if word in _OTHER_NAMES:
    return _OTHER_NAMES[word]
  last = word.rpartition(".")[2]
  if last in by_last_part:
    return by_last_part[last]
  group = word.partition(".")[0]
  if group in schema.groups:
    siblings = [candidate for candidate in candidates if candidate.startswith(f"{group}.")]
    near = get_close_matches(word, siblings, n=1)
    return near[0] if near else None
  near = get_close_matches(word, candidates, n=1, cutoff=0.72)
  if near:
    return near[0]
  near = get_close_matches(last, by_last_part, n=1, cutoff=0.78)
  return by_last_part[near[0]] if near else None
