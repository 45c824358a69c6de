"""The example of docs/adding_a_trainer.md: short, its loss the formula's; it trains, and pre-training can read it."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_posttrain.report import read_metrics
from tests.conftest import REPOSITORY

_MOST_LINES = 80


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
  """The document's Python and YAML, as files."""
  text = (REPOSITORY / "docs" / "adding_a_trainer.md").read_text(encoding="utf-8")
  folder = tmp_path_factory.mktemp("example")
  files = []
  for language, name in (("python", "focal_sft.py"), ("yaml", "focal.yml")):
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (folder / name).write_text(block, encoding="utf-8")
    files.append(folder / name)
  return files[0], files[1]


def test_it_is_short_and_its_loss_is_the_formulas(example: tuple[Path, Path]):
  assert len(example[0].read_text(encoding="utf-8").splitlines()) < _MOST_LINES
  focal_loss_sum = runpy.run_path(str(example[0]))["focal_loss_sum"]
  probabilities = np.array([[0.5, 0.25, 0.9, 0.1]])
  mask = np.array([[True, True, True, False]])
  # (1/2)² ln 2 + (3/4)² ln 4 + (1/10)² ln(10/9)
  expected = 0.25 * np.log(2) + 0.5625 * np.log(4) + 0.01 * np.log(10 / 9)
  log_probs = np.log(probabilities).astype(np.float32)
  log_probs[0, 3] = np.nan
  assert float(focal_loss_sum(jnp.asarray(log_probs), jnp.asarray(mask), 2.0)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_it_trains_and_pretraining_can_go_on_from_it(example: tuple[Path, Path], tmp_path: Path):
  program, config = example
  result = subprocess.run(
    [sys.executable, program, config, f"base_output_directory={tmp_path}", "learning_rate=3e-3"],
    text=True,
    capture_output=True,
    check=False,
    cwd=REPOSITORY,
  )
  assert result.returncode == 0, result.stderr
  records = [record for record in read_metrics(tmp_path / "focal" / "metrics.jsonl") if record["kind"] == "train"]
  assert [record["step"] for record in records] == [1, 2, 3, 4]
  assert all(0 < record["loss"] < record["cross_entropy"] for record in records)
  inspected = subprocess.run(
    [Path(sys.executable).with_name("posttrain"), "inspect", tmp_path / "focal"],
    text=True,
    capture_output=True,
    check=False,
  )
  assert inspected.returncode == 0, inspected.stderr
  for way in ("run_name", "load_full_state_path", "load_parameters_path"):
    assert re.search(rf"{way}\W+yes", inspected.stdout), inspected.stdout
