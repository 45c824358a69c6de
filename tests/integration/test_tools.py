"""`inspect`, `convert` and `diff` on a MaxText model, and real pre-training doing what `inspect` says it would."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from maxtext.common import checkpointing
from tunix.sft import checkpoint_manager as tunix_checkpoint_manager

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.checkpointing.inspection import inspect_step
from tests.support import broken, runs, toys
from tests.support.cli import run_cli

pytestmark = pytest.mark.slow

STEP = broken.STEP

# What each kind of verdict rests on; `broken.ANSWERS` holds all of them, each seen with real pre-training once.
REFUSED = (
  "keys of two words",
  "clip in the chain",
  "list too short",
  "no schedule count",
  "dict for a list",
  "step vector",
  "moments of another shape",
  "adapter level",
  "MultiSteps",
  "inject_hyperparams",
)
GOES_ON = ("no step", "moments without params")


def slug(name: str) -> str:
  return name.replace(" ", "-")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return tmp_path_factory.mktemp("tools")


@pytest.fixture(scope="module")
def argv(folder: Path) -> list[str]:
  return runs.arguments(folder, "model", "steps=5")


@pytest.fixture(scope="module")
def pretraining_state(argv: list[str]) -> tuple[Any, Any, Any]:
  maxtext_api.use_pretraining_prng()
  config = maxtext_api.build_config(runs.sft_overrides(argv))
  mesh = maxtext_api.build_mesh(config)
  return config, mesh, maxtext_api.pretraining_state(config, mesh)


@pytest.fixture(scope="module")
def tunix_run(folder: Path, pretraining_state: tuple[Any, Any, Any]) -> dict[str, Any]:
  """A run in Tunix's layout, by Tunix's own manager: behind the adapter, with a clip in the chain."""
  config, mesh, pretraining = pretraining_state
  model = maxtext_api.init_model(config, pretraining, mesh)
  adapter = toys.TunixMaxTextAdapter(model)
  tx = optax.chain(optax.clip_by_global_norm(1.0), pretraining.tx)
  optimizer = nnx.Optimizer(adapter, tx, wrt=nnx.Param)
  rng = np.random.default_rng(0)

  def noise(leaf: Any) -> Any:
    return jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)

  step = nnx.jit(lambda adapter, optimizer, grads: optimizer.update(adapter, grads))
  for _ in range(STEP):
    step(adapter, optimizer, jax.tree.map(noise, nnx.state(adapter, nnx.Param)))
  manager = tunix_checkpoint_manager.CheckpointManager(str(folder / "tunix" / "checkpoints"))
  manager.save(STEP, adapter, optimizer, force=True)
  manager.close()
  return {"model": model, "optimizer": optimizer, "run": folder / "tunix"}


@pytest.fixture(scope="module")
def converted(folder: Path, argv: list[str], tunix_run: dict[str, Any]) -> Path:
  from maxtext_posttrain.cli import main

  new = folder / "converted"
  assert main(["convert", str(tunix_run["run"]), str(new), "--config", argv[0], *argv[1:]]) == 0
  return new


def refusal(config: Any, pretraining: Any, folder: Path, argv: list[str], run: str | None) -> str | None:
  """What pre-training's own restoring says against a checkpoint, given as in `argv`; None where it says nothing.

  Args:
    run: the run's name, where it is given by that.
  """
  given = dict(argument.split("=", 1) for argument in argv if "=" in argument)
  manager: Any = None
  if run is not None:
    manager = checkpointing.create_orbax_checkpoint_manager(
      str(folder / run / "checkpoints"), enable_checkpointing=True, use_async=False, save_interval_steps=1000
    )
  try:
    checkpointing.load_state_if_possible(
      manager,
      None,
      given.get("load_parameters_path", ""),
      given.get("load_full_state_path", ""),
      config.checkpoint_storage_concurrent_gb,
      pretraining.state,
      maxtext_config=config,
    )
  except Exception as error:  # It raises many types.
    return f"{type(error).__name__}: {error}"
  return None


@pytest.fixture(scope="module")
def pretrained(
  folder: Path, argv: list[str], pretraining_state: tuple[Any, Any, Any], tunix_run: dict[str, Any], converted: Path
) -> dict[tuple[str, str], dict[str, Any]]:
  """What pre-training made of each checkpoint, by its name and the way it was given.

  It is started for those that its restoring takes; that alone tells for the others, in a fraction of the time.
  """
  config, _, pretraining = pretraining_state
  items = broken.concrete(maxtext_api.to_checkpoint_dict(pretraining.state))
  results: dict[tuple[str, str], dict[str, Any]] = {}
  jobs: dict[tuple[str, str], list[str]] = {}

  def add(name: str, run: str, way: str) -> None:
    steps = (0 if way == "load_parameters_path" else STEP) + 2
    job = runs.pretraining_argv(
      argv, way=way, run_name=run, new_run_name=f"{run}-{way}", step=STEP, steps=steps, checkpoint_period=1000
    )
    error = refusal(config, pretraining, folder, job, run if way == "run_name" else None)
    if error is None:
      jobs[name, way] = job
    else:
      results[name, way] = {"error": error, "losses": {}}

  for name in (*REFUSED, *GOES_ON):
    step = folder / slug(name) / "checkpoints" / str(STEP)
    broken.write_step(step, broken.EDITS[name](items), {"scan_layers": True})
    add(name, slug(name), "load_full_state_path")
  add("clip in the chain", slug("clip in the chain"), "run_name")
  add("keys of two words", slug("keys of two words"), "load_parameters_path")
  add("adapter level", slug("adapter level"), "load_parameters_path")
  for way in ("run_name", "load_full_state_path", "load_parameters_path"):
    add("tunix", "tunix", way)
  # A folder of its own: pre-training writes beside what it resumes by name.
  shutil.copytree(converted, folder / "resumed")
  add("converted", "resumed", "run_name")
  return results | dict(zip(jobs, runs.pretraining(list(jobs.values()), folder), strict=True))


@pytest.mark.parametrize("name", [*REFUSED, *GOES_ON])
def test_pretraining_does_what_inspect_says(pretrained: dict, folder: Path, name: str):
  inspection = inspect_step(folder / slug(name) / "checkpoints" / str(STEP))
  assert inspection.diagnosis is not None
  for (of, way), result in pretrained.items():
    if of == name:
      said = inspection.diagnosis.verdict(way).answer
      assert (result["error"] is None) == (said != "no"), (way, said, result["error"])


def test_what_is_lost_is_lost(pretrained: dict):
  assert min(pretrained["no step", "load_full_state_path"]["losses"]) == 0
  assert min(pretrained["moments without params", "load_full_state_path"]["losses"]) == STEP


@pytest.mark.parametrize("way", ["run_name", "load_full_state_path", "load_parameters_path"])
def test_pretraining_refuses_tunixs_layout_as_inspect_says(pretrained: dict, tunix_run: dict[str, Any], way: str):
  inspection = inspect_step(tunix_run["run"])
  assert inspection.layout == "tunix"
  assert inspection.diagnosis is not None
  assert inspection.diagnosis.verdict(way).answer == "no"
  assert pretrained["tunix", way]["error"] is not None


def test_pretraining_resumes_what_convert_wrote(pretrained: dict):
  result = pretrained["converted", "run_name"]
  assert result["error"] is None
  assert min(result["losses"]) == STEP


def test_converted_arrays_are_those_of_the_trainer(tunix_run: dict[str, Any], converted: Path):
  items = {tuple(map(str, path)): leaf for path, leaf in runs.items(converted / "checkpoints" / str(STEP)).items()}
  weights = nnx.to_flat_state(nnx.state(tunix_run["model"], nnx.Param))
  adam = tunix_run["optimizer"].opt_state[1][0]
  moments = {name: dict(nnx.to_flat_state(getattr(adam, name))) for name in ("mu", "nu")}
  assert len(items) == 3 * len(weights) + 3
  for path, variable in weights:
    np.testing.assert_array_equal(items[("params", "params", *path)], variable.get_value())
    for name in ("mu", "nu"):
      moment = moments[name][("base", *path)].get_value()
      np.testing.assert_array_equal(items[("opt_state", "0", name, "params", *path)], moment)
      assert np.any(moment)
  assert {int(items[path]) for path in (("step",), ("opt_state", "0", "count"), ("opt_state", "2", "count"))} == {STEP}


def test_inspect_of_both_layouts_and_the_commands_it_names(
  tunix_run: dict[str, Any], converted: Path, capfd: pytest.CaptureFixture[str]
):
  before = run_cli(["inspect", str(tunix_run["run"]), "--json"], capfd)
  assert before.code == 0
  document = json.loads(before.out)
  assert document["layout"] == "tunix"
  assert document["optimizer"] == {"name": "adamw", "wrappers": ["a link before it (a clip)"]}
  assert [command["name"] for command in document["next"]] == ["convert"]
  requirements = ["layout=maxtext", f"step={STEP}", f"folder={STEP}", "resumable=true", "optimizer=adamw"]
  after = run_cli(["inspect", str(converted), "--require", *requirements, "scan_layers=true"], capfd)
  assert (after.code, after.errors) == (0, [])
  assert f"run_name={converted.name}" in after.out
  assert f"load_full_state_path={converted}/checkpoints/{STEP}/items" in after.out
  assert "base_emb_dim=32" in after.out
  for command in ("generate", "eval", "export"):
    assert f"posttrain {command} {converted}" in after.out


def test_convert_refuses_what_does_not_fit(
  folder: Path, argv: list[str], tunix_run: dict[str, Any], converted: Path, capfd: pytest.CaptureFixture[str]
):
  run, new = str(tunix_run["run"]), str(folder / "refused")
  cases = {
    "exists; name a folder that does not": ["convert", run, str(converted), "--config", *argv],
    "in MaxText's layout already": ["convert", str(converted), new, "--config", *argv],
    "(256, 32) on disk, (512, 32) wanted": ["convert", run, new, "--config", *argv, "vocab_size=512"],
    "in the checkpoint, but not in the model": ["convert", run, new, "--config", *argv, "logits_via_embedding=true"],
    "pre-training's optimizer keeps": ["convert", run, new, "--config", *argv, "opt_type=muon"],
    "missing": ["convert", run, new, "--config", *argv, "scan_layers=false"],
  }
  for message, command in cases.items():
    outcome = run_cli(command, capfd)
    assert outcome.code == 1, command
    assert len(outcome.errors) == 1, outcome.err
    assert message in outcome.errors[0]
    assert not Path(new).exists()
    assert not list(folder.glob("*.unfinished"))


def test_converted_weights_alone_where_no_optimizer_is_stored(
  folder: Path, argv: list[str], tunix_run: dict[str, Any], capfd: pytest.CaptureFixture[str]
):
  manager = tunix_checkpoint_manager.CheckpointManager(str(folder / "bare" / "checkpoints"))
  manager.save(2, tunix_run["model"], None, force=True)
  manager.close()
  new = folder / "bare-converted"
  outcome = run_cli(["convert", str(folder / "bare"), str(new), "--config", *argv], capfd)
  assert (outcome.code, outcome.errors) == (0, [])
  required = ["layout=weights", "resumable=false", "load_full_state_path=partly", "load_parameters_path=yes"]
  assert run_cli(["inspect", str(new), "--require", *required], capfd).code == 0
