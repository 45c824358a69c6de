"""Every notebook runs from top to bottom in a kernel of its own, shows pictures, and learns what it says."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from maxtext_posttrain.report.run_folder import RunFolder
from scripts.run_notebooks import execute, main
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow

RUNS = REPOSITORY / "runs" / "notebooks"


@dataclass(frozen=True)
class Shown:
  """What a notebook showed: lines by stream, how many pictures, and its tables."""

  lines: dict[str, list[str]]
  pictures: int
  tables: list[str]


def run(name: str) -> Shown:
  outputs = [output for cell in execute(REPOSITORY / "notebooks" / f"{name}.ipynb").cells for output in _outputs(cell)]
  lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
  for output in outputs:
    if output.output_type == "stream":
      lines[output.name] += output.text.splitlines()
  shown = [output.data for output in outputs if "data" in output]
  tables = [data["text/html"] for data in shown if "<table" in data.get("text/html", "")]
  assert lines["stderr"] == []
  return Shown(lines, sum("image/png" in data for data in shown), tables)


def _outputs(cell: Any) -> list[Any]:
  return cell.outputs if cell.cell_type == "code" else []


def _percents(table: str) -> list[int]:
  """The shares in a table, row by row."""
  return [int(share) for share in re.findall(r">(\d+)%<", table)]


def test_sft():
  shown = run("sft")
  assert (shown.pictures, len(shown.tables)) == (1, 2)
  assert "Bees make honey and wax." in shown.tables[1]
  assert sum(line.startswith("step 120/120  loss ") for line in shown.lines["stdout"]) == 1
  assert sum(line.startswith("sft ended at step 125 of 125") for line in shown.lines["stdout"]) == 1
  assert RunFolder.read(RUNS / "sft" / "chat").newest.step == 125


def test_dpo():
  shown = run("dpo")
  assert (shown.pictures, len(shown.tables)) == (1, 3)
  preferred = RunFolder.read(RUNS / "dpo" / "preferred").curve("eval", "rewards/accuracies")
  assert preferred.last == 1.0
  before, right_before, after, right_after = _percents(shown.tables[2])
  assert 30 <= before <= 70
  assert after >= 95
  assert right_after >= right_before - 10


def test_grpo():
  shown = run("grpo")
  assert (shown.pictures, len(shown.tables)) == (1, 4)
  before, after = _percents(shown.tables[2])
  assert after - before >= 30


def test_distillation():
  shown = run("distillation")
  assert (shown.pictures, len(shown.tables)) == (1, 3)
  teacher, *students = _percents(shown.tables[2])
  assert students[-1] > students[0]
  assert students[-1] >= 0.8 * teacher


def test_hand_back():
  shown = run("hand_back")
  assert shown.pictures == 1
  records = [json.loads(line) for line in (RUNS / "hand_back" / "pretraining.jsonl").read_text().splitlines()]
  losses = [record["learning/loss"] for record in records]
  assert len(losses) == 20
  assert losses[-1] < losses[0] < 9


def test_a_notebook_that_fails_is_told_with_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
  import nbformat

  notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
  nbformat.write(notebook, tmp_path / "broken.ipynb")
  assert main([str(tmp_path / "broken.ipynb"), "--output", str(tmp_path / "out")]) == 1
  said = capsys.readouterr()
  assert "broken.ipynb" in said.out.splitlines()[-1]
  assert "failed: ZeroDivisionError" in said.out.splitlines()[-1]
  assert "division by zero" in said.err
