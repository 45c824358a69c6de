"""A distillation's configuration: whose keys are whose, and what is refused before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from maxtext_posttrain.config import Config, load_config, load_model_config
from maxtext_posttrain.errors import ConfigError

BASE = """\
base_config: [distillation.yml, models/tiny.yml]
run_name: r
base_output_directory: out
steps: 10
dataset_type: synthetic
vocab_size: 256
base_num_decoder_layers: 4
student_overrides:
  base_num_decoder_layers: 2
teacher_overrides:
  load_parameters_path: {items}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
  """A good configuration."""
  (tmp_path / "items").mkdir()
  file = tmp_path / "distill.yml"
  file.write_text(BASE.format(items=tmp_path / "items"), encoding="utf-8")
  return file


def load(path: Path, *arguments: str) -> Config:
  return load_config([str(path), *arguments], trainer="distill", environ={})


def test_the_student_has_its_overrides_and_the_teacher_its_own(path: Path):
  config = load(path, "teacher_overrides.dtype=bfloat16")
  teacher = config.teacher
  assert teacher is not None
  assert (config.base_num_decoder_layers, teacher.base_num_decoder_layers) == (2, 4)
  assert (config.dtype, teacher.dtype) == ("float32", "bfloat16")
  assert config.sources["base_num_decoder_layers"] == "student_overrides"
  assert (config.load_parameters_path, teacher.load_parameters_path) == ("", str(path.parent / "items"))
  ours, teachers = config.maxtext_overrides(), teacher.maxtext_overrides()
  assert (ours["base_num_decoder_layers"], teachers["base_num_decoder_layers"]) == (2, 4)
  assert not {"student_overrides", "teacher_overrides"} & (ours.keys() | teachers.keys())


def test_the_students_weights_are_not_the_teachers(path: Path):
  own = path.parent / "own"
  own.mkdir()
  config = load(path, f"load_parameters_path={own}")
  assert config.teacher is not None
  assert (config.load_parameters_path, config.teacher.load_parameters_path) == (str(own), str(path.parent / "items"))


def test_what_a_run_keeps_comes_to_the_same(path: Path):
  """config.yml of a run: again a distillation, and for the tools the student's model."""
  config = load(path, "student_overrides.base_mlp_dim=96")
  again = path.parent / "config.yml"
  again.write_text(yaml.safe_dump(config.chosen()), encoding="utf-8")
  second = load(again)
  assert second.teacher is not None
  assert config.teacher is not None
  assert second.as_dict() == config.as_dict()
  assert second.teacher.as_dict() == config.teacher.as_dict()
  assert load_model_config([str(again)], environ={}).base_mlp_dim == 96


def test_a_teacher_of_its_own_file(path: Path):
  """Its model is the file's; batch, devices and distillation's keys are the run's."""
  file = path.parent / "teacher.yml"
  file.write_text(
    "base_config: [sft.yml, models/tiny.yml]\nvocab_size: 256\nbase_emb_dim: 128\nmax_target_length: 7\n"
    "student_overrides: {base_mlp_dim: 512}\nload_parameters_path: elsewhere\n",
    encoding="utf-8",
  )
  config = load(path, f"teacher_config={file}", "max_target_length=32", "distill_temperature=3")
  teacher = config.teacher
  assert teacher is not None
  assert (teacher.base_emb_dim, teacher.base_mlp_dim, teacher.base_num_decoder_layers) == (128, 512, 2)
  assert (teacher.max_target_length, teacher.distill_temperature) == (32, 3.0)
  assert teacher.load_parameters_path == str(path.parent / "items")


def test_saved_logits_need_no_teacher(path: Path):
  config = load(path, f"offline_data_dir={path.parent}")
  assert config.teacher is None


def test_other_trainers_have_none_of_its_keys(path: Path):
  with pytest.raises(ConfigError, match="distill_divergence is a key of distill training"):
    load_config([str(path)], trainer="sft", environ={})


