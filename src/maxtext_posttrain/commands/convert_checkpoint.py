"""`posttrain convert`: a checkpoint in Tunix's layout becomes one that pre-training resumes from."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path

from maxtext_posttrain.commands.arguments import ArgumentParser
from maxtext_posttrain.errors import CheckpointError

_DESCRIPTION = """\
Reads a checkpoint in Tunix's layout (model_params, optimizer_state) and writes it in MaxText's, as the run's folder
NEW: weights, optimizer and step, and the configuration beside them. Tunix's rng state is of another kind and stays
behind: pre-training begins with fresh keys. NEW appears only once all of it was read back and is the same bit for bit.
Needs as much memory as the state has; needs no accelerator."""


def run(arguments: Sequence[str]) -> int:
  """Runs the command; returns the exit code.

  Raises:
    CheckpointError: see `conversion.convert`.
    ConfigError: the command line or the configuration is wrong.
  """
  parser = ArgumentParser("convert", _DESCRIPTION)
  parser.add_argument("old", metavar="OLD", help="a run's folder, its checkpoints, or a step's folder")
  parser.add_argument("new", metavar="NEW", help="the run's folder to write; it must not exist")
  parser.add_argument(
    "--config",
    required=True,
    nargs="+",
    metavar=("FILE", "key=value"),
    help="the configuration of the run that wrote OLD: its model and optimizer",
  )
  parser.add_argument("--step", type=int, metavar="N", help="which step of a run (default: the newest)")
  options = parser.parse_args(arguments)
  new = Path(options.new)
  if new.exists() or new.is_symlink():
    raise CheckpointError(f"{new} exists; name a folder that does not, nothing is overwritten")
  from maxtext_posttrain.config import load_model_config

  config = load_model_config(options.config)
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  # What cannot be converted is told before MaxText is imported.
  from maxtext_posttrain.checkpointing.locations import find_step
  from maxtext_posttrain.logs import quiet_logs

  quiet_logs(show=config.maxtext_log)
  find_step(options.old, step=options.step)
  with contextlib.redirect_stdout(io.StringIO()):
    from maxtext_posttrain.checkpointing.conversion import convert
  quiet_logs(show=config.maxtext_log)
  done = convert(options.old, new, config, step=options.step)
  for note in done.notes:
    print(f"note: {note}")
  print(f"{done.step_folder}: step {done.step}, {done.arrays} arrays, {done.nbytes:,} bytes, read back and the same")
  print(f"next: posttrain inspect {new}")
  return 0
