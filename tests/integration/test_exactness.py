"""One run of N + M steps, and N steps, a SIGKILL and M more: the same bits in weights, optimizer, rngs and metrics."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.support import runs

pytestmark = pytest.mark.slow

KILLS_DURING_SAVES = 20


@pytest.fixture(scope="module")
def chat_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A tiny SFT on the quickstart's conversations: packing, epochs (17 sequences, 4 a step), dropout, accumulation."""
  folder = tmp_path_factory.mktemp("exactness")
  (folder / "sft.yml").write_text(
    "base_config: [quickstart/sft.yml]\n"
    "base_emb_dim: 16\nbase_mlp_dim: 32\nbase_num_decoder_layers: 1\n"
    "per_device_batch_size: 2\ngradient_accumulation_steps: 2\n"
    "dropout_rate: 0.1\nenable_dropout: true\n"
    "steps: 6\ncheckpoint_period: 1\nmax_num_checkpoints_to_keep: 3\neval_interval: 2\n"
    "enable_tensorboard: false\nlog_every: 1\n",
    encoding="utf-8",
  )
  return folder


def arguments(folder: Path, name: str, *extra: str) -> list[str]:
  return [str(folder / "sft.yml"), f"base_output_directory={folder}", f"run_name={name}", *extra]


@pytest.fixture(scope="module")
def uninterrupted(chat_config: Path) -> Path:
  process = runs.SftProcess(arguments(chat_config, "uninterrupted"), chat_config / "uninterrupted.log")
  assert process.wait() == 0, process.output()
  return chat_config / "uninterrupted"


def finish(argv: list[str], run: Path, expected: Path) -> str:
  """Runs to the end and compares with the uninterrupted run; returns the output."""
  process = runs.SftProcess(argv, run.with_suffix(".last.log"))
  assert process.wait() == 0, process.output()
  runs.assert_same_items(runs.items(run / "checkpoints" / "6"), runs.items(expected / "checkpoints" / "6"))
  assert runs.metrics(run) == runs.metrics(expected)
  return process.output()


def committed_steps(run: Path) -> list[int]:
  folder = run / "checkpoints"
  return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.exists() else []


def test_a_new_process_killed_at_step_three(chat_config: Path, uninterrupted: Path):
  """As a user would: `python -m train_sft`, a SIGKILL from outside, the same command again."""
  run = chat_config / "killed"
  argv = arguments(chat_config, "killed", "checkpoint_period=3")
  process = subprocess.Popen(
    [sys.executable, "-m", "train_sft", *argv], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
  )
  assert process.stdout is not None
  for line in process.stdout:
    if line.startswith("step 3/"):
      break
  deadline = time.monotonic() + 60
  while committed_steps(run) != [3] and time.monotonic() < deadline:
    time.sleep(0.005)
  process.kill()
  process.wait()
  assert committed_steps(run) == [3]
  result = runs.sft_process(argv)
  assert result.returncode == 0, result.stderr
  assert "step 3 of 6, ready" in result.stdout
  runs.assert_same_items(runs.items(run / "checkpoints" / "6"), runs.items(uninterrupted / "checkpoints" / "6"))
  assert runs.metrics(run) == runs.metrics(uninterrupted)


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_killed_during_saves_at_random_moments(chat_config: Path, uninterrupted: Path, asynchronous: str):
  """Every step saves. Ten kills, each at a random moment of a save; no committed checkpoint is ever lost."""
  generator = random.Random(asynchronous)
  name = f"many-kills-{asynchronous}"
  run = chat_config / name
  argv = arguments(chat_config, name, f"async_checkpointing={asynchronous}")
  newest, kills = 0, 0
  while kills < KILLS_DURING_SAVES // 2:
    process = runs.SftProcess(argv, run.with_suffix(".log"))
    if not process.wait_for(run, min(newest + generator.randint(1, 2), 6)):
      raise AssertionError(process.output())
    # A step's metrics are written just before its save begins.
    time.sleep(generator.uniform(0.0, 0.2))
    process.kill()
    kills += 1
    committed = committed_steps(run)
    assert max(committed, default=0) >= newest, process.output()
    newest = max(committed, default=0)
    if newest >= 5:
      shutil.rmtree(run)
      newest = 0
  finish(argv, run, uninterrupted)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_exits_with_its_code(
  chat_config: Path, uninterrupted: Path, number: signal.Signals, code: int
):
  run = chat_config / f"signal-{code}"
  argv = arguments(chat_config, run.name, "checkpoint_period=100")
  process = runs.SftProcess(argv, run.with_suffix(".log"))
  assert process.wait_for(run, 2), process.output()
  os.kill(process.pid, number)
  assert process.wait() == code, process.output()
  ended = re.search(r"ended at step (\d+) of 6 \(stopped by a signal\)", process.output())
  assert ended, process.output()
  step = int(ended.group(1))
  assert 2 <= step < 6
  assert committed_steps(run) == [step]
  assert f"step {step} of 6, ready" in finish(argv, run, uninterrupted)
