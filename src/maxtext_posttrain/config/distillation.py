"""A distillation's configuration: its teacher's, and what may be wrong with the two together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from maxtext_posttrain.config.layers import Kind, Resolved, Setting, resolve, resolve_overrides
from maxtext_posttrain.config.lookup import Folders
from maxtext_posttrain.config.schema import Schema
from maxtext_posttrain.config.values import plain

TRAINER = "distill"

_CHECKPOINTS = ("load_parameters_path", "load_full_state_path")
_SHARED = (
  "per_device_batch_size",
  "eval_per_device_batch_size",
  "max_target_length",
  "gradient_accumulation_steps",
  "base_output_directory",
  "run_name",
  "dataset_type",
  "steps",
)
"""What student and teacher have in common, or what is the run's alone."""

_SHARED_PREFIXES = (
  "data_sharding",
  "dcn_",
  "distill_",
  "hardware",
  "hf_",
  "ici_",
  "logical_axis_rules",
  "mesh_axes",
  "skip_jax_",
)
_SAME_SIZES = (
  "base_emb_dim",
  "base_mlp_dim",
  "base_num_query_heads",
  "base_num_kv_heads",
  "head_dim",
  "decoder_block",
  "scan_layers",
  "logits_via_embedding",
)
"""What a layer must have in common with the one it is copied from."""

UNSUPPORTED: Mapping[str, str] = {
  "use_dpo": "it asks for DPO, which the distillation trainer does not do",
  "use_grpo": "it asks for GRPO, which the distillation trainer does not do",
  "use_sft": "it asks for SFT, which the distillation trainer does not do; distill_alpha=0 is that",
  "learn_to_init_mode": "learning to initialise a student is not supported; use student_init_from_teacher_layers",
  "lti_use_general_linear_map": "learning to initialise a student is not supported",
  "distill_weights_copy_map": "copying weights by pattern is not supported; use student_init_from_teacher_layers",
  "distill_student_weights_share_map": "sharing weights inside the student is not supported",
  "student_params_to_update": "freezing parts of the student is not supported here; use trainable_parameters_mask",
}
_SCHEDULED = ("distill_alpha", "distill_temperature", "distill_beta")


def resolve_teacher(
  resolved: Resolved, schema: Schema, folders: Folders, environ: Mapping[str, str]
) -> Resolved | None:
  """The teacher's settings: `teacher_config`'s, or the run's without `student_overrides`; `teacher_overrides` on top.

  What the two compute a batch with is the run's: its sizes, its devices and how arrays are spread over them.

  Args:
    resolved: the run's.
    schema: the keys there are.
    folders: where files lie.
    environ: the environment.

  Returns:
    None where the teacher's logits come from files, or nothing names a teacher's weights.

  Raises:
    ConfigError: `teacher_config` can't be read.
  """
  settings = resolved.settings
  overrides = settings["teacher_overrides"].value
  if settings["offline_data_dir"].value or "load_parameters_path" not in overrides:
    return None
  below, chosen = resolved, dict(resolved.beneath)
  teacher_config = settings["teacher_config"].value
  if teacher_config:
    quiet = {name: value for name, value in environ.items() if not name.startswith("M_")}
    below = resolve([teacher_config], None, schema, folders, quiet)
    # What its own student_overrides set holds; what its model's file did is laid under it again.
    chosen = {
      name: each if each.origin.kind is Kind.OVERRIDES else below.beneath[name] for name, each in below.settings.items()
    }
    for name, setting in resolved.beneath.items():
      if name in _SHARED or name.startswith(_SHARED_PREFIXES):
        chosen[name] = setting
  for name in _CHECKPOINTS:
    chosen[name] = Setting("", resolved.beneath[name].origin)
  return resolve_overrides(below, chosen, "teacher_overrides", overrides, schema, folders, environ)


