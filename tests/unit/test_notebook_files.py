"""The notebooks as they are stored: valid, without what they showed to whoever ran them last."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import pytest

from tests.conftest import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


def test_all_are_there():
  assert [path.stem for path in NOTEBOOKS] == ["distillation", "dpo", "grpo", "hand_back", "sft"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_output(path: Path):
  notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
  nbformat.validate(notebook)
  assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
  assert dict(notebook.metadata) == {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
  }
  ids = [cell.id for cell in notebook.cells]
  assert len({*ids}) == len(ids)
  for cell in notebook.cells:
    # Random ids, which an editor gives new cells, change with each rewriting; these say what the cell is.
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", cell.id), cell.id
    assert dict(cell.metadata) == {}, cell.id
    if cell.cell_type == "code":
      assert cell.outputs == [], cell.id
      assert cell.execution_count is None, cell.id
  assert path.read_text(encoding="utf-8") == nbformat.writes(notebook, version=nbformat.NO_CONVERT) + "\n"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_stays_on_the_cpu_until_it_is_told(path: Path):
  cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
  switches = [node for cell in cells for node in ast.walk(ast.parse(cell)) if _sets(node, "on_tpu")]
  assert [ast.literal_eval(node.value) for node in switches] == [False]
  assert "if on_tpu:" in cells[-1]


def _sets(node: ast.AST, name: str) -> bool:
  return isinstance(node, ast.Assign) and any(isinstance(each, ast.Name) and each.id == name for each in node.targets)
