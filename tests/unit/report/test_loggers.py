"""What a run leaves behind, and what it prints."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from maxtext_posttrain.errors import TrainingError
from maxtext_posttrain.performance import peak_tflops, throughput_metrics
from maxtext_posttrain.report import MetricsFile, Reporter, read_metrics


def test_records_past_the_restored_step_are_dropped(tmp_path: Path):
  path = tmp_path / "metrics.jsonl"
  metrics = MetricsFile(path)
  for step in (1, 2, 3):
    metrics.write("train", step, {"loss": float(step)})
  metrics.write("eval", 2, {"loss": 0.5})
  metrics.close()
  with path.open("a") as file:
    file.write('{"kind": "train", "step": 4, "lo')  # Killed in the middle of a line.
  metrics = MetricsFile(path, completed_steps=2)
  assert metrics.has("train", 2)
  assert metrics.has("eval", 2)
  assert not metrics.has("train", 3)
  metrics.write("train", 3, {"loss": 9.0})
  metrics.close()
  steps = [(record["kind"], record["step"], record["loss"]) for record in read_metrics(path)]
  assert steps == [("train", 1, 1.0), ("train", 2, 2.0), ("eval", 2, 0.5), ("train", 3, 9.0)]


def test_numbers_that_json_does_not_know_become_null(tmp_path: Path):
  metrics = MetricsFile(tmp_path / "metrics.jsonl")
  metrics.write("train", 1, {"loss": float("nan"), "grad_norm": float("inf")})
  metrics.close()
  record = json.loads((tmp_path / "metrics.jsonl").read_text())
  assert record["loss"] is None
  assert record["grad_norm"] is None


def test_a_log_gets_a_line_every_n_steps(tmp_path: Path):
  stream = io.StringIO()
  reporter = Reporter(tmp_path, total_steps=7, log_every=3, stream=stream)
  for step in range(1, 8):
    reporter.train(step, {"loss": 1.0})
  reporter.close()
  assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/7", "3/7", "6/7", "7/7"]


def test_a_terminal_keeps_one_line(tmp_path: Path):
  class Terminal(io.StringIO):
    def isatty(self) -> bool:
      return True

  stream = Terminal()
  reporter = Reporter(tmp_path, total_steps=50, stream=stream)
  for step in range(1, 51):
    reporter.train(step, {"loss": 1.0, "learning_rate": 0.1})
  reporter.close()
  assert stream.getvalue().count("\n") == 1


def test_peaks_and_throughput_by_hand():
  assert peak_tflops("TPU v5 lite") == 197.0
  assert peak_tflops("TPU v5") == 459.0
  assert peak_tflops("TPU v6 lite") == 918.0
  assert peak_tflops("NVIDIA H200") == 989.0
  assert peak_tflops("cpu") is None
  values = throughput_metrics(tflops_per_update=50.0, peak=200.0, devices=4)(1000.0, 0.5)
  assert values == {
    "tokens_per_second": 2000.0,
    "tokens_per_second_per_device": 500.0,
    "tflops_per_device": 100.0,
    "mfu": 0.5,
  }


def test_a_metrics_file_of_something_else_is_left_alone(tmp_path: Path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"kind": "train", "step": 1}\n{"kind": "tr\n{"kind": "train", "step": 2}\n')
  before = path.read_bytes()
  with pytest.raises(TrainingError, match=r"metrics\.jsonl, line 2: is not a record"):
    MetricsFile(path, completed_steps=2)
  assert path.read_bytes() == before


def test_tensorboard_events_say_where_a_run_goes_on(tmp_path: Path):
  from tensorboardX.proto import event_pb2

  folder = tmp_path / "tensorboard"
  reporter = Reporter(tmp_path, total_steps=9, completed_steps=4, tensorboard_directory=str(folder))
  reporter.train(5, {"loss": 1.5, "trained_tokens": 3})
  reporter.close()
  (file,) = folder.iterdir()
  data, events = file.read_bytes(), []
  while data:  # TFRecord: length, its checksum, the event, its checksum.
    length = int.from_bytes(data[:8], "little")
    events.append(vars(event_pb2)["Event"].FromString(data[12 : 12 + length]))
    data = data[16 + length :]
  version, start, metrics = events
  assert version.file_version == "brain.Event:2"
  assert (start.step, start.session_log.status) == (5, start.session_log.START)
  assert (metrics.step, {value.tag: value.simple_value for value in metrics.summary.value}) == (
    5,
    {"train/loss": 1.5, "train/trained_tokens": 3.0},
  )
