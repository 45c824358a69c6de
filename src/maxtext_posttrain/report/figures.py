"""The figures a run ended with, for the table at the head of its page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from maxtext_posttrain.report.run_folder import RunFolder

NONE = "–"


def figure_table(runs: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
  """Rows of a name and one value for each run; rows that no run has a value for are left out."""
  columns = [_figures(run) for run in runs]
  names = dict.fromkeys(name for column in columns for name in column)
  rows = [(name, [column.get(name, NONE) for column in columns]) for name in names]
  return [row for row in rows if any(value != NONE for value in row[1])]


def _figures(run: RunFolder) -> dict[str, str]:
  figures = {"Updates made": f"{run.last_step:,}"}
  if run.record is not None:
    figures["Updates made"] += f" of {run.record.total_steps:,}"
    outcome = run.record.parts[-1].outcome if run.record.parts else None
    figures["Ended"] = outcome or "no: it is running, or was killed"
  loss = run.curve("train", "loss")
  if loss.last is not None:
    figures["Training loss at last"] = _four_digits(loss.last)
  held_out = run.curve("eval", "loss")
  if held_out.finite:
    points = [(value, step) for step, value in zip(held_out.steps, held_out.values, strict=True) if value is not None]
    figures["Held-out loss at last"] = f"{_four_digits(points[-1][0])} at step {points[-1][1]:,}"
    best = min(points)
    figures["Held-out loss at best"] = f"{_four_digits(best[0])} at step {best[1]:,}"
  perplexity = run.curve("eval", "perplexity").last
  if perplexity is not None:
    figures["Held-out perplexity at last"] = f"{perplexity:,.2f}"
  figures |= run.evaluations
  figures |= _speed(run)
  return figures


def _speed(run: RunFolder) -> dict[str, str]:
  figures: dict[str, str] = {}
  for key, name, pattern in (
    ("tokens_per_second", "Tokens per second, median", "{:,.0f}"),
    ("tflops_per_device", "TFLOP/s per device, median", "{:.4g}"),
    ("mfu", "Model FLOPs utilization, median", "{:.1%}"),
  ):
    values = run.curve("train", key).finite
    if values:
      figures[name] = pattern.format(statistics.median(values))
  tokens = run.curve("train", "trained_tokens").finite
  if tokens:
    figures["Tokens trained on"] = f"{sum(tokens):,.0f}"
  seconds = sum(run.curve("train", "step_seconds").finite)
  if seconds:
    figures["Time in updates"] = duration(seconds)
    for key, name in (("data_wait_seconds", "data"), ("save_wait_seconds", "saving")):
      figures[f"of it waiting for {name}"] = f"{sum(run.curve('train', key).finite) / seconds:.2%}"
  skipped = run.curve("train", "skipped_updates").last
  if skipped:
    figures["Updates skipped"] = f"{skipped:,.0f}"
  return figures


def _four_digits(value: float) -> str:
  """Four decimals, or four digits where those would be zeros: GRPO's loss is about 0."""
  return f"{value:.4f}" if abs(value) >= 0.1 or not value else f"{value:.4g}"


def duration(seconds: float) -> str:
  """Seconds for reading: `42.0 s`, `3 min 12 s`, `5 h 4 min`."""
  if seconds < 60:
    return f"{seconds:.1f} s"
  minutes, rest = divmod(round(seconds), 60)
  if minutes < 60:
    return f"{minutes} min {rest} s"
  return f"{minutes // 60:,} h {minutes % 60} min"


def readable_bytes(number: float) -> str:
  """Bytes for reading: `17.2 MiB`."""
  for unit in ("B", "KiB", "MiB", "GiB"):
    if number < 1024:
      return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
    number /= 1024
  return f"{number:,.1f} TiB"
