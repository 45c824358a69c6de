"""What the documents name is there: pages and anchors, keys, files, functions, messages."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
import yaml

from maxtext_posttrain.commands import TOOLS, TRAINERS
from maxtext_posttrain.config.schema import Schema
from tests.conftest import REPOSITORY
from tests.support.documents import PAGES, blocks, code_spans, links, name_of, prose, table_rows

DOCS = REPOSITORY / "docs"
PACKAGE = REPOSITORY / "src" / "maxtext_posttrain"
COLUMNS = 99
"""Characters of code in the site's column on a screen 1280 pixels wide."""
IDS = [name_of(page) for page in PAGES]

NOT_KEYS = frozenset(
  {
    "cosine", "wsd", "dtype", "none", "mean", "token-mean", "sequence-mean-token-mean", "sequence-mean",
    "seq-mean-token-sum", "sequence-mean-token-scale", "metrics.jsonl", "samples.jsonl", "base_config",
  }
)  # fmt: skip
"""What stands in a column of keys and is a value, or a file, or `base_config`."""

FILES_OF_RUNS = frozenset(
  {
    "config.yml",
    "model.yml",
    "run.json",
    "config.json",
    "focal.yml",
    "tokenizer.json",
    "teacher_logits.json",
    "data.json",
  }
)
_READERS = re.compile(r"my_\w+\.(py|yml)|my\.yml|file\.py")


@functools.cache
def keys() -> frozenset[str]:
  schema = Schema.load()
  return frozenset(schema.keys) | schema.groups


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path):
  for link in links(prose(page)):
    target, _, anchor = link.partition("#")
    if "://" in target:
      continue
    file = page.parent / target if target else page
    assert file.is_file(), f"{link}: no such file"
    text = file.read_text(encoding="utf-8") if file.suffix == ".md" else ""
    if anchor and "<!-- generated" not in text:
      heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
      assert anchor in {re.sub(r"[^\w\s-]", "", head).strip().lower().replace(" ", "-") for head in heads}, link


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_keys_in_tables_exist(page: Path):
  for row in table_rows(prose(page)):
    for column in ("key", "here", "our key"):
      for span in code_spans(row.get(column, "")):
        for name in _keys_of(span):
          inner = re.sub(r"^(teacher|student)_overrides\.", "", name)
          assert {name, inner} & (keys() | NOT_KEYS), f"{span} in {row}"


def _keys_of(span: str) -> list[str]:
  """The keys in a code span of a table, as `a.b`, `a=1` or `a_{b,c}`; none where it is a command, a path or a value."""
  if re.match(r"(posttrain|python) |[-<\[\"]|.*[/ ]", span.partition("=")[0]):
    return []
  name = span.partition("=")[0]
  names = [name]
  while any("{" in each for each in names):
    names = [
      re.sub(r"\{[^{}]*\}", part, each, count=1)
      for each in names
      for part in re.search(r"\{([^{}]*)\}", each)[1].split(",")  # type: ignore[index]
    ]
  return [each for each in names if re.fullmatch(r"[a-z][\w.-]*", each)]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_keys_that_are_set_exist(page: Path):
  for span in code_spans(prose(page)):
    for name in re.findall(r"(?:^| )([a-z][\w.]*_[\w.]*)=", span):
      assert name in keys() or _is_argument(name), span


def _is_argument(name: str) -> bool:
  """Whether it is an argument of a function elsewhere, which documents of other libraries name."""
  return name in {"lr_schedule", "packing_strategy", "loss_type", "importance_sampling_level", "report_to"}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_exist(page: Path):
  for span in code_spans(prose(page)):
    if re.fullmatch(r"[\w/.-]+\.(py|yml|json|sh|txt|in|md)", span) and "…" not in span and "*" not in span:
      known = _READERS.fullmatch(Path(span).name) or Path(span).name in FILES_OF_RUNS or span.startswith("models/m")
      assert known or _in_repository(span) or _in_maxtext(span), f"{span}: no such file"


def _in_repository(path: str) -> bool:
  roots = (REPOSITORY, PACKAGE, REPOSITORY / "src", REPOSITORY / "tests" / "integration", DOCS, REPOSITORY / "configs")
  return any((root / path).is_file() for root in roots) or any(PACKAGE.rglob(path) if "/" not in path else ())


