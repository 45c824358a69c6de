"""The configuration a run leaves in its folder, from which the model it made is built again."""

from __future__ import annotations

from pathlib import Path

import yaml

from maxtext_posttrain.config.view import Config
from maxtext_posttrain.errors import TrainingError
from maxtext_posttrain.files import write_atomically

RUN_CONFIG = "config.yml"
"""Of a run, in its folder."""

MODEL_CONFIG = "model.yml"
"""Of an imported model, beside its step's folder."""


def save_config(config: Config, folder: Path) -> None:
  """Writes what was chosen for a run to its folder, in place of what an earlier start of it left there.

  Raises:
    TrainingError: the file can't be written.
  """
  path = folder / RUN_CONFIG
  try:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, yaml.safe_dump(config.chosen(), allow_unicode=True))
  except OSError as error:
    raise TrainingError(
      f"{path} can't be written: {error.strerror or error}; make room for it, or change base_output_directory"
    ) from error
