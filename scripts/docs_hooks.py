"""What MkDocs calls while it builds the site: pages that are files of the repository, and parts that the code tells."""

from __future__ import annotations

import re
from typing import Any

import docs_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_FROM_ROOT = {
  "index.md": "README.md",
  "changelog.md": "CHANGELOG.md",
  "contributing.md": "CONTRIBUTING.md",
  "security.md": "SECURITY.md",
}
_PARTS = {
  "keys": docs_pages.configuration,
  "other-keys": docs_pages.other_keys,
  "commands": docs_pages.commands,
  "rooms": docs_pages.rooms,
}
_FLOW = "![How a run flows](images/flow.svg)"
_CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.DOTALL)
_TEXT = re.compile(r"(?<=>)[^<>]+")
_NO_PAGE = re.compile(r"\[[^\]]*\]\((LICENSE|notebooks/[^)]*)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
  """Adds the pages that lie in the repository's root."""
  for page, source in _FROM_ROOT.items():
    text = (docs_pages.REPOSITORY / source).read_text(encoding="utf-8")
    files.append(File.generated(config, page, content=for_site(text)))
  return files


def on_page_markdown(markdown: str, **_: Any) -> str:
  """Replaces `<!-- generated: NAME -->` by what the code says."""
  return re.sub(r"<!-- generated: ([a-z-]+) -->", lambda found: _PARTS[found[1]](), markdown)


def on_page_content(html: str, **_: Any) -> str:
  """Lets names in a table's cell break between their words, not within one."""
  return _CELL.sub(lambda cell: _TEXT.sub(_breakable, cell[0]), html)


def _breakable(text: re.Match[str]) -> str:
  return re.sub(r"([_./=])(?=[\w{\[&])", r"\1<wbr>", text[0])


def for_site(text: str) -> str:
  """A file of the repository's root as a page: links lead to pages, and the drawing is one that needs no script.

  A file that has no page is named by its path.
  """
  text = re.sub(r"```mermaid\n.*?```", _FLOW, text, flags=re.DOTALL)
  text = re.sub(r"\[docs/(\w+)\.md\]", lambda found: f"[{found[1].replace('_', ' ')}]", text)
  text = text.replace("](docs/", "](")
  for page, source in _FROM_ROOT.items():
    text = text.replace(f"]({source})", f"]({page})")
  return _NO_PAGE.sub(r"`\1`", text)
