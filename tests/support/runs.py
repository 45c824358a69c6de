"""Tiny runs for integration tests: in this process, in another, and real pre-training over what they wrote."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from orbax.checkpoint import v1 as ocp

from maxtext_posttrain.checkpointing.metadata import flatten_tree
from maxtext_posttrain.config import load_config
from maxtext_posttrain.handback import pretraining_arguments
from maxtext_posttrain.report import read_metrics
from tests.conftest import REPOSITORY

TINY = (
  "base_config=models/tiny.yml",
  "vocab_size=256",
  "base_emb_dim=32",
  "base_mlp_dim=64",
  "dataset_type=synthetic",
  "max_target_length=32",
  "per_device_batch_size=2",
  "learning_rate=1e-2",
  "gradient_clipping_threshold=1.0",
  "enable_tensorboard=false",
)


def write_config(folder: Path) -> Path:
  """A tiny synthetic SFT configuration; everything else goes on the command line."""
  path = folder / "tiny_sft.yml"
  lines = ["base_config: [sft.yml, models/tiny.yml]"]
  lines += [argument.replace("=", ": ", 1) for argument in TINY[1:]]
  path.write_text("\n".join(lines) + "\n", encoding="utf-8")
  return path


def arguments(folder: Path, run_name: str, *extra: str) -> list[str]:
  return [str(write_config(folder)), f"run_name={run_name}", f"base_output_directory={folder}", *extra]


def sft_session(argv: Sequence[str]) -> Any:
  """A finished SFT in this process; its trainer holds the state in memory."""
  from maxtext_posttrain.trainers.base import Session
  from maxtext_posttrain.trainers.sft import SFT
  from maxtext_posttrain.trainers.signals import StopRequest

  session = Session(SFT(), load_config(argv))
  assert session.train(StopRequest()) == 0
  return session


def sft_process(argv: Sequence[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
  """`python -m train_sft` in another process."""
  return subprocess.run(
    [sys.executable, "-m", "train_sft", *argv], text=True, capture_output=True, check=False, cwd=REPOSITORY, **kwargs
  )


FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["maxtext_posttrain.trainers.sft"])


def enter_child(log: str, environment: Mapping[str, str]) -> None:
  """Makes a forked process one of its own: its output goes to a file, its variables are set."""
  os.environ.update(environment)
  descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
  os.dup2(descriptor, 1)
  os.dup2(descriptor, 2)
  os.chdir(REPOSITORY)


def leave_child(environment: Mapping[str, str]) -> None:
  """Of several processes of one run, does what the interpreter does as it ends: a forked process would leave it out."""
  if "JAX_PROCESS_ID" in environment:
    atexit._run_exitfuncs()


def _child(trainer: str, argv: list[str], log: str, environment: Mapping[str, str]) -> None:
  from maxtext_posttrain.cli import main

  enter_child(log, environment)
  code = main([trainer, *argv])
  leave_child(environment)
  sys.exit(code)


class SftProcess:
  """`posttrain sft` in a process of its own, forked from a server that has the imports behind it already."""

  trainer = "sft"

  def __init__(self, argv: Sequence[str], log: Path, environment: Mapping[str, str] | None = None):
    self.log = log
    self._process = FORKSERVER.Process(
      target=_child, args=(self.trainer, list(argv), str(log), dict(environment or {}))
    )
    self._process.start()

  @property
  def pid(self) -> int:
    assert self._process.pid is not None
    return self._process.pid

  @property
  def is_alive(self) -> bool:
    return self._process.is_alive()

  def wait_for(self, run: Path, step: int) -> bool:
    """Waits until the run's metrics hold a step; False where the process ended before."""
    path = run / "metrics.jsonl"
    while self.is_alive:
      if path.exists() and any(r["kind"] == "train" and r["step"] >= step for r in read_metrics(path)):
        return True
      time.sleep(0.002)
    return False

  def kill(self) -> None:
    """SIGKILL, and waits."""
    self._process.kill()
    self._process.join()

  def wait_at_most(self, seconds: float) -> int | None:
    """The exit code; None where the process does not end in time."""
    self._process.join(seconds)
    return self._process.exitcode

  def wait(self, seconds: float | None = None) -> int:
    """The exit code."""
    self._process.join(seconds)
    assert self._process.exitcode is not None
    return self._process.exitcode

  def output(self) -> str:
    """What it has printed; nothing where it was killed before it began."""
    return self.log.read_text(encoding="utf-8") if self.log.exists() else ""


class DistillProcess(SftProcess):
  """`posttrain distill` likewise."""

  trainer = "distill"


class DpoProcess(SftProcess):
  """`posttrain dpo` likewise."""

  trainer = "dpo"


class GrpoProcess(SftProcess):
  """`posttrain grpo` likewise."""

  trainer = "grpo"


def sft_overrides(argv: Sequence[str]) -> dict[str, Any]:
  return load_config(argv).maxtext_overrides()


