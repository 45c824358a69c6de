"""`run.json`: what a run's page needs beside its metrics, written as training starts and once more as it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from maxtext_posttrain.data.report import DataReport
from maxtext_posttrain.data.samples import Sample
from maxtext_posttrain.errors import ReportError
from maxtext_posttrain.files import write_atomically

RUN_FILE = "run.json"

_LARGEST_BYTES = 64 << 20
_FORMAT = 1


class ConfigValue(BaseModel):
  """One key's value as `--print-config` shows it, where it came from, and whether that is more than a default."""

  value: str
  source: str
  chosen: bool


class Part(BaseModel):
  """One process's share of a run: from its start, or a resume, to its end.

  Attributes:
    started: ISO 8601.
    first_step: the step it went on from.
    ended: ISO 8601; None while it runs, and for ever where it was killed.
    last_step: the last update it reported.
    outcome: how it ended, in words.
  """

  started: str
  first_step: int
  ended: str | None = None
  last_step: int | None = None
  outcome: str | None = None


class RunRecord(BaseModel):
  """A run as its page shows it.

  Attributes:
    trainer: its command, as `sft`.
    name: `run_name`.
    directory: the run's folder.
    working_directory: what relative paths in the configuration are relative to.
    total_steps: the step at which it is to end.
    config_file: the YAML it was started with.
    config: every key.
    maxtext_overrides: what MaxText was told on top of its base.yml; secrets left out.
    facts: model, batch, devices, versions.
    data: what became of the rows, by data set.
    samples: a few training examples.
    checkpoints: the folder of checkpoints; None where none are written.
    parts: one for each time it was started.
  """

  model_config = ConfigDict(extra="ignore")

  format: int = _FORMAT
  trainer: str
  name: str
  directory: str
  working_directory: str
  total_steps: int
  config_file: str
  config: dict[str, ConfigValue] = Field(default_factory=dict)
  maxtext_overrides: dict[str, Any] = Field(default_factory=dict)
  facts: dict[str, str] = Field(default_factory=dict)
  data: dict[str, DataReport] = Field(default_factory=dict)
  samples: list[Sample] = Field(default_factory=list)
  checkpoints: str | None = None
  parts: list[Part] = Field(default_factory=list)

  @property
  def chosen(self) -> frozenset[str]:
    """The keys that have more than a default."""
    return frozenset(key for key, entry in self.config.items() if entry.chosen)

  @property
  def trains_adapter(self) -> bool:
    """Whether its checkpoints hold a LoRA adapter and no full weights."""
    lora = self.maxtext_overrides.get("lora")
    return isinstance(lora, dict) and bool(lora.get("enable_lora"))

  @property
  def first_step(self) -> int | None:
    """The step at which it was first started; above 0 where it went on from something else in its folder."""
    return self.parts[0].first_step if self.parts else None

  def write(self, folder: Path) -> None:
    """Writes the record into a run's folder.

    Raises:
      OSError: that is not possible.
    """
    write_atomically(folder / RUN_FILE, self.model_dump_json(indent=1))

  @classmethod
  def read(cls, folder: Path) -> RunRecord | None:
    """The record in a run's folder; None where there is none.

    Raises:
      ReportError: it can't be read, or is something else.
    """
    path = folder / RUN_FILE
    try:
      if not path.exists():
        return None
      if path.stat().st_size > _LARGEST_BYTES:
        raise ReportError(f"{path}: is larger than {_LARGEST_BYTES >> 20} MiB, which no run writes; move it away")
      record = cls.model_validate_json(path.read_bytes())
    except OSError as error:
      raise ReportError(f"{path}: can't be read: {error.strerror or error}") from error
    except ValidationError as error:
      first = error.errors(include_url=False, include_input=False)[0]
      where = ".".join(map(str, first["loc"]))
      what = f"{where}: {first['msg']}" if where else first["msg"]
      raise ReportError(
        f"{path}: is not a run's record ({what}); move it away for a page of the metrics alone"
      ) from None
    if record.format != _FORMAT:
      raise ReportError(f"{path}: has format {record.format}, this version knows {_FORMAT}; update maxtext-posttrain")
    return record
