"""The command line run in this process: its exit code and what it printed, also from threads and native code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from maxtext_posttrain import cli


@dataclass(frozen=True)
class Outcome:
  code: int
  out: str
  err: str

  @property
  def errors(self) -> list[str]:
    """What standard error says in lines that begin with `error: `."""
    return [line.removeprefix("error: ") for line in self.err.splitlines() if line.startswith("error: ")]


def run_cli(argv: Sequence[str], capfd: pytest.CaptureFixture[str]) -> Outcome:
  """`posttrain ARGV` without a new process, whose imports take longer than most of what is tested."""
  capfd.readouterr()
  code = cli.main(list(argv))
  captured = capfd.readouterr()
  return Outcome(code, captured.out, captured.err)
