"""Every trainer on meshes of eight simulated devices: the numbers of one device, checkpoints that cross between them.

Two processes make all runs, one with a single device and one with eight; what they left is compared here.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxtext_posttrain.report import read_metrics
from tests.support import devices, runs
from tests.support.devices import Jobs, job

pytestmark = pytest.mark.slow

TRAINERS = ("sft", "dpo", "distill", "grpo")
MESHES = {
  "data": {"data": 8},
  "fsdp": {"fsdp": 8},
  "tensor": {"tensor": 8},
  "mixed": {"data": 2, "fsdp": 2, "tensor": 2},
}
RUNS = [(trainer, name) for trainer in TRAINERS for name in MESHES]
RELATIVE = 1e-5
ADAPTER = ("lora.enable_lora=true", "lora_fresh_base=true", "lora.lora_rank=4", "lora.lora_alpha=8")
COMPARED = ("loss", "grad_norm", "entropy", "kl", "logps/chosen", "logps/rejected", "distillation", "cross_entropy")
COUNTED = ("tokens", "trained_tokens", "pairs", "loss_weight", "reward", "completion_tokens_mean")


@dataclasses.dataclass(frozen=True)
class Room:
  """The runs' folder, and how each ended."""

  folder: Path
  outcomes: dict[str, str | None]

  def records(self, run: str) -> list[dict[str, Any]]:
    assert self.outcomes.get(run) is None, self.outcomes[run]
    return list(read_metrics(self.folder / run / "metrics.jsonl"))

  def items(self, run: str, step: int) -> dict[tuple[Any, ...], np.ndarray]:
    checkpoints = self.folder / run / "checkpoints"
    role = checkpoints / "actor"
    return devices.items((role if role.exists() else checkpoints) / str(step))


def branch(folder: Path, run: str, name: str) -> None:
  """A copy of a run as a kill after its first checkpoint leaves it."""
  copy = folder / name
  shutil.copytree(folder / run, copy)
  shutil.rmtree(copy / "checkpoints" / "2")


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Room:
  folder = devices.write_room(tmp_path_factory.mktemp("devices") / "room")
  alone = [job(folder, "sft", "teacher", 1)]
  alone += [job(folder, trainer, f"{trainer}-one", 1) for trainer in TRAINERS]
  alone += [job(folder, "sft", "lora-one", 1, *ADAPTER)]
  outcomes = Jobs(folder, "alone", alone, devices=1).results()
  branch(folder, "sft-one", "from-one-to-fsdp")
  together = [job(folder, trainer, f"{trainer}-{name}", 8, **MESHES[name]) for trainer, name in RUNS]
  together += [
    job(folder, "sft", "lora-mixed", 8, *ADAPTER, **MESHES["mixed"]),
    job(folder, "sft", "from-one-to-fsdp", 8, fsdp=8),
    job(folder, "sft", "uneven", 16, fsdp=8),
    job(folder, "sft", "no-mesh", 8, fsdp=3),
  ]
  outcomes |= Jobs(folder, "together", together, devices=8).results()
  for name in ("from-fsdp-to-tensor", "from-fsdp-to-one"):
    branch(folder, "sft-fsdp", name)
  outcomes |= Jobs(folder, "again", [job(folder, "sft", "from-fsdp-to-tensor", 8, tensor=8)], devices=8).results()
  outcomes |= Jobs(folder, "back", [job(folder, "sft", "from-fsdp-to-one", 1)], devices=1).results()
  return Room(folder, outcomes)


