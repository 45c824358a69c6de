"""The `posttrain` command line.

  posttrain sft CONFIG [key=value ...] [--dry-run] [--print-config] [--debug]

Exit codes: 0 the run did all it was asked to; 2 the command line or the configuration is wrong, found before anything
heavy is imported; 130 interrupted; 143 terminated, after saving; 1 anything else. What is wrong is said in one line
each on standard error; a traceback appears only with `--debug`.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from maxtext_posttrain import __version__
from maxtext_posttrain.errors import ConfigError, PostTrainError

EXIT_INTERNAL = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_TRAINERS = {"sft": "supervised fine-tuning on chat data"}
_OPTIONS = {
  "--dry-run": "build everything, print the plan, train nothing",
  "--print-config": "print every key, its value and where it came from, and stop",
  "--debug": "show tracebacks",
  "--help": "show this help",
}

_USAGE = """\
usage: posttrain TRAINER CONFIG [key=value ...] [options]

Post-training for MaxText whose checkpoints pre-training resumes from as they are.

trainers:
{trainers}

posttrain TRAINER --help    options and keys
posttrain --version         version
"""

_TRAINER_USAGE = """\
usage: posttrain {trainer} CONFIG [key=value ...] [options]

{summary}.

CONFIG is a YAML file, by its path or by its name in configs/. Keys are MaxText's, nested ones dotted:
  posttrain {trainer} configs/quickstart/sft.yml steps=5 learning_rate=1e-4 'train_data_columns=[question,answer]'
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


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command line, without the program's name; returns the exit code."""
  arguments = list(sys.argv[1:] if argv is None else argv)
  try:
    return _guarded(arguments)
  finally:
    _flush(sys.stdout)


def _guarded(arguments: list[str]) -> int:
  """Runs the command and turns what it raises into lines and an exit code."""
  debug = "--debug" in arguments
  try:
    return _run(arguments)
  except ConfigError as error:
    return _fail(error.problems, error.exit_code, debug)
  except PostTrainError as error:
    return _fail(str(error).splitlines() or [type(error).__name__], error.exit_code, debug)
  except KeyboardInterrupt:
    return _fail(["interrupted"], EXIT_INTERRUPTED, debug)
  except BrokenPipeError:
    _drop_output()
    return EXIT_INTERNAL
  except Exception as error:
    message = " ".join(str(error).split())
    what = f"internal: {type(error).__name__}: {message}" if message else f"internal: {type(error).__name__}"
    hint = "" if debug else " (run again with --debug for the traceback)"
    return _fail([f"{what}{hint}"], EXIT_INTERNAL, debug)


def _run(arguments: list[str]) -> int:
  if not arguments or arguments[0] in ("--help", "-h", "help"):
    names = "\n".join(f"  {name:<8} {summary}" for name, summary in _TRAINERS.items())
    print(_USAGE.format(trainers=names), end="", file=sys.stdout if arguments else sys.stderr)
    return 0 if arguments else EXIT_USAGE
  if arguments[0] == "--version":
    print(f"maxtext-posttrain {__version__}")
    return 0
  trainer, *rest = arguments
  if trainer not in _TRAINERS:
    raise ConfigError(f"{trainer}: no such trainer; there is {', '.join(_TRAINERS)} (see posttrain --help)")
  return _run_trainer(trainer, _parse(trainer, rest))


def _run_trainer(trainer: str, arguments: _Arguments) -> int:
  from maxtext_posttrain.config import describe_config, load_config

  if "--help" in arguments.options:
    print(_trainer_usage(trainer), end="")
    return 0
  if not arguments.config:
    raise ConfigError(f"name a configuration: posttrain {trainer} config.yml [key=value ...] (--help lists more)")
  config = load_config(arguments.config, trainer=trainer)
  if "--print-config" in arguments.options:
    print(describe_config(config))
    return 0
  with _quiet_imports(show=config.maxtext_log):
    from maxtext_posttrain.trainers import sft
  return sft.main(config, dry_run="--dry-run" in arguments.options)


@contextlib.contextmanager
def _quiet_imports(*, show: bool) -> Iterator[None]:
  """Keeps off the screen what MaxText and transformers print of absent optional parts while they are imported."""
  if show:
    yield
    return
  os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  with contextlib.redirect_stdout(io.StringIO()):
    yield


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


def _trainer_usage(trainer: str) -> str:
  from maxtext_posttrain.config import OUR_KEYS
  from maxtext_posttrain.config.values import plain

  options = "\n".join(f"  {name:<16} {what}" for name, what in _OPTIONS.items())
  keys = "\n".join(f"  {name}: {key.type} = {plain(key.default)}\n      {key.doc}" for name, key in OUR_KEYS.items())
  summary = _TRAINERS[trainer]
  return _TRAINER_USAGE.format(trainer=trainer, summary=summary[0].upper() + summary[1:], options=options, keys=keys)


def _fail(lines: Sequence[str], code: int, debug: bool) -> int:
  if debug:
    traceback.print_exc()
  for line in lines:
    print(f"error: {line}", file=sys.stderr)
  return code


def _flush(stream: TextIO) -> None:
  """Flushes what is left to print, where a reader that has gone away would otherwise raise at exit."""
  try:
    stream.flush()
  except BrokenPipeError:
    _drop_output()


def _drop_output() -> None:
  """Sends the rest of standard output nowhere: its reader has gone, and the interpreter flushes once more at exit."""
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
  sys.exit(main())
