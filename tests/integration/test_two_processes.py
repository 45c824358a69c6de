"""Two processes of one run, on the loopback: one batch, one writer, one end; and what is left when one of them dies."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxtext_posttrain.report import read_metrics
from tests.support import devices, runs
from tests.support.devices import Jobs, job

pytestmark = pytest.mark.slow

RELATIVE = 1e-5
SEVERAL = "skip_jax_distributed_system=false"
SOON = 60
"""Seconds in which a process ends whose other is gone; JAX's own time without a sign of life is 30 of them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return devices.write_room(tmp_path_factory.mktemp("hosts") / "room")


@pytest.fixture(scope="module")
def finished(folder: Path) -> tuple[Jobs, dict[str, str | None]]:
  """Each trainer by two processes with two devices each, and by one process with one."""
  alone = [job(folder, "sft", "teacher", 1), *(job(folder, trainer, f"{trainer}-one", 1) for trainer in MESHES)]
  outcomes = Jobs(folder, "alone", alone, devices=1).results()
  several = [
    job(folder, trainer, f"{trainer}-two", 4, SEVERAL, *keys, **mesh) for trainer, (mesh, keys) in MESHES.items()
  ]
  jobs = Jobs(folder, "several", several, devices=2, processes=2)
  return jobs, outcomes | jobs.results()


MESHES: dict[str, tuple[dict[str, int], list[str]]] = {
  "sft": ({"fsdp": 4}, []),
  "dpo": ({"data": 2, "fsdp": 2}, ["dpo.reference=precomputed"]),
  "distill": ({"tensor": 4}, []),
  "grpo": ({"fsdp": 2, "tensor": 2}, []),
}
"""With `tensor: 4` both processes hold every row; in the others each holds half of them."""


def records(run: Path) -> list[dict[str, Any]]:
  return list(read_metrics(run / "metrics.jsonl"))


@pytest.mark.parametrize("trainer", MESHES)
def test_two_processes_make_the_run_of_one(folder: Path, finished: tuple[Jobs, dict[str, str | None]], trainer: str):
  _, outcomes = finished
  assert outcomes[f"{trainer}-two"] is None
  assert outcomes[f"{trainer}-one"] is None
  have, want = (records(folder / f"{trainer}-{name}") for name in ("two", "one"))
  assert [(each["kind"], each["step"]) for each in have] == [(each["kind"], each["step"]) for each in want]
  for ours, theirs in zip(have, want, strict=True):
    for name in theirs.keys() & {"loss", "grad_norm", "tokens", "trained_tokens", "reward", "kl", "pairs"}:
      np.testing.assert_allclose(ours[name], theirs[name], rtol=RELATIVE, atol=1e-6, err_msg=name)


def test_one_of_them_writes_and_shows(folder: Path, finished: tuple[Jobs, dict[str, str | None]]):
  first, second = (log.read_text(encoding="utf-8") for log in finished[0].logs)
  assert "step 2/2" in first
  assert [line for line in second.splitlines() if line and not line.startswith(("---", "I0", "W0", "["))] == []
  run = folder / "grpo-two"
  assert {path.name for path in run.iterdir()} == {
    "checkpoints", "config.yml", "metrics.jsonl", "report.html", "run.json", "samples.jsonl",
  }  # fmt: skip
  assert json.loads((run / "run.json").read_text())["facts"]["Processes"] == "2"
  samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
  assert [each["step"] for each in samples] == sorted(each["step"] for each in samples)
  alone = (folder / "grpo-one" / "samples.jsonl").read_text().splitlines()
  assert len(samples) == len(alone)


class Pair:
  """One run of two processes by the command line."""

  def __init__(self, folder: Path, name: str, *extra: str):
    self.run = folder / name
    argv = job(folder, "sft", name, 4, SEVERAL, *extra, fsdp=4)
    port = devices.free_port()
    self.processes = [
      runs.SftProcess(argv["argv"], folder / f"{name}.{index}.log", devices.environment(2, index, 2, port))
      for index in range(2)
    ]

  def wait_for(self, step: int) -> None:
    assert self.processes[0].wait_for(self.run, step), self.processes[0].output() + self.processes[1].output()

  def committed(self) -> list[int]:
    return sorted(int(path.name) for path in (self.run / "checkpoints").iterdir() if path.name.isdigit())


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> list[dict[str, Any]]:
  """The first updates of the runs below, by one process."""
  each = job(folder, "sft", "reference", 1, *LONG, "steps=60")
  assert Jobs(folder, "reference", [each], devices=1).results() == {"reference": None}
  return records(folder / "reference")


LONG = (
  "eval_interval=-1",
  "checkpoint_period=5",
  "max_num_checkpoints_to_keep=2",
  "learning_rate=1e-4",
  "learning_rate_schedule_steps=4000",
)


@pytest.mark.parametrize("killed", [1, 0])
def test_a_kill_of_one_ends_the_other(folder: Path, uninterrupted: list[dict[str, Any]], killed: int):
  pair = Pair(folder, f"killed-{killed}", *LONG, "steps=4000")
  pair.wait_for(6)
  pair.processes[killed].kill()
  started = time.monotonic()
  left = pair.processes[1 - killed]
  code = left.wait(SOON)
  assert code != 0
  assert time.monotonic() - started < SOON
  said = left.output()
  if killed:
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, said
    assert "process 0 of 2 failed or lost another one" in errors[0]
    assert "start all of them again" in errors[0]
  else:
    assert re.search("failed or lost another one|coordination service|distributed service", said), said
  newest = max(pair.committed())
  assert newest >= 5
  if killed:
    # One process with one device goes on where two were.
    each = job(folder, "sft", pair.run.name, 1, *LONG, f"steps={newest + 3}")
    assert Jobs(folder, "going-on", [each], devices=1).results() == {pair.run.name: None}
    have = {each["step"]: each["loss"] for each in records(pair.run)}
    assert sorted(have) == list(range(1, newest + 4))
    for record in uninterrupted[: newest + 3]:
      np.testing.assert_allclose(have[record["step"]], record["loss"], rtol=RELATIVE)


def test_a_signal_to_one_stops_both_at_one_step(folder: Path):
  pair = Pair(folder, "signalled", *LONG, "steps=4000", "checkpoint_period=4000")
  pair.wait_for(3)
  os.kill(pair.processes[1].pid, signal.SIGTERM)
  assert [process.wait(SOON) for process in pair.processes] == [143, 143]
  ended = re.search(r"ended at step (\d+) of 4000 \(stopped by a signal\)", pair.processes[0].output())
  assert ended, pair.processes[0].output()
  assert pair.committed() == [int(ended.group(1))]
  assert records(pair.run)[-1]["step"] == int(ended.group(1))
