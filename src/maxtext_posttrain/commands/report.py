"""`posttrain report`: rebuilds a run's page, or compares several runs on one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from maxtext_posttrain.commands import TOOLS, TRAINERS
from maxtext_posttrain.commands.arguments import ArgumentParser
from maxtext_posttrain.errors import ConfigError

_COMPARISON = "comparison.html"


def run(arguments: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  parser = ArgumentParser("report", "Rebuilds the page of a run, or compares several runs on one page.")
  parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, as runs/<run_name>")
  parser.add_argument(
    "--output",
    type=Path,
    metavar="FILE",
    help=f"the page to write (default: report.html in the run's folder; of several runs, {_COMPARISON} here)",
  )
  parsed = parser.parse_args(arguments)
  folders: list[Path] = parsed.runs
  for index, folder in enumerate(folders):
    if any(folder.resolve() == other.resolve() for other in folders[:index]):
      raise ConfigError(f"{folder}: is named twice; name each run once")

  from maxtext_posttrain.report.page import PAGE, write_page
  from maxtext_posttrain.report.run_folder import RunFolder

  runs = [RunFolder.read(folder) for folder in folders]
  output = parsed.output or (folders[0] / PAGE if len(folders) == 1 else Path(_COMPARISON))
  write_page(runs, output, TRAINERS | TOOLS)
  print(output)
  return 0
