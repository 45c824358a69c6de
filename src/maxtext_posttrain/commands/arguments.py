"""Command-line arguments of the tools: argparse, whose complaints are our one-line errors."""

from __future__ import annotations

import argparse
from typing import NoReturn

from maxtext_posttrain.errors import ConfigError


class ArgumentParser(argparse.ArgumentParser):
  """argparse that raises where it would print its usage and exit; `--help` still prints and exits with 0."""

  def __init__(self, command: str, description: str):
    """Makes the parser of `posttrain <command>`."""
    super().__init__(prog=f"posttrain {command}", description=description, allow_abbrev=False)
    self.add_argument("--debug", action="store_true", help="show tracebacks")

  def error(self, message: str) -> NoReturn:
    """Raises `message` as a mistake in the command line."""
    raise ConfigError(f"{self.prog}: {message} (see {self.prog} --help)")
