"""Folders as runs leave them, for the report: made by hand, and as nasty as is wanted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from maxtext_posttrain.data.report import BadRows, DataReport
from maxtext_posttrain.data.samples import Sample, Span
from maxtext_posttrain.report.run_file import ConfigValue, Part, RunRecord

HOSTILE = "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='no'\">{{ 7 * 7 }}&"


def train_metrics(steps: int, *, loss: float = 3.0) -> list[dict[str, Any]]:
  """A falling loss, evaluated at the start and at the end."""
  records = [
    {
      "kind": "train",
      "step": step,
      "loss": loss / step,
      "learning_rate": 1e-3 * step,
      "grad_norm": 1.0,
      "tokens": 8.0,
      "trained_tokens": 5.0,
      "step_seconds": 0.5,
      "tokens_per_second": 16.0 + step,
      "data_wait_seconds": 0.01,
      "save_wait_seconds": 0.04,
    }
    for step in range(1, steps + 1)
  ]
  first = {"kind": "eval", "step": 0, "loss": loss, "perplexity": 20.0}
  last = {"kind": "eval", "step": steps, "loss": loss / 2, "perplexity": 4.5}
  return [first, *records, last]


def record(name: str, folder: Path, *, config: Mapping[str, str] | None = None, text: str = "text") -> RunRecord:
  """A record whose every text that a user supplies is `text`."""
  chosen = {"steps": "4", "run_name": name, **(config or {})}
  values = {key: ConfigValue(value=value, source="command line", chosen=True) for key, value in chosen.items()}
  values["logical_axis_rules"] = ConfigValue(value="[]", source="base.yml", chosen=False)
  bad = DataReport(text, 10, 8, tokens=100, trained_tokens=60, rows=4, sequence_length=32, padding_share=0.125)
  bad.bad_rows[text] = BadRows(2, [text, text])
  return RunRecord(
    trainer="sft",
    name=name,
    directory=str(folder),
    working_directory=str(folder.parent),
    total_steps=4,
    config_file=str(folder / "c.yml"),
    config=values,
    maxtext_overrides={"base_output_directory": str(folder.parent), "base_emb_dim": 16, "hf_path": text, "steps": 4},
    facts={"Model": text, "Parameters": "1,234"},
    data={"training": bad},
    samples=[Sample([Span("user: ", trained=False), Span(text, trained=True)], 9, 5, 9)],
    checkpoints=str(folder / "checkpoints"),
    parts=[Part(started="2026-01-02 03:04:05+00:00", first_step=0, ended="now", last_step=4, outcome="all steps done")],
  )


def make_run(
  folder: Path,
  *,
  name: str | None = None,
  metrics: Iterable[Mapping[str, Any]] | None = None,
  config: Mapping[str, str] | None = None,
  text: str = "text",
  checkpoints: Mapping[int, int] | None = None,
) -> Path:
  """A run's folder: metrics, record, and checkpoints of so many bytes by step."""
  folder.mkdir(parents=True, exist_ok=True)
  lines = [json.dumps(dict(line)) for line in (train_metrics(4) if metrics is None else metrics)]
  (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
  record(name or folder.name, folder, config=config, text=text).write(folder)
  for step, size in (checkpoints or {}).items():
    items = folder / "checkpoints" / str(step) / "items"
    items.mkdir(parents=True)
    (items / "d").write_bytes(bytes(size))
  return folder