def _in_maxtext(path: str) -> bool:
  return path in {"base.yml", "sft.yml", "rl.yml"}


def test_walks_name_what_is_in_their_files():
  checked = 0
  for row in table_rows((DOCS / "architecture.md").read_text(encoding="utf-8")):
    file: Path | None = None
    for span in code_spans(row.get("where", "")):
      if span.endswith(".py"):
        found = [PACKAGE / span] if (PACKAGE / span).is_file() else [file.parent / span] if file else []
        assert found, span
        assert found[0].is_file(), span
        file = found[0]
      elif file is not None:
        for name in span.split("."):
          assert re.search(rf"^\s*(def|class|async def) {name}\b", file.read_text(encoding="utf-8"), re.MULTILINE), span
          checked += 1
  assert checked > 20


def test_the_architecture_names_what_is_defined():
  text = (DOCS / "architecture.md").read_text(encoding="utf-8")
  assert re.findall(r"^## (.*)$", text, re.MULTILINE)[-2:] == ["The walk of one batch", "The walk of one weight"]
  sources = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
  checked = 0
  for span in code_spans(text):
    owner, _, name = span.rpartition(".")
    if not re.fullmatch(r"([a-z]\w*\.)*([A-Z]\w*\.)?_?[a-zA-Z]\w*", span) or not (owner or re.match("_|[A-Z]", name)):
      continue
    if name in {"py", "svg", "yml", "json"} or name.isupper():
      continue
    if re.match("[A-Z]", owner):
      candidates = [source for source in sources.values() if re.search(rf"^class {owner}\b", source, re.MULTILINE)]
    elif owner:
      module = PACKAGE / owner.replace(".", "/")
      candidates = [sources[path] for path in (module.with_suffix(".py"), module / "__init__.py") if path in sources]
      if not candidates:
        continue  # Of another library, or a tensor's name.
    else:
      candidates = list(sources.values())
    defined = re.compile(rf"^\s*(def|class) {name}\b|^{name} = |import .*\b{name}\b", re.MULTILINE)
    assert any(defined.search(source) for source in candidates), span
    checked += 1
  assert checked > 25


@pytest.mark.parametrize("page", ["architecture.md", "adding_an_engine.md", "adding_a_model_family.md"])
def test_functions_of_the_door_exist(page: str):
  door = (PACKAGE / "maxtext_api.py").read_text(encoding="utf-8")
  for name in re.findall(r"`maxtext_api\.(\w+)`", (DOCS / page).read_text(encoding="utf-8")):
    assert name == "py" or re.search(rf"\b{name}\b", door), name


@functools.cache
def texts() -> str:
  """Every text in the source, those of f-strings with … for what is filled in."""
  found: list[str] = []
  for path in PACKAGE.rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
      if isinstance(node, ast.JoinedStr):
        found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values))
      elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        found.append(node.value)
  return "\n".join(found)


def test_messages_are_the_codes_own():
  messages = [
    span
    for row in table_rows((DOCS / "troubleshooting.md").read_text(encoding="utf-8"))
    if "message" in row
    for span in code_spans(row["message"])
  ]
  assert len(messages) > 40
  missing = [m for m in messages if not re.search(".{0,40}?".join(map(re.escape, re.split(r"\s*…\s*", m))), texts())]
  assert not missing, missing


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_code_fits_a_page(page: Path):
  """What is wider is cut at the right edge of the site's column until scrolled to; the formatter lays Python."""
  for language in ("sh", "text", "yaml", ""):
    for block in blocks(page, language):
      wide = [line for line in block.splitlines() if len(line) > COLUMNS]
      assert not wide, wide


def test_every_trainer_and_tool_is_written_about():
  text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
  for name in (*TRAINERS, *TOOLS):
    assert f"posttrain {name}" in text, name


def test_every_page_is_in_the_navigation():
  class Loader(yaml.SafeLoader):
    pass

  Loader.add_multi_constructor("tag:yaml.org,2002:python", lambda *_: None)
  nav = yaml.load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]
  named = set(re.findall(r"'([\w/]+\.md)'", str(nav)))
  assert {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} <= named
