"""Takes a run's metrics, shows them and hands them to the loggers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from maxtext_posttrain.report.logger import Logger
from maxtext_posttrain.report.metrics_file import MetricsFile
from maxtext_posttrain.report.tensorboard import TensorBoardFile

_SHOWN = ("loss", "reward", "kl", "learning_rate", "grad_norm", "tokens_per_second")


class Reporter:
  """Takes a run's metrics and shows them: file, other loggers, and either one live line or a line every N steps."""

  def __init__(
    self,
    run_directory: Path | None,
    *,
    total_steps: int,
    completed_steps: int = 0,
    tensorboard_directory: str | None = None,
    loggers: Sequence[Logger] = (),
    log_every: int = 10,
    stream: TextIO | None = None,
  ):
    """Opens the outputs.

    Args:
      run_directory: where `metrics.jsonl` goes; None writes none, as where another process does.
      total_steps: the step at which the run ends.
      completed_steps: the step it goes on from.
      tensorboard_directory: None writes no TensorBoard events.
      loggers: where metrics go besides; the reporter closes them.
      log_every: steps between lines where the stream is not a terminal.
      stream: standard output by default.
    """
    self._metrics: MetricsFile | None = None
    if run_directory is not None:
      self._metrics = MetricsFile(run_directory / "metrics.jsonl", completed_steps=completed_steps)
    self.last: dict[str, dict[str, Any]] = {}
    self._stream = stream or sys.stdout
    self._log_every = log_every
    self._total_steps = total_steps
    self._bar: tqdm | None = None
    if self._stream.isatty():
      self._bar = tqdm(
        total=total_steps, initial=completed_steps, file=self._stream, dynamic_ncols=True, desc="training", unit="step"
      )
    self._loggers: list[Logger] = [*([] if self._metrics is None else [self._metrics]), *loggers]
    if tensorboard_directory is not None:
      self._loggers.append(TensorBoardFile(tensorboard_directory, purge_step=completed_steps + 1))

  def has(self, kind: str, step: int) -> bool:
    """Whether `metrics.jsonl` holds a record of this kind and step."""
    return self._metrics is not None and self._metrics.has(kind, step)

  def line(self, text: str) -> None:
    """Prints a line without breaking the progress bar."""
    if self._bar is not None:
      self._bar.write(text, file=self._stream)
    else:
      print(text, file=self._stream, flush=True)

  def train(self, step: int, values: Mapping[str, Any]) -> None:
    """Reports one update."""
    self._record("train", step, values)
    if self._bar is not None:
      self._bar.set_postfix({key: f"{values[key]:.4g}" for key in _SHOWN if values.get(key) is not None}, refresh=False)
      self._bar.update(step - self._bar.n)
    elif step % self._log_every == 0 or step == self._total_steps or step == 1:
      shown = "  ".join(f"{key} {values[key]:.4g}" for key in _SHOWN if values.get(key) is not None)
      self.line(f"step {step}/{self._total_steps}  {shown}")

  def evaluation(self, step: int, values: Mapping[str, Any]) -> None:
    """Reports one evaluation."""
    self._record("eval", step, values)
    shown = "  ".join(f"{key} {value:.4f}" for key, value in values.items() if isinstance(value, float))
    self.line(f"evaluation at step {step}  {shown}")

  def _record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
    self.last[kind] = {"step": step, **values}
    for logger in self._loggers:
      logger.write(kind, step, values)

  def close(self) -> None:
    """Closes every output, each whatever becomes of the others; a second call does nothing."""
    if self._bar is not None:
      self._bar.close()
    loggers, self._loggers = self._loggers, []
    with contextlib.ExitStack() as stack:
      for logger in reversed(loggers):
        stack.callback(logger.close)
