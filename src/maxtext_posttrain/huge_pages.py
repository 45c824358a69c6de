"""Large pages for the process that trains, where the system gives them to those who ask."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TUNABLE = "glibc.malloc.hugetlb"
_FIRST_GLIBC = (2, 35)


def restart_with_huge_pages() -> None:
  """Starts this program anew with `GLIBC_TUNABLES=glibc.malloc.hugetlb=1`, where that makes a difference; else returns.

  XLA takes gigabytes from the allocator for each update on the CPU and gives them back, and the kernel clears and maps
  them anew in pages of 4 KiB: a tenth of an update of a small model. The allocator reads its tunables as the process
  starts, so call this first thing in a program, before it reads its input or imports anything heavy. The process keeps
  its number, and what the user set is left alone.
  """
  if not (_is_asked_for() and _allocator_can()) or sys.executable in (None, ""):
    return
  tunables = os.environ.get("GLIBC_TUNABLES", "")
  program = getattr(sys.modules["__main__"], "__file__", None)
  if _TUNABLE in tunables or program is None:
    return
  environment = {**os.environ, "GLIBC_TUNABLES": ":".join(filter(None, (tunables, f"{_TUNABLE}=1")))}
  os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _is_asked_for() -> bool:
  """Whether the kernel gives huge pages where a program asks, and not otherwise."""
  try:
    return "[madvise]" in _ENABLED.read_text(encoding="ascii")
  except OSError:
    return False


def _allocator_can() -> bool:
  try:
    name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
  except (ValueError, OSError):
    return False
  return name == "glibc" and tuple(map(int, version.split(".")[:2])) >= _FIRST_GLIBC
