"""Checks one value against its key's type, and reads values from the text of a command line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from maxtext_posttrain.config.yaml_reader import parse_value

_TRUE = frozenset({"true", "yes", "on", "y", "t", "1"})
_FALSE = frozenset({"false", "no", "off", "n", "f", "0"})
_NONE_WORDS = frozenset({"none", "null", "~"})
_MOST_SHOWN = 60
_MOST_CHOICES = 12


class ValueMismatchError(Exception):
  """A value is not of its key's type; the text says what was expected and what was given."""


def coerce(spec: Mapping[str, Any], value: Any) -> Any:
  """The value as the key's type has it, with the conversions MaxText itself makes.

  Whole floats become ints, ints floats, `"12"` a number, `"yes"` a bool, a lone string a list of one, and the word
  None means null, as in MaxText's YAML files.

  Args:
    spec: the key's JSON schema.
    value: what a YAML file or a command line gave.

  Raises:
    ValueMismatchError: the value is of another type, not among the choices, or out of range.
  """
  choices = spec.get("anyOf")
  if choices is None:
    return _coerce_one(spec, value)
  if _is_none_word(value) and any(choice.get("type") == "null" for choice in choices):
    return None
  exact = [choice for choice in choices if _is_exactly(choice.get("type"), value)]
  for choice in [*exact, *choices]:
    try:
      return _coerce_one(choice, value)
    except ValueMismatchError as error:
      if choice in exact and ("enum" in choice or "items" in choice):
        raise error from None
  raise _mismatch(spec, value)


def from_text(spec: Mapping[str, Any], text: str) -> Any:
  """The value that `key=text` on a command line, or a variable of the environment, gives the key.

  A key that holds text takes it as it is (`run_name=007` stays text); outer quotes are taken off. Everything else is
  read as YAML.

  Raises:
    ValueMismatchError: as in `coerce`.
  """
  stripped = text.strip()
  types = _types(spec)
  holds_text = types <= {"string", "null"}
  if types <= {"string", "null", "array"} and not stripped.startswith(("[", "(")):
    holds_text = "string" in types or not _items_hold_numbers(spec)
  if not holds_text:
    return coerce(spec, _parse(spec, stripped) if stripped else "")
  if stripped.lower() in _NONE_WORDS:
    return coerce(spec, None if "null" in types else "")
  return coerce(spec, _unquote(stripped))


def show(value: Any) -> str:
  """A value for a message: what it is and what it says, cut short."""
  if value is None:
    return "null"
  if isinstance(value, bool):
    return f"the boolean {str(value).lower()}"
  if isinstance(value, int | float):
    return f"the number {value}"
  if isinstance(value, str):
    return f"the text {_cut(json.dumps(value, ensure_ascii=False))}" if value else "nothing"
  if isinstance(value, Mapping):
    return f"the mapping {_cut(plain(value))}"
  if isinstance(value, list | tuple):
    return f"the list {_cut(plain(value))}"
  return f"{type(value).__name__} {_cut(str(value))}"


def plain(value: Any) -> str:
  """A value as `--print-config` shows it: YAML that reads back as the same value, on one line."""
  if isinstance(value, str):
    return value if _reads_as_itself(value) else json.dumps(value, ensure_ascii=False)
  if isinstance(value, float) and not math.isfinite(value):
    return {"inf": ".inf", "-inf": "-.inf"}.get(str(value), ".nan")
  return json.dumps(value, ensure_ascii=False, default=str)


def describe_type(spec: Mapping[str, Any]) -> str:
  """A key's type in words."""
  if "anyOf" in spec:
    kinds = {choice.get("type") for choice in spec["anyOf"]}
    shown = [choice for choice in spec["anyOf"] if not (choice.get("type") == "integer" and "number" in kinds)]
    return " or ".join(describe_type(choice) for choice in shown)
  if "enum" in spec:
    return _describe_choices(spec["enum"])
  words = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "null": "null",
    "object": "a mapping",
  }
  kind = spec.get("type")
  if kind == "array":
    inner = {"string": " of texts", "integer": " of whole numbers", "number": " of numbers"}
    return "a list" + inner.get(spec.get("items", {}).get("type", ""), "")
  return words.get(kind or "", "any value") + _describe_limits(spec)


def _describe_limits(spec: Mapping[str, Any]) -> str:
  low, above = spec.get("minimum"), spec.get("exclusiveMinimum")
  high = spec.get("maximum")
  if low is not None and high is not None:
    return f" from {_number(low)} to {_number(high)}"
  if above is not None and high is not None:
    return f" above {_number(above)} and up to {_number(high)}"
  if low is not None:
    return f" of at least {_number(low)}"
  if above is not None:
    return f" above {_number(above)}"
  return ""


def _describe_choices(choices: Sequence[Any]) -> str:
  shown = [plain(choice) for choice in choices if choice not in ("", None)]
  if len(shown) <= _MOST_CHOICES:
    return f"one of {', '.join(shown)}"
  return f"one of {', '.join(shown[:_MOST_CHOICES])} and {len(shown) - _MOST_CHOICES} more"


def _number(value: float) -> str:
  return str(int(value)) if float(value).is_integer() else str(value)


