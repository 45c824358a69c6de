"""The parts of the documentation that come from the code: configuration keys, commands' help, rooms, refusals."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from maxtext_posttrain.commands import TOOLS, TRAINERS
from maxtext_posttrain.config import distillation, reinforcement
from maxtext_posttrain.config.checks import UNSUPPORTED
from maxtext_posttrain.config.layers import Resolved, resolve
from maxtext_posttrain.config.lookup import Folders
from maxtext_posttrain.config.schema import OUR_KEYS, Key, Schema
from maxtext_posttrain.config.trainers import title
from maxtext_posttrain.config.values import plain

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "src" / "maxtext_posttrain"

_STARTING_FILES: Mapping[str, str] = {
  "sft": "sft.yml",
  "dpo": "dpo.yml",
  "distill": "distillation.yml",
  "grpo": "grpo.yml",
}
_CONFIG_NAMES = frozenset({"config", "_config", "mt", "maxtext", "_maxtext", "its", "live", "settings"})
_LONGEST_VALUE = 60
_READ_WHOLE = ("distill_", "dpo.", "lora.", "student_overrides", "teacher_overrides")
"""Beginnings of keys that are all read; some by names that are put together."""


def configuration() -> str:
  """The tables of keys: ours, then those of MaxText's that this package reads itself, then those it refuses."""
  tables = _KeyTables()
  lines = ["## Our keys", ""]
  for trainer in (None, *_STARTING_FILES):
    names = [name for name, key in OUR_KEYS.items() if key.trainer == trainer]
    if names:
      lines += [
        f"### {'Every trainer' if trainer is None else _capitalised(title(trainer))}",
        "",
        *tables.table(names),
        "",
      ]
  read = keys_read(tables.schema)
  lines += [
    "## MaxText's keys that this package reads",
    "",
    f"Their meaning is MaxText's ({tables.schema.maxtext_version}), and so are the descriptions. Beside them MaxText"
    " reads keys of its own: [all the others](configuration_maxtext.md).",
    "",
    *tables.table(read),
    "",
    "## Refused",
    "",
    "These keys of MaxText's have no effect here, so setting one is an error that says what to do instead. A switch is"
    " refused where it is on.",
    "",
    "| key | trainer | answer |",
    "| --- | --- | --- |",
    *_refused(),
  ]
  return "\n".join(lines)


def other_keys() -> str:
  """The table of MaxText's keys that only MaxText reads: of the model, the devices, the checkpoints' storage."""
  tables = _KeyTables()
  shown = {*OUR_KEYS, *keys_read(tables.schema), *UNSUPPORTED, *reinforcement.ELSEWHERE, *distillation.UNSUPPORTED}
  names = [name for name, key in tables.schema.keys.items() if name not in shown and not key.derived]
  return "\n".join(tables.table(sorted(names)))


def keys_read(schema: Schema) -> list[str]:
  """MaxText's keys that the code of this package names, in alphabetical order; checks that only refuse are left out."""
  found: set[str] = set()
  for path in PACKAGE.rglob("*.py"):
    if path.parent.name != "config":
      found |= _names_in(ast.parse(path.read_text(encoding="utf-8")), schema)
  for path in (PACKAGE / "config").glob("*.py"):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
      if isinstance(node, ast.Call) and str(_last_name(node.func)).endswith("value") and node.args:
        found |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
  found |= {name for name in schema.keys if name.startswith(_READ_WHOLE)}
  refused = {*UNSUPPORTED, *reinforcement.ELSEWHERE, *distillation.UNSUPPORTED}
  keys = (schema.keys.get(name) for name in found - refused)
  return sorted(key.name for key in keys if key is not None and not key.ours and not key.derived)


def commands() -> str:
  """Each command's `--help`, as it is printed."""
  lines = []
  for name, command in (TRAINERS | TOOLS).items():
    lines += [f"## posttrain {name}", "", "```text", help_of(command.load()), "```", ""]
  return "\n".join(lines)


def help_of(run: Any) -> str:
  """What a command prints for `--help`."""
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
    run(["--help"])
  return printed.getvalue().rstrip()


def rooms() -> str:
  """The rooms of the package with what each is for and which others it imports."""
  imports = room_imports()
  lines = ["| room | what it is for | imports |", "| --- | --- | --- |"]
  for room, others in imports.items():
    names = [f"`{other}`" if at_start else f"`{other}`\\*" for other, at_start in others.items()]
    lines.append(f"| `{room}` | {_summary(room)} | {', '.join(names) or '–'} |")
  return "\n".join(lines)


def room_imports() -> dict[str, dict[str, bool]]:
  """By room, the rooms it imports, and whether as it is imported itself (True) or inside functions alone (False)."""
  found: dict[str, dict[str, bool]] = {}
  for path in sorted(PACKAGE.rglob("*.py")):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room != "__init__":
      others = found.setdefault(room, {})
      for other, at_start in _imports(ast.parse(path.read_text(encoding="utf-8"))):
        if other != room:
          others[other] = others.get(other, False) or at_start
  return {room: dict(sorted(found[room].items())) for room in sorted(found)}


def _imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
  typing_only = {
    id(node)
    for block in ast.walk(tree)
    if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
    for node in ast.walk(block)
  }
  at_start = {id(node) for node in tree.body}
  for node in ast.walk(tree):
    if not isinstance(node, ast.ImportFrom) or not node.module or id(node) in typing_only:
      continue
    package, _, below = node.module.partition(".")
    if package == PACKAGE.name:
      for name in [below.partition(".")[0]] if below else [alias.name for alias in node.names]:
        if not name.startswith("__"):
          yield name, id(node) in at_start


