"""A program starts itself anew with the allocator's tunable, once, as it was called, and not against the user."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from maxtext_posttrain import cli, huge_pages

PROGRAM = """
import os, sys
from pathlib import Path
from maxtext_posttrain import huge_pages
huge_pages._ENABLED = Path(sys.argv[1])
print(os.getpid(), flush=True)
huge_pages.restart_with_huge_pages()
print(os.environ.get("GLIBC_TUNABLES"), sys.argv[2:], sys.flags.utf8_mode, sep="|")
"""
supported = pytest.mark.skipif(not huge_pages._allocator_can(), reason="needs glibc 2.35")


def run(folder: Path, enabled: str, tunables: str | None) -> tuple[list[str], str]:
  """Lines with the process numbers, and the last line."""
  (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
  (folder / "enabled").write_text(enabled, encoding="utf-8")
  environment = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
  if tunables is not None:
    environment["GLIBC_TUNABLES"] = tunables
  command = [sys.executable, "-X", "utf8", str(folder / "program.py"), str(folder / "enabled"), "a=1 2", "b"]
  *numbers, last = subprocess.check_output(command, text=True, env=environment).splitlines()
  return numbers, last


@supported
def test_restarts_once_with_the_same_arguments(tmp_path: Path):
  numbers, last = run(tmp_path, "always [madvise] never", None)
  assert len(numbers) == 2
  assert numbers[0] == numbers[1]
  assert last == "glibc.malloc.hugetlb=1|['a=1 2', 'b']|1"


@supported
def test_other_tunables_stay(tmp_path: Path):
  _, last = run(tmp_path, "always [madvise] never", "glibc.malloc.arena_max=4")
  assert last.startswith("glibc.malloc.arena_max=4:glibc.malloc.hugetlb=1|")


@pytest.mark.parametrize(
  ("enabled", "tunables"),
  [
    ("[always] madvise never", None),
    ("always madvise [never]", None),
    ("always [madvise] never", "glibc.malloc.hugetlb=0"),
  ],
)
def test_does_not_restart(tmp_path: Path, enabled: str, tunables: str | None):
  numbers, last = run(tmp_path, enabled, tunables)
  assert len(numbers) == 1
  assert last == f"{tunables}|['a=1 2', 'b']|1"


@pytest.mark.parametrize("name", ["sft", "dpo", "distill", "grpo", "rl"])
def test_every_trainers_program_asks_for_them(name: str, monkeypatch: pytest.MonkeyPatch):
  class Restarted(Exception):
    pass

  def restart() -> None:
    raise Restarted

  monkeypatch.setattr(cli, "restart_with_huge_pages", restart)
  monkeypatch.setattr(sys, "argv", [f"train_{name}.py", "--help"])
  with pytest.raises(Restarted):
    runpy.run_module(f"train_{name}", run_name="__main__")
