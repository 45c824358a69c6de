"""Renders one run, or several against each other, as one HTML page that needs nothing else.

The plotting library (Plotly, from its Python package) lies in the page compressed, which makes the page 2 MB instead of
5. All that a run brought (names, paths, rows, templates) is text: the template escapes it, and a content security
policy in the page lets nothing run but its own scripts, and nothing be fetched.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from maxtext_posttrain import __version__
from maxtext_posttrain.errors import ReportError
from maxtext_posttrain.files import write_atomically
from maxtext_posttrain.report.charts import MOST_POINTS, plots
from maxtext_posttrain.report.figures import NONE, figure_table, readable_bytes
from maxtext_posttrain.report.next_commands import next_commands
from maxtext_posttrain.report.run_folder import RunFolder

PAGE = "report.html"

_TEMPLATES = Path(__file__).parent / "templates"
_GENERATOR = f'<meta name="generator" content="maxtext-posttrain {__version__}">'
_MARK = b'<meta name="generator" content="maxtext-posttrain '
_MARK_WITHIN = 4096


def write_page(runs: Sequence[RunFolder], path: Path, available: Collection[str]) -> None:
  """Writes the page of one run, or of several compared.

  Args:
    runs: the runs.
    path: the page; one that this program wrote before is replaced.
    available: the commands that `posttrain` has.

  Raises:
    ReportError: there is something else at `path`, or nothing can be written there.
  """
  text = render(runs, available)
  try:
    if path.is_dir():
      raise ReportError(f"{path}: is a folder; name a file for the page")
    if path.exists() and not _is_ours(path):
      raise ReportError(f"{path}: exists and is no report of this program; name another file, or move it away")
    if not path.parent.is_dir():
      raise ReportError(f"{path}: there is no folder {path.parent}; make it, or name another file")
    write_atomically(path, text)
  except OSError as error:
    raise ReportError(f"{path}: can't be written: {error.strerror or error}; name another file") from error


def _is_ours(path: Path) -> bool:
  with path.open("rb") as file:
    return _MARK in file.read(_MARK_WITHIN)


def render(runs: Sequence[RunFolder], available: Collection[str]) -> str:
  """The page's HTML."""
  # Imported where it is used: a run that starts needs none of it.
  import jinja2
  from markupsafe import Markup

  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_TEMPLATES),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  environment.filters["readable_bytes"] = readable_bytes
  names = _names(runs)
  library = _plotting_library()
  script = (_TEMPLATES / "page.js").read_text(encoding="utf-8")
  return environment.get_template("page.html").render(
    generator=Markup(_GENERATOR),
    policy=_policy(script, library),
    style=Markup((_TEMPLATES / "page.css").read_text(encoding="utf-8")),
    script=Markup(script),
    library=base64.b64encode(gzip.compress(library.encode(), compresslevel=6, mtime=0)).decode(),
    title=names[0] if len(runs) == 1 else f"{len(runs)} runs compared",
    names=names,
    runs=runs,
    run=runs[0],
    compared=len(runs) > 1,
    plots=plots(runs, names),
    most_points=MOST_POINTS,
    figures=figure_table(runs),
    differing=_differing(runs),
    commands=next_commands(runs[0], available) if len(runs) == 1 else [],
    none=NONE,
  )


def _names(runs: Sequence[RunFolder]) -> list[str]:
  """The runs' names; with their folders where two have one name."""
  names = [run.name for run in runs]
  return [f"{name} ({run.path})" if names.count(name) > 1 else name for name, run in zip(names, runs, strict=True)]


def _differing(runs: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
  """Configuration keys that not all runs have the same value for; runs without a record have none."""
  configs: list[dict[str, Any]] = [run.record.config if run.record is not None else {} for run in runs]
  known = [config for config in configs if config]
  keys = sorted({key for config in known for key in config})
  rows = [(key, [config[key].value if key in config else NONE for config in configs]) for key in keys]
  return [
    (key, values)
    for key, values in rows
    if len({value for config, value in zip(configs, values, strict=True) if config}) > 1
  ]


def _plotting_library() -> str:
  """Plotly's browser code, from its Python package, which itself is not imported.

  Raises:
    ReportError: the package is not there.
  """
  spec = importlib.util.find_spec("plotly")
  for folder in (spec.submodule_search_locations or []) if spec is not None else []:
    file = Path(folder) / "package_data" / "plotly.min.js"
    if file.is_file():
      return file.read_text(encoding="utf-8")
  raise ReportError("the report's page needs plotly: pip install plotly")


def _policy(*scripts: str) -> str:
  """A content security policy under which only these scripts run and nothing is fetched."""
  digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
  hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
  return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"
