"""The `posttrain` command line.

  posttrain sft CONFIG [key=value ...] [--dry-run] [--print-config] [--debug]
  posttrain TOOL ...   (posttrain --help lists them)

Exit codes: 0 the run did all it was asked to; 2 the command line or the configuration is wrong, found before anything
heavy is imported; 130 interrupted; 143 terminated, after saving; 1 anything else. What is wrong is said in one line
each on standard error; a traceback appears only with `--debug`.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import TextIO

from maxtext_posttrain import __version__
from maxtext_posttrain.allocator import restart_with_tunables
from maxtext_posttrain.commands import TOOLS, TRAINERS, Command, Run, Trainer
from maxtext_posttrain.errors import ConfigError, PostTrainError

EXIT_INTERNAL = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_USAGE = """\
usage: posttrain TRAINER CONFIG [key=value ...] [options]
       posttrain TOOL ...

Post-training for MaxText whose checkpoints pre-training resumes from as they are.

trainers:
{trainers}

tools:
{tools}

posttrain TRAINER --help    options and keys; likewise of a tool
posttrain --version         version
"""


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command line, without the program's name; returns the exit code."""
  arguments = list(sys.argv[1:] if argv is None else argv)
  if argv is None and arguments and arguments[0] in TRAINERS:
    restart_with_tunables()
  return _finished(_run, arguments)


def main_of(trainer: Trainer, argv: Sequence[str] | None = None) -> int:
  """Runs a program that is one trainer, ours (`python -m train_sft`) or a user's: see docs/adding_a_trainer.md."""
  if argv is None:
    restart_with_tunables()
  return _finished(trainer.load(), list(sys.argv[1:] if argv is None else argv))


def _finished(run: Run, arguments: list[str]) -> int:
  try:
    return _guarded(run, arguments)
  finally:
    _flush(sys.stdout)


def _guarded(run: Run, arguments: list[str]) -> int:
  """Runs a command and turns what it raises into lines and an exit code."""
  debug = "--debug" in arguments
  try:
    return run(arguments)
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


def _run(arguments: Sequence[str]) -> int:
  if not arguments or arguments[0] in ("--help", "-h", "help"):
    usage = _USAGE.format(trainers=_listed(TRAINERS), tools=_listed(TOOLS))
    print(usage, end="", file=sys.stdout if arguments else sys.stderr)
    return 0 if arguments else EXIT_USAGE
  if arguments[0] == "--version":
    print(f"maxtext-posttrain {__version__}")
    return 0
  name, *rest = arguments
  commands: Mapping[str, Trainer | Command] = {**TRAINERS, **TOOLS}
  if name not in commands:
    raise ConfigError(f"{name}: no such command (posttrain --help lists them)")
  return commands[name].load()(rest)


def _listed(commands: Mapping[str, Command | Trainer]) -> str:
  width = max(map(len, (*TRAINERS, *TOOLS)))
  return "\n".join(f"  {name:<{width}} {command.summary}" for name, command in commands.items())


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
