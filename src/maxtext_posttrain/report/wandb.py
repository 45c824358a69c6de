"""Weights & Biases, an option: its package is imported only where `enable_wandb` asks for it."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from maxtext_posttrain.errors import TrainingError


class WandbRun:
  """A run of Weights & Biases; a post-training run that is resumed goes on with the one it had.

  Its own files lie in `<run folder>/wandb`. It is told the metrics and the configuration with secrets masked, and
  nothing it would gather by itself: the command line it would record may hold a token.
  """

  def __init__(self, directory: Path, *, project: str, name: str, mode: str | None, config: Mapping[str, Any]):
    """Starts or resumes it.

    Args:
      directory: the run's folder.
      project: `wandb_project_name`.
      name: what to show the run as.
      mode: "online", "offline", or None for what WANDB_MODE says.
      config: the configuration, secrets masked.

    Raises:
      TrainingError: it can't be started: not logged in, no network, a folder that can't be written.
    """
    import wandb

    # The folder tells runs of one name apart.
    identity = hashlib.blake2b(str(directory.resolve()).encode(), digest_size=8).hexdigest()
    settings = wandb.Settings(
      console="off",
      disable_code=True,
      disable_git=True,
      silent=True,
      x_disable_machine_info=True,
      x_disable_meta=True,
      x_disable_stats=True,
      x_save_requirements=False,
    )
    with _one_line_errors():
      directory.mkdir(parents=True, exist_ok=True)
      self._run = wandb.init(
        project=project,
        name=name,
        id=identity,
        dir=directory,
        config=dict(config),
        mode=mode,  # pyright: ignore[reportArgumentType]
        resume="allow",
        settings=settings,
      )
      # Steps are a metric: W&B's own count can't go back, and a resumed run may.
      self._run.define_metric("step", hidden=True)
      self._run.define_metric("*", step_metric="step")

  def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
    """Logs the numbers of a step as `kind/key`."""
    numbers = {f"{kind}/{key}": value for key, value in values.items() if isinstance(value, (int, float))}
    with _one_line_errors():
      self._run.log({"step": step, **numbers})

  def close(self) -> None:
    """Sends what is left; a run that ends by an exception is marked as failed."""
    with _one_line_errors():
      self._run.finish(exit_code=0 if sys.exception() is None else 1)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
  """The package's exceptions as one line."""
  import wandb

  try:
    yield
  except (wandb.Error, OSError) as error:
    message = " ".join(str(error).split())
    raise TrainingError(
      f"Weights & Biases: {message}; log in with `wandb login`, or set wandb_mode=offline or enable_wandb=false"
    ) from error
