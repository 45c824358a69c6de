"""A program starts itself anew with the allocator's tunable, once, as it was called, and not against the user."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from maxtext_posttrain import allocator, cli

PROGRAM = """
import os, sys
from pathlib import Path
from maxtext_posttrain import allocator
allocator._HUGE_PAGES = Path(sys.argv[1])
print(os.getpid(), flush=True)
allocator.restart_with_tunables()
print(os.environ.get("GLIBC_TUNABLES"), sys.argv[2:], sys.flags.utf8_mode, sep="|")
"""
supported = pytest.mark.skipif(not allocator._allocator_can(), reason="needs glibc 2.35")


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


ARENAS = f"glibc.malloc.arena_max={max(2, os.cpu_count() or 1)}"


@supported
def test_restarts_once_with_the_same_arguments(tmp_path: Path):
  numbers, last = run(tmp_path, "always [madvise] never", None)
  assert len(numbers) == 2
  assert numbers[0] == numbers[1]
  assert last == f"{ARENAS}:glibc.malloc.hugetlb=1|['a=1 2', 'b']|1"


@supported
def test_what_the_user_set_stays(tmp_path: Path):
  _, last = run(tmp_path, "always [madvise] never", "glibc.malloc.arena_max=4")
  assert last.startswith("glibc.malloc.arena_max=4:glibc.malloc.hugetlb=1|")


@supported
@pytest.mark.parametrize("enabled", ["[always] madvise never", "always madvise [never]"])
def test_huge_pages_are_asked_for_where_asking_makes_a_difference(tmp_path: Path, enabled: str):
  _, last = run(tmp_path, enabled, None)
  assert last.startswith(f"{ARENAS}|")


def test_does_not_restart_where_all_is_set(tmp_path: Path):
  set_by_user = "glibc.malloc.hugetlb=0:glibc.malloc.arena_max=1"
  numbers, last = run(tmp_path, "always [madvise] never", set_by_user)
  assert len(numbers) == 1
  assert last == f"{set_by_user}|['a=1 2', 'b']|1"


@pytest.mark.parametrize("name", ["sft", "dpo", "distill", "grpo", "rl"])
def test_every_trainers_program_sets_them(name: str, monkeypatch: pytest.MonkeyPatch):
  class Restarted(Exception):
    pass

  def restart() -> None:
    raise Restarted

  monkeypatch.setattr(cli, "restart_with_tunables", restart)
  monkeypatch.setattr(sys, "argv", [f"train_{name}.py", "--help"])
  with pytest.raises(Restarted):
    runpy.run_module(f"train_{name}", run_name="__main__")
