"""`posttrain report` on the command line: where the page goes, and what is wrong with what it is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from maxtext_posttrain.report.run_file import RunRecord
from tests.support.cli import run_cli
from tests.support.report_runs import make_run, record


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  monkeypatch.chdir(tmp_path)
  make_run(tmp_path / "good")
  return tmp_path


def _run(room: Path, **files: str) -> None:
  """A run `bad` with other content in some of its files."""
  make_run(room / "bad")
  for name, text in files.items():
    (room / "bad" / name.replace("_", ".")).write_text(text)


def _without_record(room: Path) -> None:
  make_run(room / "bad", metrics=[])
  (room / "bad" / "run.json").unlink()


def _metrics_folder(room: Path) -> None:
  (room / "bad" / "metrics.jsonl").mkdir(parents=True)


def _record_with(**changes: object) -> str:
  return json.dumps({**json.loads(record("bad", Path("bad")).model_dump_json()), **changes})


BAD: dict[str, tuple[Callable[[Path], object], str, str, int]] = {
  "no run": (lambda room: None, "", "the following arguments are required: RUN", 2),
  "an option that does not exist": (lambda room: None, "good --open", "unrecognized arguments: --open", 2),
  "a run twice": (lambda room: None, "good good/", "good: is named twice", 2),
  "no such folder": (lambda room: None, "nowhere", "nowhere: there is no such folder", 1),
  "a file": (lambda room: None, "good/metrics.jsonl", "good/metrics.jsonl: is a file; name the run's folder", 1),
  "no metrics": (lambda room: (room / "bad").mkdir(), "bad", "bad: holds no metrics.jsonl", 1),
  "a folder for metrics": (_metrics_folder, "bad", "bad: holds no metrics.jsonl", 1),
  "nothing in it": (_without_record, "bad", "there is nothing to show", 1),
  "a broken line": (
    lambda room: _run(room, metrics_jsonl='{"kind": "train", "step": 1}\n{"kind\n'),
    "bad",
    "bad/metrics.jsonl, line 2: is not a record of metrics",
    1,
  ),
  "a line of the wrong kind": (
    lambda room: _run(room, metrics_jsonl='{"kind": "train", "step": "one"}\n'),
    "bad",
    "line 1: is not a record of metrics",
    1,
  ),
  "a line without end": (
    lambda room: _run(room, metrics_jsonl="[" * 200_000 + "\n"),
    "bad",
    "line 1: is not a record",
    1,
  ),
  "a binary file": (lambda room: _run(room, metrics_jsonl="\x00\x01\n"), "bad", "line 1: is not a record", 1),
  "a second run that is broken": (lambda room: _run(room, run_json="{"), "good bad", "bad/run.json: is not a run's", 1),
  "a cut record": (lambda room: _run(room, run_json='{"trainer": "s'), "bad", "bad/run.json: is not a run's record", 1),
  "a record of something else": (
    lambda room: _run(room, run_json="[1]"),
    "bad",
    "bad/run.json: is not a run's record",
    1,
  ),
  "a record without a name": (lambda room: _run(room, run_json="{}"), "bad", "(trainer: Field required)", 1),
  "a record with a wrong type": (
    lambda room: _run(room, run_json=_record_with(total_steps="many")),
    "bad",
    "is not a run's record (total_steps: ",
    1,
  ),
  "a record nested without end": (lambda room: _run(room, run_json="[" * 100_000), "bad", "is not a run's record", 1),
  "a record of a later version": (
    lambda room: _run(room, run_json=_record_with(format=99)),
    "bad",
    "bad/run.json: has format 99, this version knows 1",
    1,
  ),
  "a folder to write": (lambda room: None, "good --output good", "good: is a folder; name a file", 1),
  "no folder to write in": (lambda room: None, "good --output none/a.html", "none/a.html: there is no folder none", 1),
  "a folder that can't be written": (
    lambda room: None,
    "good --output /proc/a.html",
    "/proc/a.html: can't be written",
    1,
  ),
  "too long a name": (lambda room: None, f"good --output {'a' * 300}", "can't be written: File name too long", 1),
  "someone's file": (
    lambda room: (room / "mine.html").write_text("<p>mine"),
    "good --output mine.html",
    "mine.html: exists and is no report of this program",
    1,
  ),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_input_is_one_line(name: str, room: Path, capfd: pytest.CaptureFixture[str]):
  prepare, arguments, says, code = BAD[name]
  prepare(room)
  before = {path: path.read_bytes() for path in room.rglob("*") if path.is_file()}
  outcome = run_cli(["report", *arguments.split()], capfd)
  assert outcome.code == code
  assert len(outcome.errors) == 1
  assert says in outcome.errors[0]
  assert outcome.out == ""
  assert {path: path.read_bytes() for path in room.rglob("*") if path.is_file()} == before


def test_a_runs_page_is_rebuilt_in_its_folder(room: Path, capfd: pytest.CaptureFixture[str]):
  for _ in range(2):
    outcome = run_cli(["report", "good"], capfd)
    assert (outcome.code, outcome.out) == (0, "good/report.html\n")
  assert sorted(path.name for path in (room / "good").iterdir()) == ["metrics.jsonl", "report.html", "run.json"]


def test_several_runs_make_one_page_here(room: Path, capfd: pytest.CaptureFixture[str]):
  make_run(room / "second")
  outcome = run_cli(["report", "good", "second"], capfd)
  assert (outcome.code, outcome.out) == (0, "comparison.html\n")
  assert "2 runs compared" in (room / "comparison.html").read_text()
  assert not (room / "good" / "report.html").exists()


def test_a_line_that_a_kill_cut_short_is_left_out(room: Path, capfd: pytest.CaptureFixture[str]):
  with (room / "good" / "metrics.jsonl").open("a") as file:
    file.write('{"kind": "train", "st')
  assert run_cli(["report", "good"], capfd).code == 0


def test_help_and_mistakes_answer_without_the_heavy_parts(room: Path):
  import subprocess
  import sys

  script = (
    "import sys; from maxtext_posttrain.cli import main; code = main(sys.argv[1:]); print(code, 'numpy' in sys.modules)"
  )
  done = subprocess.run([sys.executable, "-c", script, "report"], cwd=room, capture_output=True, text=True, check=False)
  assert done.stdout.split() == ["2", "False"]


def test_a_record_reads_back_as_it_was(tmp_path: Path):
  written = record("a", tmp_path, text="ünï </script>")
  written.write(tmp_path)
  assert RunRecord.read(tmp_path) == written
