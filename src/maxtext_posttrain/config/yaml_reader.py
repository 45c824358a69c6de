"""Reads YAML as MaxText does, and also says where each key stands and refuses what PyYAML lets pass."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from maxtext_posttrain.errors import ConfigError

_SafeLoader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):
  """YAML 1.1, but `2e-5` and `2.e-5` are floats, and dates, `010` and `1:30` stay text."""


_FLOAT = re.compile(
  r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
  |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
  |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
  |[-+]?\.(?:inf|Inf|INF)
  |\.(?:nan|NaN|NAN))$""",
  re.VERBOSE,
)
_INT = re.compile(r"^(?:[-+]?0b[01][01_]*|[-+]?0x[0-9a-fA-F][0-9a-fA-F_]*|[-+]?(?:0|[1-9][0-9_]*))$")
_RETIRED_TAGS = frozenset({"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float", "tag:yaml.org,2002:int"})

_Loader.yaml_implicit_resolvers = {
  first: [(tag, pattern) for tag, pattern in resolvers if tag not in _RETIRED_TAGS]
  for first, resolvers in _SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))


@dataclass(frozen=True)
class YamlEntry:
  """A value of a YAML file with the line its key stands in; `value` is a dict of entries for a mapping."""

  value: Any
  line: int


def read_yaml(path: Path, label: str) -> dict[str, YamlEntry]:
  """The top-level mapping of a YAML file; mappings in it are dicts of `YamlEntry` again.

  Args:
    path: the file.
    label: how messages name it.

  Raises:
    ConfigError: the file cannot be read, is not YAML, not a mapping, or gives a key twice.
  """
  try:
    text = path.read_bytes().decode("utf-8-sig")
  except OSError as error:
    raise ConfigError(f"{label}: cannot be read: {error.strerror or error}") from error
  except UnicodeDecodeError as error:
    raise ConfigError(f"{label}: is not UTF-8 text (byte {error.start})") from error
  try:
    loader = _Loader(text)
    try:
      node = loader.get_single_node()
      return _Reader(loader, label).top(node)
    finally:
      loader.dispose()
  except yaml.MarkedYAMLError as error:
    mark = error.problem_mark or error.context_mark
    where = f"{label}, line {mark.line + 1}" if mark else label
    what = " ".join(part for part in (error.context, error.problem) if part)
    raise ConfigError(f"{where}: is not valid YAML: {what}") from error
  except yaml.YAMLError as error:
    raise ConfigError(f"{label}: is not valid YAML: {' '.join(str(error).split())}") from error
  except ValueError as error:
    raise ConfigError(f"{label}: holds a value that cannot be read: {error}") from error
  except RecursionError as error:
    raise ConfigError(f"{label}: is nested too deeply") from error


def parse_value(text: str) -> Any:
  """One value as YAML reads it.

  Raises:
    yaml.YAMLError: the text is not YAML.
  """
  loader = _Loader(text)
  try:
    return loader.get_single_data()
  except (ValueError, RecursionError) as error:
    raise yaml.YAMLError(str(error)) from error
  finally:
    loader.dispose()


def strip_lines(value: Any) -> Any:
  """The plain value of what `read_yaml` returned."""
  if isinstance(value, YamlEntry):
    return strip_lines(value.value)
  if isinstance(value, Mapping):
    return {key: strip_lines(child) for key, child in value.items()}
  return value


class _Reader:
  """Turns YAML nodes into values with lines; aliases are followed once, never in a circle."""

  def __init__(self, loader: Any, label: str):
    self._loader = loader
    self._label = label
    self._open: set[int] = set()

  def top(self, node: yaml.Node | None) -> dict[str, YamlEntry]:
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"):
      return {}
    if not isinstance(node, yaml.MappingNode):
      raise self._error(node, "must hold `key: value` lines")
    return self._mapping(node)

  def _mapping(self, node: yaml.MappingNode) -> dict[str, YamlEntry]:
    if id(node) in self._open:
      raise self._error(node, "an alias (*name) points to what it stands in")
    self._open.add(id(node))
    seen: dict[str, int] = {}
    for key_node, _ in node.value:
      if key_node.tag == "tag:yaml.org,2002:merge":
        continue
      key, line = self._key(key_node), key_node.start_mark.line + 1
      if key in seen:
        raise self._error(key_node, f"{key} is given twice (first in line {seen[key]})")
      seen[key] = line
    self._loader.flatten_mapping(node)
    entries = {}
    for key_node, value_node in node.value:
      if isinstance(value_node, yaml.MappingNode):
        value: Any = self._mapping(value_node)
      else:
        value = self._loader.construct_object(value_node, deep=True)
      entries[self._key(key_node)] = YamlEntry(value, key_node.start_mark.line + 1)
    self._open.discard(id(node))
    return entries

  def _key(self, node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode) and node.value:
      return node.value
    raise self._error(node, "a key must be one word")

  def _error(self, node: yaml.Node, what: str) -> ConfigError:
    return ConfigError(f"{self._label}, line {node.start_mark.line + 1}: {what}")
