"""`make notebooks`: runs every notebook from top to bottom in a kernel of its own, and says how long each took.

  python scripts/run_notebooks.py [NOTEBOOK ...] [--output FOLDER]

The notebooks themselves are left as they are; with --output what they show is kept there, as notebooks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
_CELL_SECONDS = 600


def execute(path: Path) -> nbformat.NotebookNode:
  """Runs a notebook in a fresh kernel of this Python, in its own folder; returns it with its outputs.

  Raises:
    CellExecutionError: a cell raised.
  """
  notebook = nbformat.read(path, as_version=4)
  NotebookClient(notebook, timeout=_CELL_SECONDS, resources={"metadata": {"path": str(path.parent)}}).execute()
  return notebook


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the notebooks and prints the table; returns 1 where one failed."""
  parser = argparse.ArgumentParser(description="Runs notebooks from top to bottom.")
  parser.add_argument("notebooks", nargs="*", type=Path, help="which (default: all in notebooks/)")
  parser.add_argument("--output", type=Path, metavar="FOLDER", help="keep them there with what they show")
  options = parser.parse_args(arguments)
  paths = options.notebooks or sorted(NOTEBOOKS.glob("*.ipynb"))
  if options.output is not None:
    options.output.mkdir(parents=True, exist_ok=True)
  rows: list[tuple[str, float, str]] = []
  for path in paths:
    print(f"{path.name} ...", flush=True)
    started = time.monotonic()
    outcome = "ok"
    try:
      notebook = execute(path)
    except CellExecutionError as error:
      print(error, file=sys.stderr)
      outcome = f"failed: {error.ename}"
    else:
      if options.output is not None:
        nbformat.write(notebook, options.output / path.name)
    rows.append((path.name, time.monotonic() - started, outcome))
  print(f"\n{'notebook':<24} {'seconds':>7}  outcome")
  for name, seconds, outcome in rows:
    print(f"{name:<24} {seconds:>7.0f}  {outcome}")
  return int(any(outcome != "ok" for _, _, outcome in rows))


if __name__ == "__main__":
  sys.exit(main())