class DistillationChecks:
  """What is wrong with a student, a teacher and the losses between them, told without building anything."""

  def __init__(self, resolved: Resolved, teacher: Resolved | None):
    self._resolved = resolved
    self._teacher = teacher

  def problems(self) -> Iterator[str]:
    """Every problem, one line each."""
    yield from self._models()
    yield from self._losses()
    yield from self._features()
    yield from self._start()
    for name, why in UNSUPPORTED.items():
      if self._value(name):
        yield f"{self._at(name)}: {why}"

  def _value(self, name: str) -> Any:
    return self._resolved.settings[name].value

  def _at(self, name: str) -> str:
    setting = self._resolved.settings[name]
    shown = f"{name}={plain(setting.value)}"
    return shown if setting.origin.kind in (Kind.DEFAULT, Kind.OUR_DEFAULT) else f"{setting.origin.where}: {shown}"

  def _of_teacher(self, name: str) -> Any:
    assert self._teacher is not None
    return self._teacher.settings[name].value

  def _models(self) -> Iterator[str]:
    for name in ("student_overrides", "teacher_overrides"):
      for key in ("student_overrides", "teacher_overrides", "base_config"):
        if key in self._value(name):
          yield f"{name}: {key}: can't stand inside it"
    overrides = self._value("teacher_overrides")
    if "load_full_state_path" in overrides:
      yield "teacher_overrides: load_full_state_path: a teacher has weights only; use load_parameters_path"
    if not self._value("offline_data_dir") and not overrides.get("load_parameters_path"):
      yield (
        "no teacher: set teacher_overrides.load_parameters_path=<step>/items, or offline_data_dir to what posttrain"
        " teacher-logits wrote"
      )
    if self._value("offline_data_dir") and not Path(self._value("offline_data_dir")).is_dir():
      yield f"{self._at('offline_data_dir')}: no such folder"
    if self._teacher is None:
      return
    for problem in self._teacher.problems:
      yield problem if problem.startswith("teacher_overrides") else f"the teacher: {problem}"
    for key, value in overrides.items():
      shared = key in _SHARED or str(key).startswith(_SHARED_PREFIXES)
      if shared and key in self._resolved.settings and self._value(key) != value:
        yield (
          f"teacher_overrides: {key}={plain(value)}: the teacher computes the student's batch on its devices, with"
          f" {key}={plain(self._value(key))}; leave it out"
        )
    if self._of_teacher("vocab_size") != self._value("vocab_size"):
      yield (
        f"vocab_size: the student has {self._value('vocab_size')}, the teacher {self._of_teacher('vocab_size')}: they"
        " must have the same vocabulary; set vocab_size (a padded one too) to the teacher's, or choose another teacher"
      )

  def _losses(self) -> Iterator[str]:
    for name, low, high in (("distill_alpha", 0.0, 1.0), ("distill_alpha_end", 0.0, 1.0)):
      value = self._value(name)
      if value is not None and not low <= value <= high:
        yield f"{self._at(name)}: must be at least 0 and at most 1"
    for name in ("distill_temperature", "distill_temperature_end"):
      value = self._value(name)
      if value is not None and value <= 0:
        yield f"{self._at(name)}: must be above 0"
    for name in ("distill_beta", "distill_beta_end"):
      value = self._value(name)
      if value is not None and value < 0:
        yield f"{self._at(name)}: must be at least 0"
    for name in _SCHEDULED:
      end, schedule = self._value(f"{name}_end"), self._value(f"{name}_schedule")
      if schedule != "constant" and end is None:
        yield f"{self._at(f'{name}_schedule')}: {name}_end is missing: say where it goes to, or leave the schedule out"
      if schedule == "constant" and end is not None and end != self._value(name):
        yield f"{self._at(f'{name}_end')}: {name}_schedule=constant never gets there; use linear or cosine"
    if self._value("distill_jsd_beta") != 0.5 and self._value("distill_divergence") != "jsd":
      yield f"{self._at('distill_jsd_beta')}: belongs to distill_divergence=jsd, which is not set"

  def _features(self) -> Iterator[str]:
    layers = {name: self._value(name) for name in ("distill_layer_indices", "distill_teacher_layer_indices")}
    if not self._value("distill_beta"):
      if self._value("distill_beta_end"):
        yield f"{self._at('distill_beta_end')}: distill_beta=0 leaves features out; start with a small one, as 1e-6"
      for name, value in layers.items():
        if value:
          yield f"{self._at(name)}: no features are compared without distill_beta above 0"
      return
    if self._value("offline_data_dir"):
      yield f"{self._at('distill_beta')}: the files in offline_data_dir hold no features; set it to 0"
    if self._teacher is None:
      return
    if self._value("base_emb_dim") != self._of_teacher("base_emb_dim"):
      yield (
        f"{self._at('distill_beta')}: features of {self._value('base_emb_dim')} and of"
        f" {self._of_teacher('base_emb_dim')} numbers can't be compared: base_emb_dim must be the teacher's"
      )
    if not (self._value("scan_layers") and self._of_teacher("scan_layers")):
      yield f"{self._at('distill_beta')}: MaxText gives features out only with scan_layers=true, of both models"
    counts = {
      "distill_layer_indices": self._value("base_num_decoder_layers"),
      "distill_teacher_layer_indices": self._of_teacher("base_num_decoder_layers"),
    }
    for name, value in layers.items():
      yield from self._layer_numbers(name, value, counts[name])
    student = layers["distill_layer_indices"]
    teacher = layers["distill_teacher_layer_indices"] or student
    length = {len(student or range(self._value("base_num_decoder_layers")))}
    length.add(len(teacher or range(self._of_teacher("base_num_decoder_layers"))))
    if len(length) > 1:
      yield (
        f"{self._at('distill_teacher_layer_indices')}: {sorted(length)[0]} and {sorted(length)[1]} layers can't be"
        " compared; name as many of the teacher's as of the student's (distill_layer_indices)"
      )

  def _layer_numbers(self, name: str, value: Any, count: int) -> Iterator[str]:
    if value is None or isinstance(value, int):
      return
    if not value or not all(isinstance(index, int) and not isinstance(index, bool) for index in value):
      yield f"{self._at(name)}: must be a list of layer numbers, such as [0, 2]"
    elif not all(0 <= index < count for index in value):
      yield f"{self._at(name)}: the model's layers are 0 to {count - 1}"
    elif len(set(value)) != len(value):
      yield f"{self._at(name)}: names a layer twice"

  def _start(self) -> Iterator[str]:
    layers = self._value("student_init_from_teacher_layers")
    if layers is None:
      return
    at = self._at("student_init_from_teacher_layers")
    for name in _CHECKPOINTS:
      if self._value(name):
        yield (
          f"{at}: {name} gives the student its weights; set one of them (student_overrides.{name}='' takes it from the"
          " student alone)"
        )
    if self._value("offline_data_dir"):
      yield f"{at}: with offline_data_dir there is no teacher to take layers from"
    if self._teacher is None:
      return
    count = self._of_teacher("base_num_decoder_layers")
    bad = list(self._layer_numbers("student_init_from_teacher_layers", layers, count))
    yield from bad
    if not bad:
      chosen = teacher_layers(layers, count)
      if len(chosen) != self._value("base_num_decoder_layers"):
        yield (
          f"{at}: takes {len(chosen)} of the teacher's {count} layers, and the student has"
          f" {self._value('base_num_decoder_layers')}; set student_overrides.base_num_decoder_layers={len(chosen)}"
        )
    for name in _SAME_SIZES:
      if self._value(name) != self._of_teacher(name):
        yield f"{at}: {name} is {plain(self._value(name))} and the teacher's {plain(self._of_teacher(name))}"


def teacher_layers(layers: int | list[int], count: int) -> list[int]:
  """The teacher's layers a student starts from: as listed, or every k-th of `count` from the first on."""
  return list(range(0, count, layers)) if isinstance(layers, int) else list(layers)
