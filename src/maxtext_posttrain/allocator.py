"""How the process that trains gets its memory from glibc's allocator."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TUNABLES = "GLIBC_TUNABLES"
_FIRST_GLIBC = (2, 35)


def restart_with_tunables() -> None:
  """Starts this program anew with glibc's tunables set, where that makes a difference; else returns.

  - XLA takes gigabytes from the allocator for each update on the CPU and gives them back, and the kernel clears and
    maps them anew in pages of 4 KiB: a tenth of an update of a small model. `glibc.malloc.hugetlb=1` asks for large
    pages, where the kernel gives them to those who ask.
  - Each of the many threads of compilers and readers would get a heap of its own, which keeps what it was once given: a
    tenth of the memory of a small run. `glibc.malloc.arena_max` makes them as many as there are cores.

  The allocator reads its tunables as the process starts, so call this first thing in a program, before it reads its
  input or imports anything heavy. The process keeps its number, and what the user set is left alone.
  """
  given = os.environ.get(_TUNABLES, "")
  program = getattr(sys.modules["__main__"], "__file__", None)
  if not _allocator_can() or sys.executable in (None, "") or program is None:
    return
  added = [f"{name}={value}" for name, value in _wanted().items() if name not in given]
  if not added:
    return
  environment = {**os.environ, _TUNABLES: ":".join(filter(None, (given, *added)))}
  os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _wanted() -> dict[str, str]:
  wanted = {"glibc.malloc.arena_max": str(max(2, os.cpu_count() or 1))}
  if _gives_huge_pages():
    wanted["glibc.malloc.hugetlb"] = "1"
  return wanted


def _gives_huge_pages() -> bool:
  """Whether the kernel gives huge pages where a program asks, and not otherwise."""
  try:
    return "[madvise]" in _HUGE_PAGES.read_text(encoding="ascii")
  except OSError:
    return False


def _allocator_can() -> bool:
  try:
    name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
  except (ValueError, OSError):
    return False
  return name == "glibc" and tuple(map(int, version.split(".")[:2])) >= _FIRST_GLIBC
