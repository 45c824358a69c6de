"""The repository's documents as tests read them: their blocks, tables, links and code spans."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.conftest import REPOSITORY

ROOT_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = [REPOSITORY / name for name in ROOT_PAGES] + sorted((REPOSITORY / "docs").rglob("*.md"))

_FENCE = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
  """A page as messages call it."""
  return page.relative_to(REPOSITORY).as_posix()


def blocks(page: Path, language: str) -> list[str]:
  """The fenced blocks of one language."""
  return [body for found, body in _FENCE.findall(page.read_text(encoding="utf-8")) if found == language]


def prose(page: Path) -> str:
  """A page without its fenced blocks."""
  return _FENCE.sub("", page.read_text(encoding="utf-8"))


def stand_in(placeholder: str) -> str:
  """One word for a placeholder: `KEYS` for several keys, else `x`."""
  return "KEYS" if placeholder.endswith(" keys") else "x"


def shell_commands(page: Path, fill: Callable[[str], str] = stand_in) -> Iterator[list[str]]:
  """The words of each command in a page's `sh` blocks.

  Args:
    page: the document.
    fill: says what stands for a placeholder, given without its `<` and `>`; it may be several words.
  """
  for block in blocks(page, "sh"):
    text = re.sub(r"<([^<>]+)>", lambda found: fill(found[1]), block.replace("\\\n", " "))
    for line in text.splitlines():
      words = shlex.split(line, comments=True)
      if words:
        yield words


def code_spans(text: str) -> list[str]:
  """What stands between backticks."""
  return re.findall(r"`([^`\n]+)`", text)


def table_rows(text: str) -> Iterator[dict[str, str]]:
  """Each row of each table, its cells by the heads of their columns."""
  heads: list[str] = []
  for line in text.splitlines():
    if not line.startswith("|"):
      heads = []
      continue
    cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
    if not heads:
      heads = cells
    elif set(line) - set("|-: "):
      yield dict(zip(heads, cells, strict=False))


def links(text: str) -> list[str]:
  """The targets of links and pictures."""
  return re.findall(r"\]\(([^)\s]+)\)", text)
