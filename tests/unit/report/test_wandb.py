"""Weights & Biases in offline mode: what its run folder holds, and what it does not."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from maxtext_posttrain.config import load_config
from maxtext_posttrain.errors import ConfigError, TrainingError
from maxtext_posttrain.report.wandb import WandbRun

pytestmark = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")

CONFIG = "run_name: r\nbase_output_directory: out\nsteps: 5\ndataset_type: synthetic\nenable_wandb: true\n"


def _records(file: Path) -> Iterator[Any]:
  """The records of a .wandb file: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
  from wandb.proto.wandb_internal_pb2 import Record

  data, place, whole = file.read_bytes(), 7, b""
  while place + 7 <= len(data):
    left = 32768 - place % 32768
    if left < 7:
      place += left
      continue
    length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
    whole += data[place + 7 : place + 7 + length]
    place += 7 + length
    if kind in (1, 4):  # A full record, or the last part of one.
      yield Record.FromString(whole)
      whole = b""


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A run's folder with two parts of a run: three updates and an evaluation, then one update more."""
  folder = tmp_path_factory.mktemp("run")
  for steps in ((1, 2, 3), (4,)):
    run = WandbRun(folder, project="tests", name="r", mode="offline", config={"steps": 4, "lora": {"lora_rank": 8}})
    for step in steps:
      run.write("train", step, {"loss": 1.0 / step, "note": "text"})
    run.write("eval", steps[-1], {"loss": 0.5})
    run.close()
  return folder


def _history_and_runs(folder: Path) -> tuple[list[dict[str, str]], list[Any]]:
  """What the run's files hold now: rows of metrics, and descriptions of the run."""
  history: list[dict[str, str]] = []
  runs = []
  for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime):
    for record in _records(file):
      if record.WhichOneof("record_type") == "history":
        items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        history.append({key: value for key, value in items.items() if not key.startswith("_")})
      if record.WhichOneof("record_type") == "run":
        runs.append(record.run)
  return history, runs


@pytest.mark.slow
def test_metrics_are_in_its_file(offline: Path):
  # Its own process writes the files, and may still be at it when a run has been closed.
  deadline = time.monotonic() + 30
  history, runs = _history_and_runs(offline)
  while len(history) < 6 and time.monotonic() < deadline:
    time.sleep(0.2)
    history, runs = _history_and_runs(offline)
  assert [row for row in history if "train/loss" in row] == [
    {"step": "1", "train/loss": "1"},
    {"step": "2", "train/loss": "0.5"},
    {"step": "3", "train/loss": "0.3333333333333333"},
    {"step": "4", "train/loss": "0.25"},
  ]
  assert [row["step"] for row in history if "eval/loss" in row] == ["3", "4"]
  assert {run.run_id for run in runs} == {runs[0].run_id}  # The second part goes on with the first's run.
  assert (runs[0].project, runs[0].display_name) == ("tests", "r")


@pytest.mark.slow
def test_it_gathers_nothing_by_itself(offline: Path):
  held = b"".join(file.read_bytes() for file in offline.rglob("*.wandb"))
  assert b"lora_rank" in held
  assert Path(sys.argv[0]).name.encode() not in held
  assert not list(offline.rglob("wandb-metadata.json"))
  assert not list(offline.rglob("requirements.txt"))


def test_what_it_refuses_is_one_line(tmp_path: Path):
  (tmp_path / "file").write_text("")
  with pytest.raises(TrainingError, match="Weights & Biases: ") as caught:
    WandbRun(tmp_path / "file", project="p", name="r", mode="offline", config={})
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("extra", "says"),
  [
    ("wandb_mode: sometimes\n", "wandb_mode"),
    ("wandb_mode: true\n", "wandb_mode"),
    ("wandb_project: p\n", "wandb_project_name"),
  ],
)
def test_wrong_keys_are_refused(tmp_path: Path, extra: str, says: str):
  path = tmp_path / "c.yml"
  path.write_text(CONFIG + extra)
  with pytest.raises(ConfigError, match=says):
    load_config([str(path)], environ={})


def test_without_the_package_it_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  path = tmp_path / "c.yml"
  path.write_text(CONFIG)
  load_config([str(path)], environ={})
  monkeypatch.setitem(sys.modules, "wandb", None)
  with pytest.raises(ConfigError, match=r"enable_wandb=true: the wandb package is not installed") as caught:
    load_config([str(path)], environ={})
  assert len(caught.value.problems) == 1
  load_config([str(path), "enable_wandb=false"], environ={})