def assert_same_numbers(have: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
  assert [(each["kind"], each["step"]) for each in have] == [(each["kind"], each["step"]) for each in want]
  for ours, theirs in zip(have, want, strict=True):
    for name in theirs.keys() & {*COMPARED, *COUNTED}:
      # The GRPO loss is a sum of advantages that nearly cancel: what it is small against is 1.
      where = f"{theirs['kind']} {theirs['step']} {name}"
      np.testing.assert_allclose(ours[name], theirs[name], rtol=RELATIVE, atol=1e-6, err_msg=where)


@pytest.mark.parametrize(("trainer", "mesh"), RUNS)
def test_a_mesh_gives_the_numbers_of_one_device(room: Room, trainer: str, mesh: str):
  assert_same_numbers(room.records(f"{trainer}-{mesh}"), room.records(f"{trainer}-one"))


@pytest.mark.parametrize(("trainer", "mesh"), RUNS)
def test_a_mesh_gives_the_gradients_and_weights_of_one_device(room: Room, trainer: str, mesh: str):
  """After the first update Adam's mean is a tenth of the gradient; each leaf is compared with its largest number."""
  have, want = (room.items(f"{trainer}-{name}", 1) for name in (mesh, "one"))
  assert have.keys() == want.keys()
  gradients = [path for path in want if path[0] == "opt_state" and "mu" in map(str, path)]
  assert gradients
  for path in gradients:
    largest = np.abs(want[path]).max()
    assert largest > 0, path
    np.testing.assert_allclose(have[path], want[path], rtol=0, atol=RELATIVE * largest, err_msg=str(path))
  for path in want.keys() - {path for path in want if path[0] == "opt_state"}:
    if np.issubdtype(want[path].dtype, np.floating):
      # Where a gradient is as small as its rounding, Adam makes a step of it all the same.
      apart = np.abs(have[path] - want[path]) > 1e-6 + RELATIVE * np.abs(want[path])
      assert apart.mean() < 1e-3, path
    else:
      np.testing.assert_array_equal(have[path], want[path], err_msg=str(path))


@pytest.mark.parametrize("mesh", MESHES)
def test_a_policy_starts_at_its_reference_on_every_mesh(room: Room, mesh: str):
  first = next(each for each in room.records(f"dpo-{mesh}") if each["kind"] == "train")
  np.testing.assert_allclose(first["loss"], np.log(2), rtol=1e-6)


@pytest.mark.parametrize("mesh", MESHES)
def test_the_engine_agrees_with_the_trainer_on_every_mesh(room: Room, mesh: str):
  """What the engine says of its own tokens, and what a forward pass over them says."""
  for each in room.records(f"grpo-{mesh}"):
    if each["kind"] == "train":
      assert each["engine_gap"] < 1e-6


def test_an_adapter_on_a_mesh(room: Room):
  assert_same_numbers(room.records("lora-mixed"), room.records("lora-one"))
  have, want = (room.items(run, 1) for run in ("lora-mixed", "lora-one"))
  assert have.keys() == want.keys()
  assert {path[-1] for path in want if path[0] == "params"} == {"kernel_lora_a", "kernel_lora_b"}


@pytest.mark.parametrize("name", ["from-one-to-fsdp", "from-fsdp-to-tensor", "from-fsdp-to-one"])
def test_a_run_goes_on_on_another_mesh(room: Room, name: str):
  assert_same_numbers(room.records(name), room.records("sft-one"))
  outcome = (room.folder / name / "run.json").read_text(encoding="utf-8")
  assert '"first_step": 1' in outcome.replace('"first_step":1', '"first_step": 1')


def test_a_batch_that_the_devices_can_not_share_is_refused(room: Room):
  said = room.outcomes["uneven"]
  assert said is not None
  assert said.startswith("ConfigError: per_device_batch_size=0.5: micro-batches of 4 sequences")


def test_a_mesh_that_does_not_fit_the_devices_is_refused(room: Room):
  said = room.outcomes["no-mesh"]
  assert said is not None
  assert "do not fit 8 device(s)" in said


def test_pretraining_goes_on_on_another_mesh(room: Room):
  """Real pre-training from one checkpoint, on one device and on eight: the same losses."""
  argv = job(room.folder, "sft", "sft-fsdp", 1)["argv"]
  losses = []
  for count, run, mesh in ((1, "sft-fsdp", {}), (8, "sft-one", {"fsdp": 4, "tensor": 2}), (8, "sft-fsdp", {"data": 8})):
    argv = job(room.folder, "sft", run, count, **mesh)["argv"]
    going_on = runs.pretraining_argv(
      argv, way="load_full_state_path", run_name=run, step=2, steps=4, new_run_name=f"pre-{count}-{run}"
    )
    environment = devices.environment(count)
    (result,) = runs.pretraining([going_on], room.folder, environment=environment)
    assert result["error"] is None, result["log"][-3000:]
    losses.append(result["losses"])
  assert set(losses[0]) == {2, 3}
  for other in losses[1:]:
    for step, loss in losses[0].items():
      np.testing.assert_allclose(other[step], loss, rtol=RELATIVE)


@pytest.mark.parametrize(("batch", "right"), [(("data", "fsdp"), False), (("fsdp", "data"), True)])
def test_xla_swaps_shards_of_a_batch_along_data_and_fsdp(tmp_path: Path, batch: tuple[str, str], right: bool):
  """Why `maxtext_api.build_config` turns the two round; where this fails for the first order, it need not any more."""
  process = runs.FORKSERVER.Process(
    target=_product_on_a_mesh, args=(str(tmp_path / "ok"), batch, devices.environment(8))
  )
  process.start()
  process.join()
  assert (tmp_path / "ok").read_text() == str(right)


def _product_on_a_mesh(result: str, batch: tuple[str, str], environment: dict[str, str]) -> None:
  """Whether a product of few rows with spread weights is right on a mesh of data=2, fsdp=2, tensor=2."""
  os.environ.update(environment)
  import jax
  from jax.sharding import Mesh, NamedSharding, PartitionSpec

  mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "fsdp", "tensor"))
  random = np.random.default_rng(0)
  rows, weights = random.normal(size=(8, 64)).astype(np.float32), random.normal(size=(64, 32)).astype(np.float32)

  def product(rows: jax.Array, weights: jax.Array) -> jax.Array:
    sharding = NamedSharding(mesh, PartitionSpec(batch, "tensor"))
    rows = jax.lax.with_sharding_constraint(rows, sharding)
    return jax.lax.with_sharding_constraint(rows @ weights, sharding)

  spread = jax.device_put(weights, NamedSharding(mesh, PartitionSpec("tensor", "fsdp")))
  whole = jax.jit(product, out_shardings=NamedSharding(mesh, PartitionSpec()))(rows, spread)
  Path(result).write_text(str(bool(np.allclose(whole, rows @ weights, atol=1e-4))))
