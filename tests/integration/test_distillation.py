"""Distillation of a tiny student from a tiny teacher: the numbers, what is saved, a kill, the files, and pre-training.

One run of the command line is shared by most tests: four updates of two micro-batches, with features and a mixture that
changes.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtext_posttrain import cli, maxtext_api
from maxtext_posttrain.checkpointing.metadata import flatten_tree
from maxtext_posttrain.config import load_config
from maxtext_posttrain.handback import pretraining_arguments
from tests.support import runs
from tests.support.cli import run_cli

pytestmark = pytest.mark.slow

VOCAB = 96
STEPS = 4
TINY = (
  f"vocab_size={VOCAB}",
  "base_emb_dim=16",
  "base_mlp_dim=32",
  "base_num_query_heads=2",
  "base_num_kv_heads=1",
  "head_dim=8",
  "base_num_decoder_layers=4",
  "dataset_type=synthetic",
  "max_target_length=16",
  "per_device_batch_size=2",
  "enable_tensorboard=false",
  "log_every=1",
)
MIXED = (
  "distill_divergence=jsd",
  "distill_jsd_beta=0.3",
  "distill_alpha=0.8",
  "distill_alpha_end=0.2",
  "distill_alpha_schedule=linear",
  "distill_temperature=2.0",
  "distill_beta=0.5",
  "distill_layer_indices=[0,1]",
  "distill_teacher_layer_indices=[1,3]",
  "student_init_from_teacher_layers=[0,2]",
  "gradient_accumulation_steps=2",
  "checkpoint_period=2",
  "learning_rate=1e-2",
)


@dataclasses.dataclass(frozen=True)
class Room:
  """A folder with a teacher that SFT trained."""

  folder: Path
  teacher: Any

  @property
  def items(self) -> str:
    return str(self.folder / "teacher" / "checkpoints" / "2" / "items")

  def argv(self, run_name: str, *extra: str) -> list[str]:
    """The configuration's arguments; of a key that is given twice, the last counts."""
    keys = (
      f"run_name={run_name}",
      f"base_output_directory={self.folder}",
      f"steps={STEPS}",
      "learning_rate_schedule_steps=8",
      "student_overrides.base_num_decoder_layers=2",
      f"teacher_overrides.load_parameters_path={self.items}",
      *TINY,
      *extra,
    )
    last = dict(key.partition("=")[::2] for key in keys if "=" in key)
    return [str(self.folder / "distill.yml"), *(f"{key}={value}" for key, value in last.items())]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Room:
  folder = tmp_path_factory.mktemp("distillation")
  for name in ("sft", "distillation"):
    text = f"base_config: [{name}.yml, models/tiny.yml]\n"
    (folder / f"{name.removesuffix('ation')}.yml").write_text(text, encoding="utf-8")
  run = (f"base_output_directory={folder}", "run_name=teacher", "steps=2", "learning_rate=3e-2")
  return Room(folder, runs.sft_session([str(folder / "sft.yml"), *run, *TINY]))


@pytest.fixture(scope="module")
def finished(room: Room) -> Path:
  """`posttrain distill` to its end, in a process of its own."""
  process = runs.DistillProcess(room.argv("finished", *MIXED), room.folder / "finished.log")
  assert process.wait() == 0, process.output()
  return room.folder / "finished"