def _mismatch(spec: Mapping[str, Any], value: Any) -> ValueMismatchError:
  return ValueMismatchError(f"expected {describe_type(spec)}, got {show(value)}")


def _coerce_one(spec: Mapping[str, Any], value: Any) -> Any:
  """`coerce` for a schema without alternatives."""
  kind = spec.get("type")
  if kind is None:
    return value
  if kind == "null":
    if value is None or _is_none_word(value):
      return None
    raise _mismatch(spec, value)
  if kind == "array":
    return _coerce_array(spec, value)
  if kind == "object":
    if isinstance(value, Mapping):
      return dict(value)
    raise _mismatch(spec, value)
  if kind == "boolean":
    result: Any = _to_bool(value)
  elif kind == "integer":
    result = _to_int(value)
  elif kind == "number":
    result = _to_float(value)
  else:
    result = value if isinstance(value, str) else None
    if result is None and isinstance(value, bool | int | float):
      raise ValueMismatchError(f"{_mismatch(spec, value)}; put it in quotes")
  if result is None:
    raise _mismatch(spec, value)
  if "enum" in spec:
    return _coerce_choice(spec, result)
  if kind in ("integer", "number") and not _in_range(spec, result):
    raise _mismatch(spec, value)
  return result


def _coerce_choice(spec: Mapping[str, Any], value: Any) -> Any:
  if value in spec["enum"]:
    return value
  if isinstance(value, str):
    from difflib import get_close_matches

    near = get_close_matches(value, [choice for choice in spec["enum"] if choice], n=1)
    if near:
      raise ValueMismatchError(f"{_mismatch(spec, value)}; did you mean {near[0]}?")
  raise _mismatch(spec, value)


def _coerce_array(spec: Mapping[str, Any], value: Any) -> list[Any]:
  items = spec.get("items", {})
  if isinstance(value, str) and value.strip()[:1] in ("[", "("):
    value = _parse(spec, value.strip())
  if value == "":
    return []
  if isinstance(value, str) and items.get("type") == "string":
    return [value]
  if isinstance(value, Mapping) or not isinstance(value, Sequence) or isinstance(value, str):
    raise _mismatch(spec, value)
  result = []
  for index, item in enumerate(value):
    try:
      result.append(coerce(items, item))
    except ValueMismatchError as error:
      raise ValueMismatchError(f"item {index + 1}: {error}") from None
  return result


def _to_bool(value: Any) -> bool | None:
  if isinstance(value, bool):
    return value
  word = str(value).strip().lower() if isinstance(value, str | int) else ""
  return True if word in _TRUE else False if word in _FALSE else None


def _to_int(value: Any) -> int | None:
  if isinstance(value, str):
    value = _number_in(value)
  if isinstance(value, bool) or not isinstance(value, int | float):
    return None
  if isinstance(value, float):
    return int(value) if value.is_integer() else None
  return value


def _to_float(value: Any) -> float | None:
  if isinstance(value, str):
    value = _number_in(value)
  if isinstance(value, bool) or not isinstance(value, int | float):
    return None
  try:
    result = float(value)
  except OverflowError:
    return None
  return result if math.isfinite(result) else None


def _number_in(text: str) -> Any:
  """The number a quoted text holds, or None."""
  try:
    value = parse_value(text)
  except yaml.YAMLError:
    return None
  return value if isinstance(value, int | float) else None


def _in_range(spec: Mapping[str, Any], value: float) -> bool:
  return (
    value >= spec.get("minimum", -math.inf)
    and value <= spec.get("maximum", math.inf)
    and value > spec.get("exclusiveMinimum", -math.inf)
    and value < spec.get("exclusiveMaximum", math.inf)
  )


def _is_exactly(kind: str | None, value: Any) -> bool:
  python_type = type(value)
  return {
    "null": value is None,
    "boolean": python_type is bool,
    "integer": python_type is int,
    "number": python_type is float,
    "string": python_type is str,
    "array": isinstance(value, list | tuple),
    "object": isinstance(value, Mapping),
  }.get(kind or "", True)


def _types(spec: Mapping[str, Any]) -> set[str]:
  if "anyOf" in spec:
    return set().union(*(_types(choice) for choice in spec["anyOf"]))
  return {spec.get("type", "any")}


def _items_hold_numbers(spec: Mapping[str, Any]) -> bool:
  return any(
    choice.get("items", {}).get("type") in ("integer", "number")
    for choice in spec.get("anyOf", [spec])
    if choice.get("type") == "array"
  )


def _parse(spec: Mapping[str, Any], text: str) -> Any:
  if text.startswith("(") and text.endswith(")"):
    text = f"[{text[1:-1]}]"
  try:
    return parse_value(text)
  except yaml.YAMLError:
    raise _mismatch(spec, text) from None


def _is_none_word(value: Any) -> bool:
  return value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null"))


def _unquote(text: str) -> str:
  if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
    try:
      value = parse_value(text)
    except yaml.YAMLError:
      return text
    return value if isinstance(value, str) else text
  return text


def _reads_as_itself(text: str) -> bool:
  try:
    return parse_value(text) == text and "\n" not in text and " #" not in text
  except yaml.YAMLError:
    return False


def _cut(text: str) -> str:
  return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…"
