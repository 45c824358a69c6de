"""What a run leaves for its page: the record as training starts, the page as it ends."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from maxtext_posttrain import __version__, commands, hosts
from maxtext_posttrain.checkpointing.manager import checkpointing_enabled
from maxtext_posttrain.config import shown_values
from maxtext_posttrain.config.schema import SECRET_KEYS
from maxtext_posttrain.errors import ReportError
from maxtext_posttrain.report import Logger, Reporter
from maxtext_posttrain.report.figures import duration, readable_bytes
from maxtext_posttrain.report.page import PAGE, write_page
from maxtext_posttrain.report.run_file import ConfigValue, Part, RunRecord
from maxtext_posttrain.report.run_folder import RunFolder
from maxtext_posttrain.trainers import plan

if TYPE_CHECKING:
  from maxtext_posttrain.trainers.base import Session

_PACKAGES = ("maxtext", "google-tunix", "jax", "flax", "optax", "orbax-checkpoint", "grain")


@contextlib.contextmanager
def leaving_report(session: Session, reporter: Reporter, *, completed: int, stop: Callable[[], bool]) -> Iterator[None]:
  """Writes `run.json` now, and `report.html` beside it when the block ends, however it ends.

  The page is a courtesy: where it can't be written a warning says so, and the run ends as it would have ended.

  Args:
    session: the run, about to train.
    reporter: its metrics.
    completed: the step it goes on from.
    stop: whether a signal asked for a stop.
  """
  if not hosts.is_first():
    yield
    return
  folder = session.run_directory
  record: RunRecord | None = None
  with _warning_only(reporter, "run.json"):
    record = _record(session, completed)
    record.write(folder)
  outcome = "failed"
  try:
    yield
    done = session.trainer.train_steps
    why = "stopped by a signal" if stop() else "ended" if done < session.maxtext.steps else "all steps done"
    outcome = f"{why}, at step {done:,}"
  except BaseException as error:
    outcome = f"failed: {(str(error).splitlines() or [type(error).__name__])[0]}"
    raise
  finally:
    with _warning_only(reporter, PAGE):
      if record is not None:
        part = record.parts[-1]
        part.ended, part.outcome = _now(), outcome
        part.last_step = reporter.last.get("train", {}).get("step", completed)
        record.write(folder)
      path = folder / PAGE
      write_page([RunFolder.read(folder)], path, commands.TRAINERS | commands.TOOLS)
      reporter.line(f"report: {path}")


def wandb_loggers(session: Session) -> list[Logger]:
  """The Weights & Biases logger where the configuration asks for it, in the first process.

  Raises:
    TrainingError: it can't be started.
  """
  config = session.config
  if not config.enable_wandb or not hosts.is_first():
    return []
  from maxtext_posttrain.report.wandb import WandbRun

  return [
    WandbRun(
      session.run_directory,
      project=config.wandb_project_name,
      name=config.wandb_run_name or session.maxtext.run_name,
      mode=config.wandb_mode,
      config=config.as_dict(),
    )
  ]


@contextlib.contextmanager
def _warning_only(reporter: Reporter, what: str) -> Iterator[None]:
  try:
    yield
  except Exception as error:
    message = " ".join(str(error).split()) or type(error).__name__
    reporter.line(f"warning: {what} could not be written: {message}")


def _now() -> str:
  return datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")


def _record(session: Session, completed: int) -> RunRecord:
  config, mt, datasets = session.config, session.maxtext, session.datasets
  folder = session.run_directory
  before = None
  if completed:
    # What went before is told where it can be; a broken record is replaced.
    with contextlib.suppress(ReportError):
      before = RunRecord.read(folder)
  data = {"training": datasets.train.report}
  if datasets.evaluation is not None:
    data["held out"] = datasets.evaluation.report
  checkpoints = checkpointing_enabled(config) and mt.enable_checkpointing
  overrides = config.maxtext_overrides()
  if "://" not in str(overrides.get("base_output_directory", "://")):
    overrides["base_output_directory"] = str(Path(overrides["base_output_directory"]).absolute())
  return RunRecord(
    trainer=session.objective.name,
    name=mt.run_name,
    directory=str(folder.absolute()),
    working_directory=str(Path.cwd()),
    total_steps=mt.steps,
    config_file=str(Path(config.path).absolute()),
    config={
      key: ConfigValue(value=value, source=config.sources[key], chosen=key in config.beyond_defaults)
      for key, value in shown_values(config).items()
    },
    maxtext_overrides={key: value for key, value in overrides.items() if key not in SECRET_KEYS},
    facts=_facts(session, completed),
    data=data,
    samples=list(datasets.train.samples),
    checkpoints=session.checkpoint_directory if checkpoints else None,
    parts=[*(before.parts if before is not None else []), Part(started=_now(), first_step=completed)],
  )


def _facts(session: Session, completed: int) -> dict[str, str]:
  """What the run is made of, in words."""
  mt = session.maxtext
  devices = session.mesh.devices.flatten()
  sequences = plan.sequences_of_an_update(session)
  facts = {
    "Model": mt.model_name,
    "Parameters": f"{plan.parameter_count(session):,}",
    "Trained parameters": f"{plan.trained_count(session):,}",
    "Layers": f"{mt.num_decoder_layers}",
    "Optimizer": session.config.opt_type,
    "Sequences an update": f"{sequences:,} of {mt.max_target_length:,} tokens",
    "Tokens an update, at most": f"{sequences * mt.max_target_length:,}",
    "Devices": f"{len(devices)} × {devices[0].device_kind}",
    "Processes": f"{jax.process_count()}",
    "Memory for temporaries": f"{readable_bytes(session.steps.memory.temp_size_in_bytes)} per device",
    "Compiled in": duration(session.steps.seconds),
    "Ready after": duration(time.perf_counter() - session.started),
    "Started from": f"step {completed:,}" if completed else _source(session),
    "Python": platform.python_version(),
    "maxtext-posttrain": __version__,
  }
  if session.lora is not None:
    facts["Adapter"] = plan.describe_adapter(session)
  for package in _PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      facts[package] = importlib.metadata.version(package)
  return facts


def _source(session: Session) -> str:
  mt = session.maxtext
  return mt.load_parameters_path or mt.load_full_state_path or "fresh weights"