def by_path(model: nnx.Module) -> dict[tuple, np.ndarray]:
  return {tuple(p): np.asarray(v.get_value()) for p, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def log_softmax(logits: np.ndarray) -> np.ndarray:
  logits = logits - logits.max(-1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def outputs(config: Any, model: nnx.Module, batch: dict[str, jax.Array]) -> tuple[np.ndarray, np.ndarray]:
  """Logits and the attention's outputs, float64."""
  logits = maxtext_api.forward(config, model, batch, is_train=False)
  features = maxtext_api.pop_attention_outputs(model)
  assert features is not None
  return np.asarray(logits, np.float64), np.asarray(features, np.float64)


def expected_first_step(room: Room) -> dict[str, float]:
  """The first update's loss and its parts, in NumPy float64 from both models' logits."""
  from maxtext_posttrain.trainers.distillation import Distillation, teacher_model

  config = load_config(room.argv("expected", *MIXED), trainer="distill")
  student_config = maxtext_api.build_config(config.maxtext_overrides())
  teacher_config = teacher_model(config).maxtext
  mesh = maxtext_api.build_mesh(student_config)
  sums = dict.fromkeys(("distillation", "cross_entropy", "features"), 0.0)
  count = 0
  with maxtext_api.mesh_context(student_config, mesh):
    student, teacher = (
      maxtext_api.init_model(each, maxtext_api.pretraining_state(each, mesh), mesh)
      for each in (student_config, teacher_config)
    )
    nnx.update(teacher, nnx.state(room.teacher.trainer.model, nnx.Param))
    Distillation().init_weights(student, {"teacher": teacher}, config, student_config)
    assert_starts_as_layers(by_path(student), by_path(teacher), [0, 2])
    batches = Distillation().prepare_data(config).train.dataset(batch_size=2).iterator()
    for _ in range(2):
      batch = {key: jnp.asarray(value) for key, value in next(batches).items()}
      logits, features = outputs(student_config, student, batch)
      teacher_logits, teacher_features = outputs(teacher_config, teacher, batch)
      log_q, log_p = log_softmax(logits / 2), log_softmax(teacher_logits / 2)
      q, p = np.exp(log_q), np.exp(log_p)
      log_m = np.log(0.3 * p + 0.7 * q)
      sums["distillation"] += 4 * (0.3 * p * (log_p - log_m) + 0.7 * q * (log_q - log_m)).sum()
      targets = np.asarray(batch["targets"])[..., None]
      sums["cross_entropy"] -= np.take_along_axis(log_softmax(logits), targets, -1).sum()
      chosen = teacher_features[[1, 3]]
      norms = np.linalg.norm(features, axis=-1) * np.linalg.norm(chosen, axis=-1)
      sums["features"] += (1 - (features * chosen).sum(-1) / norms).mean(0).sum()
      count += targets.size
    batches.close()
  means = {name: total / count for name, total in sums.items()}
  return {"loss": 0.8 * means["distillation"] + 0.2 * means["cross_entropy"] + 0.5 * means["features"], **means}


def assert_starts_as_layers(
  student: dict[tuple, np.ndarray], teacher: dict[tuple, np.ndarray], layers: list[int]
) -> None:
  for path, array in student.items():
    want = teacher[path][:, layers] if path[:2] == ("decoder", "layers") else teacher[path]
    np.testing.assert_array_equal(array, want, err_msg=str(path))


def test_the_first_steps_loss_is_the_formulas(room: Room, finished: Path):
  first = runs.metrics(finished)[0]
  for name, value in expected_first_step(room).items():
    assert first[name] == pytest.approx(value, rel=2e-5), name


def test_the_page_says_what_the_student_starts_as(finished: Path):
  facts = json.loads((finished / "run.json").read_text(encoding="utf-8"))["facts"]
  assert facts["Started from"] == "the teacher, student_init_from_teacher_layers=[0, 2]"


def test_the_mixture_follows_its_schedule(finished: Path):
  records = runs.metrics(finished)
  assert [each["distill_alpha"] for each in records] == pytest.approx([0.8, 0.65, 0.5, 0.35])
  assert "distill_temperature" not in records[0]
  for each in records:
    alpha = each["distill_alpha"]
    mixed = alpha * each["distillation"] + (1 - alpha) * each["cross_entropy"] + 0.5 * each["features"]
    assert each["loss"] == pytest.approx(mixed, rel=1e-5)


def test_the_budget_ends_the_run_and_only_the_student_is_saved(room: Room, finished: Path):
  assert [record["step"] for record in runs.metrics(finished)] == [1, 2, 3, 4]
  steps = sorted(int(path.name) for path in (finished / "checkpoints").iterdir() if path.name.isdigit())
  assert steps == [2, STEPS]
  items = runs.items(finished / "checkpoints" / str(STEPS))
  counts = {path: int(leaf) for path, leaf in items.items() if path[-1] in ("step", "count") and leaf.dtype == np.int32}
  assert set(counts.values()) == {STEPS}
  config = load_config(room.argv("tree", *MIXED), trainer="distill")
  maxtext = maxtext_api.build_config(config.maxtext_overrides())
  state = maxtext_api.pretraining_state(maxtext, maxtext_api.build_mesh(maxtext)).state
  expected = flatten_tree(maxtext_api.to_checkpoint_dict(state))
  assert sorted(tuple(map(str, path)) for path in items) == sorted(tuple(map(str, path)) for path in expected)


def test_a_kill_in_the_middle_changes_no_bit(room: Room, finished: Path):
  """Killed after step 3, whose checkpoint is step 2's; then one more step than the budget of the first is not made."""
  argv = room.argv("killed", *MIXED)
  process = runs.DistillProcess(argv, room.folder / "killed.log")
  assert process.wait_for(room.folder / "killed", 3), process.output()
  process.kill()
  process = runs.DistillProcess(argv, room.folder / "killed.again.log")
  assert process.wait() == 0, process.output()
  assert "distill: step 2 of 4, ready" in process.output() or "distill: step 4 of 4, ready" in process.output()
  ours, theirs = (run / "checkpoints" / str(STEPS) for run in (room.folder / "killed", finished))
  runs.assert_same_items(runs.items(ours), runs.items(theirs))
  assert runs.metrics(room.folder / "killed") == runs.metrics(finished)


def test_pretraining_goes_on_from_it(room: Room, finished: Path):
  argv = room.argv("finished", *MIXED)
  overrides = load_config(argv, trainer="distill").maxtext_overrides()
  way = {"way": "load_full_state_path", "run_name": "finished", "new_run_name": "handed_back"}
  arguments = pretraining_arguments(overrides, step=STEPS, steps=STEPS + 2, **way)
  [result] = runs.pretraining([[*arguments, "dataset_type=synthetic"]], room.folder)
  assert result["error"] is None, result["log"]
  assert [step for step in result["losses"] if step >= STEPS] == [STEPS, STEPS + 1]
  assert all(np.isfinite(loss) for loss in result["losses"].values())


@pytest.fixture(scope="module")
def saved(room: Room) -> Path:
  """All tokens of the vocabulary, kept by `posttrain teacher-logits`."""
  folder = room.folder / "logits"
  assert cli.main(["teacher-logits", *room.argv("x"), f"--top-k={VOCAB}", f"--output={folder}"]) == 0
  return folder


def test_training_from_files_is_training_with_the_teacher(room: Room, saved: Path):
  """With k = vocabulary: the same losses but for rounding."""
  keys = ("learning_rate=1e-2", "distill_temperature=2.0", "steps=2")
  records = []
  for name, extra in (("online", ()), ("offline", (f"offline_data_dir={saved}",))):
    process = runs.DistillProcess(room.argv(name, *keys, *extra), room.folder / f"{name}.log")
    assert process.wait() == 0, process.output()
    records.append(runs.metrics(room.folder / name))
  for online, offline in zip(*records, strict=True):
    for name in ("loss", "distillation", "cross_entropy", "grad_norm"):
      assert offline[name] == pytest.approx(online[name], rel=1e-4), name


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["data_shuffle_seed=5"], "its train logits are of other data"),
    (["vocab_size=100"], "its teacher has vocab_size=96, the student 100"),
  ],
)
def test_files_of_something_else_are_refused(
  room: Room, saved: Path, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
):
  outcome = run_cli(["distill", *room.argv("refused", f"offline_data_dir={saved}", *arguments)], capfd)
  assert outcome.code == 1
  assert message in outcome.err
  assert not (room.folder / "refused" / "checkpoints").exists()


def test_what_saves_logits_refuses_what_it_cannot_do(room: Room, saved: Path, capfd: pytest.CaptureFixture[str]):
  for arguments, message in (
    ([f"--output={saved}"], "exists already"),
    (["--output=new", "--top-k=0"], "--top-k is 0"),
    (["--output=new", f"--top-k={VOCAB + 1}"], "the vocabulary has 96 tokens"),
    (["--output=new", f"offline_data_dir={saved}"], "the teacher is to be run"),
    (["--output=new", "--surplus"], "--surplus"),
    (["--output=new", "surplus"], "key=value"),
    ([], "--output"),
  ):
    outcome = run_cli(["teacher-logits", *room.argv("x"), *arguments], capfd)
    assert outcome.code == 2
    assert message in outcome.err
