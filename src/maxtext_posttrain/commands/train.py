"""Runs a trainer: `posttrain <trainer> CONFIG [key=value ...] [options]`."""

from __future__ import annotations

import functools
import importlib
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maxtext_posttrain.ahead import run_ahead
from maxtext_posttrain.commands import Trainer
from maxtext_posttrain.errors import ConfigError
from maxtext_posttrain.logs import quiet_imports

if TYPE_CHECKING:
  from maxtext_posttrain.config import Config
  from maxtext_posttrain.data import PreparedData


_OPTIONS = {
  "--dry-run": "build everything, print the plan and an estimate of memory, train nothing",
  "--no-compile": "with --dry-run: compile nothing either, for a plan within seconds",
  "--print-config": "print every key, its value and where it came from, and stop",
  "--debug": "show tracebacks",
  "--help": "show this help",
}
_COLUMNS = 96
_INDENT = 6 * " "
_EXAMPLES = {"distill": "distillation"}
"""Quickstart's configuration of a trainer, where it has another name."""
_TRAINER_USAGE = """\
usage: posttrain {trainer} CONFIG [key=value ...] [options]

{summary}.

CONFIG is a YAML file, by its path or by its name in configs/.
Keys are MaxText's, nested ones dotted:
  posttrain {trainer} configs/quickstart/{example}.yml steps=5 learning_rate=1e-4 run_name=my-run
A variable M_<KEY> in the environment sets a key too, as in MaxText.

options:
{options}

keys beside MaxText's:
{keys}
"""


@dataclass(frozen=True)
class _Arguments:
  """A parsed command line: the configuration's arguments in order, and the options given."""

  config: list[str]
  options: frozenset[str]


def run_trainer(trainer: Trainer, arguments: Sequence[str]) -> int:
  """Runs one trainer's command line.

  Args:
    trainer: which.
    arguments: what follows its name.

  Returns:
    The exit code.

  Raises:
    ConfigError: the command line or the configuration is wrong.
  """
  from maxtext_posttrain.config import describe_config, load_config

  parsed = _parse(trainer.name, arguments)
  if "--help" in parsed.options:
    print(_trainer_usage(trainer), end="")
    return 0
  if not parsed.config:
    raise ConfigError(f"name a configuration: posttrain {trainer.name} config.yml [key=value ...] (--help lists more)")
  config = load_config(parsed.config, trainer=trainer.name)
  if "--print-config" in parsed.options:
    print(describe_config(config))
    return 0
  dry_run, compiles = "--dry-run" in parsed.options, "--no-compile" not in parsed.options
  if not (compiles or dry_run):
    raise ConfigError("--no-compile: belongs to --dry-run; a run compiles its steps")
  return run_configured(trainer, config, dry_run=dry_run, compiles=compiles)


def run_configured(trainer: Trainer, config: Config, *, dry_run: bool = False, compiles: bool = True) -> int:
  """Runs a trainer as configured; returns the exit code.

  Args:
    trainer: which.
    config: its configuration.
    dry_run: print the plan, and train nothing.
    compiles: False in a dry run compiles nothing.

  Raises:
    PostTrainError: one line on what ended the run.
  """
  prepared = run_ahead(functools.partial(_prepare, trainer, config))
  with quiet_imports(show=config.maxtext_log):
    from maxtext_posttrain.trainers import base

    objective = _named(trainer.objective)()
  return base.run(objective, config, dry_run=dry_run, compiles=compiles, prepared=prepared)


def _prepare(trainer: Trainer, config: Config) -> PreparedData:
  with quiet_imports(show=config.maxtext_log):
    return _named(trainer.prepare_data)(config)


def _named(path: str) -> Any:
  """What `module:name` names."""
  module, _, name = path.partition(":")
  return getattr(importlib.import_module(module), name)


def _parse(trainer: str, arguments: Sequence[str]) -> _Arguments:
  """Tells options from the configuration's arguments; they may stand in any order.

  Raises:
    ConfigError: there is an option that does not exist.
  """
  config: list[str] = []
  options: set[str] = set()
  problems: list[str] = []
  for argument in arguments:
    name = "--help" if argument == "-h" else argument
    if name in _OPTIONS:
      options.add(name)
    elif not name.startswith("-"):
      config.append(argument)
    elif "=" in name:
      problems.append(f"{argument}: keys are given without dashes: {argument.lstrip('-')}")
    else:
      problems.append(f"{argument}: no such option (see posttrain {trainer} --help)")
  if problems and "--help" not in options:
    raise ConfigError(problems)
  return _Arguments(config, frozenset(options))


def _trainer_usage(trainer: Trainer) -> str:
  from maxtext_posttrain.config import OUR_KEYS
  from maxtext_posttrain.config.values import plain

  options = "\n".join(f"  {name:<16} {what}" for name, what in _OPTIONS.items())
  keys = "\n".join(
    f"{_filled(f'{name}: {key.type} = {plain(key.default)}', '  ')}\n{_filled(key.doc, _INDENT)}"
    for name, key in OUR_KEYS.items()
    if key.trainer in (None, trainer.name)
  )
  summary = trainer.summary
  return _TRAINER_USAGE.format(
    trainer=trainer.name,
    example=_EXAMPLES.get(trainer.name, trainer.name),
    summary=summary[0].upper() + summary[1:],
    options=options,
    keys=keys,
  )


def _filled(text: str, indent: str) -> str:
  return textwrap.fill(text, _COLUMNS, initial_indent=indent, subsequent_indent=_INDENT, break_on_hyphens=False)
