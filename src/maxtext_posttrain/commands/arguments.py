"""Command-line arguments of the tools: argparse, whose complaints are our one-line errors."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
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


class ModelArgumentParser(ArgumentParser):
  """The parser of a command on a model: where it lies, its configuration, and keys laid over that."""

  def __init__(self, command: str, description: str, *, others: str):
    """Makes the parser; `others` says how what is no key is given, as `data with --data`."""
    super().__init__(command, description)
    self._others = others
    self.add_argument("path", metavar="RUN_OR_ITEMS", help="a run, its checkpoints, a step's folder or its items")
    self.add_argument("overrides", metavar="key=value", nargs="*", help="laid over the model's configuration")
    self.add_argument("--config", metavar="FILE", help="the model's configuration, where none lies above its weights")

  def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
    """Parses a command line; keys may stand anywhere after the path.

    Raises:
      ConfigError: it is wrong, or a key has no value.
    """
    options = self.parse_intermixed_args(arguments)
    for override in options.overrides:
      if "=" not in override:
        self.error(f"{override}: keys are given as key=value, {self._others}")
    return options