def _summary(room: str) -> str:
  path = PACKAGE / room / "__init__.py"
  path = path if path.is_file() else PACKAGE / f"{room}.py"
  docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
  return " ".join(docstring.split("\n\n")[0].split())


class _KeyTables:
  """Tables of keys with their defaults, and what the trainers' starting files make of them."""

  def __init__(self) -> None:
    self.schema = Schema.load()
    folders = Folders.find({})
    with tempfile.TemporaryDirectory() as folder:
      empty = Path(folder) / "empty.yml"
      empty.write_text("base_config: base.yml\n", encoding="utf-8")
      self._defaults = {
        trainer: resolve([str(empty)], trainer, self.schema, folders, {}) for trainer in (None, *_STARTING_FILES)
      }
    self._started = {
      trainer: resolve([str(REPOSITORY / "configs" / name)], trainer, self.schema, folders, {})
      for trainer, name in _STARTING_FILES.items()
    }

  def table(self, names: Sequence[str]) -> list[str]:
    """One row a key."""
    return ["| key | type | default | meaning |", "| --- | --- | --- | --- |", *map(self._row, names)]

  def _row(self, name: str) -> str:
    key = self.schema.keys[name]
    own = OUR_KEYS.get(name)
    kind = own.type if own is not None else type_of(key.spec)
    default = _shown(self._defaults[key.trainer], name) + "".join(self._differences(key))
    meaning = " ".join(key.description.split())
    # Ours are Markdown; MaxText's may hold whatever a description may.
    shown = meaning if own is not None else escaped(meaning)
    if own is None and key.trainer is not None:
      shown = f"*{title(key.trainer)} alone.* {shown}"
    return f'| <code id="{name}">{re.sub("([_.])", r"\1<wbr>", name)}</code> | {code(kind)} | {default} | {shown} |'

  def _differences(self, key: Key) -> Iterator[str]:
    for trainer, started in self._started.items():
      if key.belongs_to(trainer) and key.name in started.settings:
        before, after = _shown(self._defaults[trainer], key.name), _shown(started, key.name)
        if before != after:
          yield f"<br>{after} in {_STARTING_FILES[trainer]}"


def type_of(spec: Mapping[str, Any]) -> str:
  """A key's JSON schema in a few words."""
  if "enum" in spec:
    return " | ".join(f'"{value}"' if isinstance(value, str) else plain(value) for value in spec["enum"])
  if "anyOf" in spec:
    return " | ".join(dict.fromkeys(type_of(each) for each in spec["anyOf"]))
  names = {"boolean": "bool", "integer": "int", "number": "float", "string": "str", "array": "list", "object": "dict"}
  kind = spec.get("type")
  if isinstance(kind, list):
    return " | ".join(names.get(each, each) for each in kind)
  return names.get(str(kind), str(kind) if kind else "any")


def _shown(resolved: Resolved, name: str) -> str:
  setting = resolved.settings.get(name)
  if setting is None:
    return "–"
  text = plain(setting.value)
  if len(text) > _LONGEST_VALUE:
    return "a long value: see `--print-config`"
  return code(text) if text else '`""`'


def code(text: str) -> str:
  """Text as code in a table's cell."""
  for mark, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;")):
    text = text.replace(mark, entity)
  return f"<code>{text}</code>"


def escaped(text: str) -> str:
  """Text without what Markdown, or a table, would take for its own."""
  text = re.sub(r"([\\`*_{}\[\]>|#])", r"\\\1", text).replace("<", "&lt;")
  return re.sub(r"https?://[^\s)\]]+", lambda found: f"<{found[0]}>".replace("\\", ""), text)


def _refused() -> Iterator[str]:
  tables: Sequence[tuple[str, Mapping[str, str]]] = (
    ("all", UNSUPPORTED),
    (title(reinforcement.TRAINER), reinforcement.ELSEWHERE),
    (title(distillation.TRAINER), distillation.UNSUPPORTED),
  )
  for trainer, answers in tables:
    for name, answer in answers.items():
      yield f"| `{name}` | {trainer} | {escaped(answer)} |"


def _names_in(tree: ast.Module, schema: Schema) -> set[str]:
  """Keys read as `config.key`, `config.group.key`, `config.get("key")`, `getattr(config, "key")` or `config["key"]`."""
  found: set[str] = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute):
      base = _last_name(node.value)
      if base in _CONFIG_NAMES:
        found.add(node.attr)
      elif base in schema.groups:
        found.add(f"{base}.{node.attr}")
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "_" in node.value:
      found.add(node.value)
    elif isinstance(node, ast.JoinedStr) and any(_is_long_name(part) for part in node.values):
      pattern = "".join(re.escape(part.value) if isinstance(part, ast.Constant) else r"\w+" for part in node.values)
      found |= {name for name in schema.keys if re.fullmatch(pattern, name)}
  return found & {*schema.keys}


def _is_long_name(part: ast.expr) -> bool:
  return isinstance(part, ast.Constant) and re.fullmatch(r"\w{6,}", str(part.value)) is not None


def _capitalised(text: str) -> str:
  return text[0].upper() + text[1:]


def _last_name(node: ast.expr) -> str | None:
  return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
