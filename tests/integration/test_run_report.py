"""What a run leaves for its reader: the page, the record, and a Weights & Biases run, however it ends."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from maxtext_posttrain.config import load_config
from maxtext_posttrain.report import Reporter
from maxtext_posttrain.report.metrics_file import read_metrics
from maxtext_posttrain.report.run_file import RunRecord
from maxtext_posttrain.trainers.base import Session
from maxtext_posttrain.trainers.record import leaving_report
from maxtext_posttrain.trainers.sft import SFT
from maxtext_posttrain.trainers.signals import StopRequest
from tests.support.runs import write_config

TOKEN = "hf_" + "secret" * 4
ROWS = [
  {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n}."}]}
  for n in range(6)
]


def _argv(folder: Path) -> list[str]:
  rows = folder / "rows.jsonl"
  rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + '{"messages": []}\n')
  return [
    str(write_config(folder)),
    "run_name=r",
    f"base_output_directory={folder}",
    "dataset_type=hf",
    f"hf_train_files={rows}",
    "max_bad_rows=1",
    "tokenizer_type=sentencepiece",
    "tokenizer_path=maxtext://tokenizers/tokenizer.llama2",
    "chat_template=plain",
    "vocab_size=32000",
    "steps=4",
    "enable_wandb=true",
    "wandb_mode=offline",
    f"hf_access_token={TOKEN}",
  ]


def _train(argv: list[str], *, stop_after: int | None = None) -> int:
  session = Session(SFT(), load_config(argv))
  stop = StopRequest()
  if stop_after is not None:
    report = Reporter.train

    def train(self: Reporter, step: int, values: Any) -> None:
      report(self, step, values)
      if step == stop_after:
        stop.signal_number = 15

    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(Reporter, "train", train)
      return session.train(stop)
  return session.train(stop)


@pytest.fixture(scope="module")
def stopped_and_resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunRecord, str]:
  """A run that a signal stopped, its record and page then, and its folder once it was resumed to its end."""
  folder = tmp_path_factory.mktemp("report")
  argv = _argv(folder)
  assert _train(argv, stop_after=1) == 143
  run = folder / "r"
  record = RunRecord.read(run)
  assert record is not None
  page = (run / "report.html").read_text()
  assert _train(argv) == 0
  return run, record, page


@pytest.mark.slow
def test_a_stopped_run_leaves_its_page(stopped_and_resumed: tuple[Path, RunRecord, str]):
  _, record, page = stopped_and_resumed
  (part,) = record.parts
  assert part.outcome is not None
  assert part.outcome.startswith("stopped by a signal, at step ")
  assert part.ended is not None
  assert part.outcome in page


@pytest.mark.slow
def test_a_finished_run_is_told_whole(stopped_and_resumed: tuple[Path, RunRecord, str]):
  run, first, _ = stopped_and_resumed
  record = RunRecord.read(run)
  assert record is not None
  assert [part.outcome for part in record.parts] == [first.parts[0].outcome, "all steps done, at step 4"]
  assert record.parts[1].first_step == first.parts[0].last_step
  assert record.parts[1].last_step == 4
  data = record.data["training"]
  assert (data.rows_read, data.examples, data.bad_row_count) == (7, 6, 1)
  assert len(record.samples) == 3
  assert "".join(span.text for span in record.samples[1].spans if span.trained).strip().startswith("It is 1.")
  assert not [span for span in record.samples[1].spans if span.trained and "What" in span.text]
  assert record.facts["Parameters"].replace(",", "").isdigit()
  page = (run / "report.html").read_text()
  assert "all steps done, at step 4" in page
  assert "maxtext.trainers.pre_train.train" in page
  assert "It is 1." in page


@pytest.mark.slow
def test_secrets_are_in_no_file(stopped_and_resumed: tuple[Path, RunRecord, str]):
  run, _, _ = stopped_and_resumed
  files = [path for path in run.rglob("*") if path.is_file()]
  assert [path for path in files if path.suffix == ".wandb"]
  assert [path for path in files if path.name == "run.json"]
  assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []


def test_a_page_that_cant_be_written_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
  reporter = Reporter(tmp_path, total_steps=1)
  reporter.train(1, {"loss": 1.0})
  (tmp_path / "report.html").mkdir()
  session: Any = SimpleNamespace(
    run_directory=tmp_path, trainer=SimpleNamespace(train_steps=1), maxtext=SimpleNamespace(steps=1), config=None
  )
  with leaving_report(session, reporter, completed=0, stop=lambda: False):
    reporter.close()
  out = capsys.readouterr().out
  assert "warning: run.json could not be written: " in out
  assert f"warning: report.html could not be written: {tmp_path}/report.html: is a folder" in out


def test_an_update_takes_as_long_as_its_waits(tmp_path: Path):
  """Also after a save and an evaluation at the same step; the latter's time is no update's."""
  argv = [each for each in _argv(tmp_path) if not each.startswith(("enable_wandb", "wandb_mode"))]
  rows = f"hf_eval_files={tmp_path}/rows.jsonl"
  assert _train([*argv, "checkpoint_period=2", "eval_interval=2", rows]) == 0
  updates = [each for each in read_metrics(tmp_path / "r" / "metrics.jsonl") if each["kind"] == "train"]
  assert updates[2]["save_wait_seconds"] > 0
  for each in updates:
    assert each["data_wait_seconds"] + each["save_wait_seconds"] <= each["step_seconds"], each


def test_what_ended_a_run_is_not_hidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
  reporter = Reporter(tmp_path, total_steps=1)
  session: Any = SimpleNamespace(run_directory=tmp_path / "gone", config=None)
  with pytest.raises(KeyError, match="the loss"), leaving_report(session, reporter, completed=0, stop=lambda: False):
    raise KeyError("the loss")
  assert "warning: report.html could not be written" in capsys.readouterr().out
  reporter.close()
