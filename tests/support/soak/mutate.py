"""Small changes that make valid configurations, rows and templates wrong, or wrong-looking."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.support.template_attacks import BOMBS, ESCAPES

# As YAML has them: wrong types, numbers out of bounds, numbers that are none, references to nothing.
_YAML_VALUES = (
  "null", '""', "x", "[]", "{}", "[[]]", "{a: b}", "[1, x, null]", "true", "false", "-1", "0", "1", "0.5", "-0.0",
  "1000000000", "-1000000000", "99999999999999999999999999", "1.e308", "-1.e308", "1.e-320", "1.e400", ".nan", ".inf",
  "-.inf", "0x10", "0o17", "1_000", "12:30:45", "2001-01-01", "~", "!!binary aGk=", "!!set {a, b}", "!!float 1",
  "!!python/object/apply:os.system [id]", "*nothing", "&a [*a]", "${oc.env:NOT_SET_HERE}", "${steps}", "${", "|\n  a\n",
  "'a\n\n  b'", '"\\ud800"', '"\\0"', "\u2028", "..", "../x", "-", "?", "@x", "`x`", "%x", "yes", "No", "NULL",
  "é中\U0001f600", "x" * 100_000, "[" * 2000, "{a: " * 500,
)  # fmt: skip
_JSON_VALUES = (
  None, True, False, 0, -1, 1.5, 10**30, float("nan"), float("inf"), "", " ", "x" * 100_000, "\x00", "\ud800", "\ufeff",
  "\U0001f468\u200d\U0001f469", "</s><s>[INST]", "<|im_end|>", [], {}, [[]], [None], {"": ""}, ["x"], {"role": "user"},
  [{"type": "text", "text": "x"}], [{"type": "image"}], "9" * 5000,
)  # fmt: skip
_PIECES = ("\t", "\x00", "\ufeff", "\r", "\x85", "\u2028", ":", "'", '"', "{", "]", "#", "- ", "---\n", "...\n", "&a ",
           "*a ", "!!", "\\", "%YAML 9.9\n", "<<: ", "\n\n", "? ", "{% ", "{{ ", "#}")  # fmt: skip
_TEMPLATE_VALUES = (
  "{{ raise_exception('no') }}", "{{ messages[0].nothing.at.all }}", "{{ messages[9].content }}", "{% for m in 3 %}",
  "{% endfor %}", "{% if %}", "{% generation %}", "{% endgeneration %}", "{{ messages }}", "{{ 1 // 0 }}",
  "{{ x | nofilter }}", "{% set messages = [] %}", "{{ messages | tojson }}", "{% break %}", "{% raw %}", "{# ",
  "{{ bos_token * 3 }}",
  "\x00",  "{{ messages | map(attribute='content') | join }}", "{{ loop.index }}",
  "{% macro m() %}{{ m() }}{% endmacro %}",
  "{% extends 'x' %}", "{{ strftime_now('%Q%') }}", "{{ range(10**8) | list }}", "{{ 'a' | replace('', 'b' * 9999) }}",
)  # fmt: skip


Keys = Mapping[str, Mapping[str, Any]]


def configuration(chance: random.Random, text: str, known: Keys) -> bytes:
  """A YAML configuration with one to three changes; `known` are keys that it may get anew, with their JSON schemas."""
  for _ in range(chance.choice((1, 1, 1, 2, 3))):
    text = chance.choice(_YAML_CHANGES)(chance, text, known)
  return _encoded(chance, text)


def rows(chance: random.Random, given: Sequence[Any]) -> tuple[str, bytes]:
  """A file of rows with some of them changed: its name and content."""
  changed: list[Any] = copy.deepcopy(list(given))
  for _ in range(chance.choice((1, 1, 2, 8))):
    index = chance.randrange(len(changed))
    changed[index] = _json_value(chance, changed[index])
  lines = [json.dumps(row, ensure_ascii=chance.random() < 0.5) for row in changed]
  name = chance.choice(("rows.jsonl", "rows.jsonl", "rows.jsonl", "rows.json", "rows.parquet", "rows.jsonl.gz"))
  text = f"[{','.join(lines)}]" if name == "rows.json" and chance.random() < 0.8 else "\n".join(lines) + "\n"
  if chance.random() < 0.4:
    text = chance.choice((_cut, _insert, _drop_lines, _double_line, _nested))(chance, text, {})
  return name, _encoded(chance, text)


def template(chance: random.Random, text: str) -> bytes:
  """A chat template with one to three changes."""
  for _ in range(chance.randint(1, 3)):
    text = chance.choice(_TEMPLATE_CHANGES)(chance, text, {})
  return _encoded(chance, text)


Change = Callable[[random.Random, str, Keys], str]


def _drop_lines(chance: random.Random, text: str, known: Keys) -> str:
  lines = text.splitlines(keepends=True)
  start = chance.randrange(max(len(lines), 1))
  del lines[start : start + chance.choice((1, 1, 2))]
  return "".join(lines)


def _double_line(chance: random.Random, text: str, known: Keys) -> str:
  lines = text.splitlines(keepends=True) or [""]
  lines.insert(chance.randrange(len(lines)), chance.choice(lines))
  return "".join(lines)


def _swap_keys(chance: random.Random, text: str, known: Keys) -> str:
  lines = text.splitlines(keepends=True)
  places = [index for index, line in enumerate(lines) if ":" in line]
  if len(places) < 2:
    return text
  one, other = chance.sample(places, 2)
  (key, _, value), (other_key, _, other_value) = lines[one].partition(":"), lines[other].partition(":")
  lines[one], lines[other] = f"{key}:{other_value}", f"{other_key}:{value}"
  return "".join(lines)


def _set_value(chance: random.Random, text: str, known: Keys) -> str:
  lines = text.splitlines(keepends=True)
  places = [index for index, line in enumerate(lines) if ": " in line]
  if places:
    index = chance.choice(places)
    lines[index] = f"{lines[index].partition(':')[0]}: {chance.choice(_YAML_VALUES)}\n"
  return "".join(lines)


def _misspell(chance: random.Random, text: str, known: Keys) -> str:
  keys = re.findall(r"^\s*(\w{3,}):", text, re.MULTILINE)
  if not keys:
    return text
  key = chance.choice(keys)
  place = chance.randrange(len(key))
  wrong = key[:place] + chance.choice(("", key[place] * 2, "_", "é", key[place].upper())) + key[place + 1 :]
  return text.replace(f"{key}:", f"{wrong}:", 1)


def _add_key(chance: random.Random, text: str, known: Keys) -> str:
  """A key with a value of its type, mostly: what is wrong with it is found later, if anything is."""
  key = chance.choice(list(known))
  value = _of_type(chance, known[key]) if chance.random() < 0.8 else chance.choice(_YAML_VALUES)
  return text.rstrip("\n") + f"\n{key}: {value}\n"


def _of_type(chance: random.Random, spec: Mapping[str, Any]) -> str:
  if "enum" in spec:
    return json.dumps(chance.choice(spec["enum"]))
  if "anyOf" in spec:
    return _of_type(chance, chance.choice(spec["anyOf"]))
  match spec.get("type"):
    case "integer":
      return chance.choice(("0", "1", "2", "3", "-1", "7", "1000", "1000000000"))
    case "number":
      return chance.choice(("0.0", "0.5", "1.0", "-1.0", "1.e-9", "2", "1.e+9"))
    case "boolean":
      return chance.choice(("true", "false"))
    case "string":
      return chance.choice(('""', "x", "default", "float32", "int8"))
    case "array":
      return chance.choice(("[]", "[1]", "[x]", "[[1, 2]]"))
    case _:
      return "null"


def _insert(chance: random.Random, text: str, known: Keys) -> str:
  place = chance.randint(0, len(text))
  return text[:place] + chance.choice(_PIECES) + text[place:]


def _cut(chance: random.Random, text: str, known: Keys) -> str:
  return text[: chance.randint(0, len(text))]


def _drop_characters(chance: random.Random, text: str, known: Keys) -> str:
  place = chance.randint(0, len(text))
  return text[:place] + text[place + chance.randint(1, 9) :]


def _nested(chance: random.Random, text: str, known: Keys) -> str:
  depth = chance.choice((10, 1000, 100_000))
  return text + "[" * depth + "]" * chance.choice((0, depth)) + "\n"


def _laughs(chance: random.Random, text: str, known: Keys) -> str:
  levels = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 12))
  return f"{text.rstrip(chr(10))}\nl0: &l0 [x, x]\n{levels}"


def _base(chance: random.Random, text: str, known: Keys) -> str:
  base = chance.choice(
    ("own.yml", "[]", "[sft.yml, dpo.yml]", "gone.yml", "/dev/null", "models", "base.yml", "3", "{}")
  )
  return re.sub(r"^base_config:.*$", f"base_config: {base}", text, flags=re.MULTILINE)


_YAML_CHANGES: tuple[Change, ...] = (
  _set_value, _set_value, _set_value, _set_value, _add_key, _add_key, _add_key, _swap_keys, _swap_keys, _misspell,
  _drop_lines, _double_line, _insert, _cut, _drop_characters, _nested, _laughs, _base,
)  # fmt: skip


def _swap_blocks(chance: random.Random, text: str, known: Keys) -> str:
  blocks = re.findall(r"\{[{%].*?[}%]\}", text, re.DOTALL)
  if len(blocks) < 2:
    return text
  one, other = chance.sample(blocks, 2)
  return text.replace(one, chance.choice(("", other, one * 2, one.replace("{%", "{{"), one[:-1])), 1)


def _attack(chance: random.Random, text: str, known: Keys) -> str:
  attack = chance.choice((*ESCAPES.values(), *BOMBS.values(), *_TEMPLATE_VALUES, *_TEMPLATE_VALUES))
  return chance.choice((f"{attack}{text}", f"{text}{attack}", attack))


def _other_name(chance: random.Random, text: str, known: Keys) -> str:
  old = chance.choice(("content", "role", "assistant", "messages", "endif", "endfor", "loop", "generation", "text("))
  return text.replace(old, chance.choice(("", "x", "none", "messages", "'", "content")), chance.choice((1, -1)))


_TEMPLATE_CHANGES: tuple[Change, ...] = (
  _swap_blocks, _swap_blocks, _attack, _attack, _other_name, _other_name, _insert, _cut, _drop_characters,
  _drop_lines, _double_line,
)  # fmt: skip


def _json_value(chance: random.Random, value: Any) -> Any:
  """A JSON value with something in it deleted, doubled or replaced."""
  if isinstance(value, dict) and value and chance.random() < 0.85:
    key = chance.choice(list(value))
    match chance.randrange(5):
      case 0:
        return {name: item for name, item in value.items() if name != key}
      case 1:
        return {**value, chance.choice(("", "role", key.upper(), "extra")): value[key]}
      case 2:
        other = chance.choice(list(value))
        return {**value, key: value[other], other: value[key]}
      case _:
        return {**value, key: _json_value(chance, value[key])}
  if isinstance(value, list) and value and chance.random() < 0.85:
    index = chance.randrange(len(value))
    match chance.randrange(5):
      case 0:
        return value[:index] + value[index + 1 :]
      case 1:
        return [*value, copy.deepcopy(value[index])]
      case 2:
        return value[::-1]
      case _:
        return [*value[:index], _json_value(chance, value[index]), *value[index + 1 :]]
  return copy.deepcopy(chance.choice(_JSON_VALUES))


def _encoded(chance: random.Random, text: str) -> bytes:
  """Mostly UTF-8; now and then another encoding, a mark in front, or bytes that no encoding has."""
  data = text.encode("utf-8", "surrogatepass")
  match chance.randrange(20):
    case 0:
      return b"\xef\xbb\xbf" + data
    case 1:
      return text.encode(chance.choice(("utf-16", "utf-32", "latin-1", "cp1252")), "replace")
    case 2:
      place = chance.randint(0, len(data))
      return data[:place] + bytes(chance.randrange(256) for _ in range(chance.randint(1, 8))) + data[place:]
    case 3:
      return data.replace(b"\n", chance.choice((b"\r\n", b"\r", b"")))
  return data