def pretraining(
  runs: Sequence[Sequence[str]], folder: Path, *, environment: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
  """Runs real pre-training once for each list of arguments, in one other process (its imports take longest).

  Returns:
    For each run: `error` (None where it ended well) and `losses`, step to loss as pre-training wrote it to its metrics
    file, in full precision.
  """
  script = (
    "import json, sys, traceback\n"
    "from maxtext.trainers.pre_train import train\n"
    "results = []\n"
    "for argv in json.load(open(sys.argv[1])):\n"
    "  try:\n"
    "    train.main(['train.py', *argv])\n"
    "    results.append(None)\n"
    "  except BaseException as error:\n"
    "    traceback.print_exc()\n"
    "    results.append(f'{type(error).__name__}: {error}')\n"
    "json.dump(results, open(sys.argv[2], 'w'))\n"
  )
  jobs = []
  for index, argv in enumerate(runs):
    jobs.append([*argv, f"metrics_file={folder / f'pretraining-{index}.jsonl'}"])
  (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
  process = subprocess.run(
    [sys.executable, "-c", script, str(folder / "jobs.json"), str(folder / "results.json")],
    text=True,
    capture_output=True,
    check=False,
    env={**os.environ, "DECOUPLE_GCLOUD": os.environ.get("DECOUPLE_GCLOUD", ""), **(environment or {})},
  )
  assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
  results = []
  for index, error in enumerate(json.loads((folder / "results.json").read_text())):
    metrics = folder / f"pretraining-{index}.jsonl"
    losses = {}
    if metrics.exists():
      for line in metrics.read_text().splitlines():
        record = json.loads(line)
        losses[int(record["step"])] = record["learning/loss"]
    results.append({"error": error, "losses": losses, "log": process.stderr})
  return results


def pretraining_argv(
  sft_argv: Sequence[str], *, way: str, run_name: str, step: int, steps: int, **keys: Any
) -> list[str]:
  """Pre-training's arguments for going on from an SFT run, on synthetic data."""
  new_run_name = keys.pop("new_run_name", None)
  argv = pretraining_arguments(
    sft_overrides(sft_argv), way=way, run_name=run_name, step=step, steps=steps, new_run_name=new_run_name
  )
  return [*argv, "dataset_type=synthetic", *(f"{key}={value}" for key, value in keys.items())]


def live_state(trainer: Any) -> nnx.State:
  """The state of a trainer's model and optimizer, as one."""
  from maxtext_posttrain import maxtext_api

  return nnx.state(maxtext_api.TrainStateNNX(trainer.model, trainer.optimizer), nnx.Not(nnx.Intermediate))


def first_pretraining_step(session: Any, argv: Sequence[str]) -> tuple[float, dict[tuple, np.ndarray]]:
  """Pre-training's own first step on the state SFT holds in memory: its loss, and the items it would save."""
  from maxtext.configs import pyconfig
  from maxtext.input_pipeline.input_pipeline_interface import create_data_iterator
  from maxtext.trainers.pre_train import train
  from maxtext.utils import sharding, train_utils

  from maxtext_posttrain import maxtext_api

  config = pyconfig.initialize(["train.py", *argv])
  mesh = maxtext_api.build_mesh(config)
  pretraining = maxtext_api.pretraining_state(config, mesh)
  state = jax.tree.map(lambda leaf: leaf.copy(), live_state(session.trainer))
  shardings = jax.tree.map(lambda leaf: leaf.sharding, pretraining.state)
  params_shardings, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
  data_sharding = sharding.get_input_data_sharding(config, mesh)
  batch = next(create_data_iterator(config, mesh)[0])
  with maxtext_api.mesh_context(config, mesh):
    step = train_utils.jit_train_step(
      config, pretraining.graphdef, state, shardings, data_sharding, train.train_step, params_shardings
    )
    state, metrics = step(state, jax.device_put(batch, data_sharding))
  return float(metrics["scalar"]["learning/loss"]), checkpoint_arrays(state)


def checkpoint_arrays(state: nnx.State) -> dict[tuple, np.ndarray]:
  """What `items` would hold of a train state."""
  from maxtext_posttrain import maxtext_api

  return {path: as_words(leaf) for path, leaf in flatten_tree(maxtext_api.to_checkpoint_dict(state)).items()}


def items(step_folder: Path) -> dict[tuple, np.ndarray]:
  """Every array of a step's `items` by path; rng keys as their words."""
  tree = ocp.load_checkpointables(step_folder, {"items": None})["items"]
  return {path: as_words(leaf) for path, leaf in flatten_tree(tree).items()}


def as_words(leaf: Any) -> np.ndarray:
  """An array, or a typed rng key's words."""
  return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def assert_same_items(have: dict[tuple, np.ndarray], want: dict[tuple, np.ndarray]) -> None:
  # A dict's integer keys come back from disk as text.
  have, want = ({tuple(map(str, path)): leaf for path, leaf in tree.items()} for tree in (have, want))
  assert sorted(have) == sorted(want)
  for path, leaf in want.items():
    assert have[path].dtype == leaf.dtype, path
    np.testing.assert_array_equal(have[path], leaf, err_msg=str(path))


TIMINGS = (
  "step_seconds",
  "tokens_per_second",
  "tokens_per_second_per_device",
  "tflops_per_device",
  "data_wait_seconds",
  "save_wait_seconds",
)


def metrics(run: Path) -> list[dict[str, Any]]:
  """A run's metrics without what depends on the clock."""
  return [
    {key: value for key, value in record.items() if key not in TIMINGS}
    for record in read_metrics(run / "metrics.jsonl")
  ]