BAD: dict[str, tuple[list[str], str]] = {
  "no teacher": (["teacher_overrides.load_parameters_path=''"], "no teacher: set teacher_overrides"),
  "teacher's weights that are not there": (
    ["teacher_overrides.load_parameters_path=nowhere"],
    "teacher_overrides: load_parameters_path=nowhere: no such file or folder",
  ),
  "a full state for the teacher": (["teacher_overrides.load_full_state_path=x"], "a teacher has weights only"),
  "another vocabulary": (["teacher_overrides.vocab_size=512"], "the student has 256, the teacher 512"),
  "an unknown key of the student": (["student_overrides.base_emb_dmi=8"], "did you mean base_emb_dim"),
  "an unknown key of the teacher": (["teacher_overrides.base_emb_dmi=8"], "did you mean base_emb_dim"),
  "a value of another type": (["student_overrides.base_emb_dim=wide"], "student_overrides: base_emb_dim: expected a"),
  "a teacher's value of another type": (["teacher_overrides.head_dim=[1]"], "teacher_overrides: head_dim: expected a"),
  "overrides that are no mapping": (["student_overrides=3"], "student_overrides"),
  "overrides inside overrides": (["student_overrides.teacher_overrides={}"], "can't stand inside it"),
  "a batch of the teacher's own": (
    ["teacher_overrides.max_target_length=8"],
    "the teacher computes the student's batch",
  ),
  "a width the student can't have": (["student_overrides.base_emb_dim=0"], "base_emb_dim=0: must be at least 1"),
  "a teacher's file that is not there": (["teacher_config=nowhere.yml"], "nowhere.yml"),
  "alpha above 1": (["distill_alpha=1.5"], "distill_alpha=1.5: must be at least 0 and at most 1"),
  "alpha that ends below 0": (
    ["distill_alpha_end=-1", "distill_alpha_schedule=linear"],
    "distill_alpha_end=-1.0: must be at least 0",
  ),
  "a temperature of 0": (["distill_temperature=0"], "must be above 0"),
  "a negative weight of features": (["distill_beta=-0.1"], "must be at least 0"),
  "a schedule that goes nowhere": (["distill_temperature_schedule=linear"], "distill_temperature_end is missing"),
  "an end without a schedule": (["distill_alpha_end=0.9"], "distill_alpha_schedule=constant never gets there"),
  "an unknown schedule": (["distill_alpha_schedule=step"], "constant"),
  "an unknown divergence": (["distill_divergence=kl"], "forward_kl"),
  "a mixture above 1": (["distill_divergence=jsd", "distill_jsd_beta=2"], "distill_jsd_beta"),
  "a mixture without its divergence": (["distill_jsd_beta=0.1"], "belongs to distill_divergence=jsd"),
  "an unknown feature loss": (["distill_feature_loss_type=l1"], "cosine"),
  "layers without features": (["distill_layer_indices=[0]"], "no features are compared without distill_beta"),
  "features that start at 0": (
    ["distill_beta_end=1", "distill_beta_schedule=linear"],
    "distill_beta=0 leaves features out",
  ),
  "features of layers apart": (
    ["distill_beta=1", "scan_layers=false", "distill_layer_indices=[0]"],
    "scan_layers=true",
  ),
  "features of other widths": (
    ["distill_beta=1", "student_overrides.base_emb_dim=16", "distill_layer_indices=[0]"],
    "features of 16 and of 64 numbers",
  ),
  "features of unlike depths": (["distill_beta=1"], "2 and 4 layers can't be compared"),
  "a layer the student lacks": (
    ["distill_beta=1", "distill_layer_indices=[2]"],
    r"distill_layer_indices=\[2\]: the model's layers are 0 to 1",
  ),
  "a layer the teacher lacks": (
    ["distill_beta=1", "distill_layer_indices=[0]", "distill_teacher_layer_indices=[4]"],
    "the model's layers are 0 to 3",
  ),
  "a layer named twice": (["distill_beta=1", "distill_layer_indices=[0,0]"], "names a layer twice"),
  "no layers": (["distill_beta=1", "distill_layer_indices=[]"], "must be a list of layer numbers"),
  "features from files": (["distill_beta=1", "offline_data_dir=."], "hold no features"),
  "saved logits that are not there": (["offline_data_dir=nowhere"], "offline_data_dir=nowhere: no such folder"),
  "a start from files": (["student_init_from_teacher_layers=2", "offline_data_dir=."], "no teacher to take layers"),
  "a start from two places": (
    ["student_init_from_teacher_layers=2", "load_parameters_path=."],
    "load_parameters_path gives the student its weights",
  ),
  "a start with too many layers": (["student_init_from_teacher_layers=1"], "takes 4 of the teacher's 4 layers"),
  "a start with layers that are not there": (["student_init_from_teacher_layers=[0,4]"], "layers are 0 to 3"),
  "a start every 0 layers": (["student_init_from_teacher_layers=0"], "student_init_from_teacher_layers"),
  "a start at another width": (
    ["student_init_from_teacher_layers=2", "student_overrides.base_mlp_dim=8"],
    "base_mlp_dim is 8 and the teacher's 128",
  ),
  "learning to initialise": (["learn_to_init_mode=true"], "is not supported; use student_init_from_teacher_layers"),
  "a map of weights": (["distill_weights_copy_map.a=b"], "copying weights by pattern is not supported"),
  "parts of the student": (["student_params_to_update=[a]"], "use trainable_parameters_mask"),
  "another trainer's switch": (["use_dpo=true"], "it asks for DPO"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said(path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
  arguments, message = BAD[name]
  monkeypatch.chdir(path.parent)
  with pytest.raises(ConfigError, match=message) as caught:
    load(path, *arguments)
  assert len(set(caught.value.problems)) == len(caught.value.problems)


def test_every_problem_is_told_at_once(path: Path):
  arguments: list[Any] = ["distill_alpha=2", "distill_temperature=0", "teacher_overrides.vocab_size=3"]
  with pytest.raises(ConfigError) as caught:
    load(path, *arguments)
  assert len(caught.value.problems) == 3
