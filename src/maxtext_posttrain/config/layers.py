"""Lays defaults, YAML files, the model's file, the environment and the command line over each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from maxtext_posttrain.config.lookup import ConfigFile, Folders, find_config, read_chain
from maxtext_posttrain.config.schema import OUR_KEYS, OWN_MEANING, SECRET_KEYS, Key, Schema
from maxtext_posttrain.config.suggest import other_trainers_key, unknown_key
from maxtext_posttrain.config.trainers import SWITCHES
from maxtext_posttrain.config.values import ValueMismatchError, coerce, from_text, plain, show
from maxtext_posttrain.config.yaml_reader import YamlEntry, parse_value, read_yaml, strip_lines
from maxtext_posttrain.errors import ConfigError

_RULES = "logical_axis_rules"
_OVERRIDE_RULES = "override_logical_axis_rules"
_OVERRIDE_MODEL = "override_model_config"
_STUDENT = "student_overrides"
_INTERPOLATION = re.compile(r"\$\{\s*([^${}]*?)\s*\}")
_MOST_INTERPOLATIONS = 20


class Kind(Enum):
  """What set a value, weakest first."""

  DEFAULT = "default"
  OUR_DEFAULT = "our default"
  BASE = "base"
  TRAINER = "trainer"
  MAXTEXT_FILE = "maxtext file"
  MODEL = "model"
  FILE = "file"
  ENVIRONMENT = "environment"
  COMMAND_LINE = "command line"
  OVERRIDES = "overrides"


USER_KINDS = frozenset({Kind.FILE, Kind.ENVIRONMENT, Kind.COMMAND_LINE, Kind.OVERRIDES})
"""What a user set: a model's file may not silently replace it."""

SET_KINDS = USER_KINDS | {Kind.TRAINER, Kind.MAXTEXT_FILE}
"""What MaxText would not find by itself in its base.yml and its model's file."""


@dataclass(frozen=True)
class Origin:
  """Where a value came from; `where` is for messages, `label` for `--print-config`."""

  kind: Kind
  label: str
  line: int | None = None

  @property
  def where(self) -> str:
    """The place to look at: file and line, or the label."""
    return self.label if self.line is None else f"{self.label}, line {self.line}"


@dataclass(frozen=True)
class Setting:
  """A value and where it came from; `is_text` while it is still a command line's or the environment's text."""

  value: Any
  origin: Origin
  is_text: bool = False


@dataclass(frozen=True)
class Resolved:
  """What the layers come to.

  Attributes:
    path: the YAML that was named.
    settings: value and origin of each key, by dotted name.
    problems: what was wrong, one line each.
    environment: the variables of the environment that set something.
    base_rules: names in base.yml's logical_axis_rules.
    failed: keys whose value is among the problems; their settings hold the default.
    beneath: the settings below `student_overrides` and below the model's file.
  """

  path: Path
  settings: dict[str, Setting]
  problems: list[str]
  environment: tuple[str, ...]
  base_rules: frozenset[str]
  failed: frozenset[str]
  beneath: Mapping[str, Setting]


def resolve(
  argv: Sequence[str], trainer: str | None, schema: Schema, folders: Folders, environ: Mapping[str, str]
) -> Resolved:
  """Merges every layer and checks each value's type.

  Args:
    argv: `[config.yml, key=value, ...]`.
    trainer: whose keys are allowed, as 'sft'; None for any trainer's.
    schema: the keys there are.
    folders: where files lie.
    environ: `M_<KEY>` sets a key, as in MaxText.

  Raises:
    ConfigError: nothing can be merged: no file, a broken file, a chain that never ends.
  """
  if not argv:
    raise ConfigError("name a configuration: config.yml [key=value ...]")
  if "=" in argv[0] and not Path(argv[0]).is_file():
    raise ConfigError(f"{argv[0]}: the first argument must be a YAML file; key=value comes after it")
  path = find_config(argv[0], folders)
  merger = _Merger(trainer, schema)
  merger.add_defaults()
  for file in read_chain(path, folders):
    merger.add_file(file, is_root=file.path == folders.root)
  merger.add_environment(environ)
  merger.add_command_line(argv[1:])
  merger.interpolate(environ)
  merger.check_types()
  beneath = dict(merger.settings)
  merger.add_overrides(_STUDENT, beneath[_STUDENT].value)
  merger.add_model(folders)
  merger.fill_from_environment(environ)
  return merger.resolved(path, beneath)


def resolve_overrides(
  below: Resolved,
  settings: Mapping[str, Setting],
  name: str,
  overrides: Mapping[str, Any],
  schema: Schema,
  folders: Folders,
  environ: Mapping[str, str],
) -> Resolved:
  """Lays a mapping of keys over settings, and the file of the model that they name under them.

  Args:
    below: where the settings are from.
    settings: below the model's file.
    name: the mapping's key, for messages.
    overrides: what it holds.
    schema: the keys there are.
    folders: where files lie.
    environ: the environment.
  """
  merger = _Merger(None, schema)
  merger.settings = dict(settings)
  merger.environment = list(below.environment)
  merger.base_rules = below.base_rules
  merger.add_overrides(name, overrides)
  beneath = dict(merger.settings)
  merger.add_model(folders)
  merger.fill_from_environment(environ)
  return merger.resolved(below.path, beneath)


class _Merger:
  """The layers so far. Each `add_...` lays one more over them, noting problems instead of stopping."""

  def __init__(self, trainer: str | None, schema: Schema):
    self.settings: dict[str, Setting] = {}
    self.problems: list[str] = []
    self.environment: list[str] = []
    self.base_rules: frozenset[str] = frozenset()
    self.failed: set[str] = set()
    self._trainer = trainer
    self._schema = schema

  def resolved(self, path: Path, beneath: Mapping[str, Setting]) -> Resolved:
    """What the layers come to."""
    return Resolved(
      path, self.settings, self.problems, tuple(self.environment), self.base_rules, frozenset(self.failed), beneath
    )

  def add_defaults(self) -> None:
    origins = {
      False: Origin(Kind.DEFAULT, "MaxText default"),
      True: Origin(Kind.OUR_DEFAULT, "maxtext-posttrain default"),
    }
    for key in self._schema.keys.values():
      if key.derived or not key.belongs_to(self._trainer):
        continue
      self.settings[key.name] = Setting(key.default, origins[key.ours])

  def add_file(self, file: ConfigFile, *, is_root: bool) -> None:
    kind = Kind.BASE if is_root else Kind.MAXTEXT_FILE if file.is_maxtexts else Kind.FILE
    for name, entry in file.entries.items():
      if is_root and name in OUR_KEYS:
        continue
      self._set_tree(name, entry, Origin(kind, file.label, entry.line))
    if is_root:
      rules = self.settings[_RULES].value if _RULES in self.settings else []
      self.base_rules = frozenset(str(rule[0]) for rule in rules)
      switch = SWITCHES.get(self._trainer or "")
      if switch is not None:
        self.settings[switch] = Setting(True, Origin(Kind.TRAINER, f"the {self._trainer} trainer"))

  def add_environment(self, environ: Mapping[str, str]) -> None:
    for name in list(self.settings):
      variable = f"M_{name.upper()}"
      if "." not in name and variable in environ:
        self.environment.append(variable)
        origin = Origin(Kind.ENVIRONMENT, f"{variable} in the environment")
        self._set(name, Setting(environ[variable], origin, is_text=True))

  def add_command_line(self, arguments: Sequence[str]) -> None:
    origin = Origin(Kind.COMMAND_LINE, "command line")
    given: dict[str, Setting] = {}
    for name, value in _command_line_entries(arguments, self._schema, self.problems):
      for leaf, leaf_value in self._leaves(name, value, origin):
        setting = Setting(leaf_value, origin, is_text=isinstance(leaf_value, str))
        before = given.get(leaf)
        if before is not None and isinstance(before.value, Mapping) and isinstance(leaf_value, Mapping):
          setting = _merged_mapping(before, setting)
        elif before is not None and str(before.value) != str(leaf_value):
          values = "" if leaf in SECRET_KEYS else f" ({before.value} and {leaf_value})"
          self.problems.append(f"command line: {leaf} is given twice with different values{values}; keep one")
        given[leaf] = setting
    rules = given.pop(_RULES, None)
    for leaf, setting in given.items():
      self._refuse_twice(leaf)
      self._set(leaf, setting)
    if rules is not None:
      self._refuse_twice(_RULES)
      self._merge_rules(rules, given.get(_OVERRIDE_RULES))

  def _refuse_twice(self, leaf: str) -> None:
    before = self.settings.get(leaf)
    if before is not None and before.origin.kind is Kind.ENVIRONMENT:
      self.problems.append(f"command line: {leaf} is also set by {before.origin.label}; keep one")

  def _merge_rules(self, setting: Setting, override: Setting | None) -> None:
    """Rules on the command line replace those of the same name, or all with the override, as in MaxText."""
    try:
      new = from_text({"type": "array"}, setting.value)
    except ValueMismatchError as error:
      self.problems.append(f"{setting.origin.where}: {_RULES}: {error}")
      return
    replace_all = override is not None and str(override.value).strip().lower() == "true"
    old = [] if replace_all else self.settings[_RULES].value
    self.settings[_RULES] = Setting(merge_rules(old, new), setting.origin)

  def interpolate(self, environ: Mapping[str, str]) -> None:
    """Puts values in place of `${key}` and `${oc.env:NAME}`, as OmegaConf does for MaxText."""
    for name, setting in list(self.settings.items()):
      if setting.origin.kind not in SET_KINDS or name in OWN_MEANING or not _mentions(setting.value, "${"):
        continue
      try:
        value = self._filled(setting.value, environ)
      except ValueMismatchError as error:
        self.problems.append(f"{setting.origin.where}: {name}: {error}")
        self.settings[name] = Setting(self._schema.keys[name].default, setting.origin)
        self.failed.add(name)
        continue
      self.settings[name] = replace(setting, value=value, is_text=setting.is_text and isinstance(value, str))

  def _filled(self, value: Any, environ: Mapping[str, str]) -> Any:
    if isinstance(value, list):
      return [self._filled(item, environ) for item in value]
    if isinstance(value, Mapping):
      return {key: self._filled(item, environ) for key, item in value.items()}
    for _ in range(_MOST_INTERPOLATIONS):
      match = _INTERPOLATION.search(value) if isinstance(value, str) else None
      if match is None:
        return value
      found = self._reference(match[1], environ)
      value = found if match[0] == value else value[: match.start()] + str(found) + value[match.end() :]
    raise ValueMismatchError("its ${...} refer to each other in a circle")

  def _reference(self, name: str, environ: Mapping[str, str]) -> Any:
    if name.startswith("oc.env:"):
      variable, comma, default = (part.strip() for part in name.removeprefix("oc.env:").partition(","))
      if variable not in environ and not comma:
        raise ValueMismatchError(f"${{{name}}}: {variable} is not set in the environment")
      return environ.get(variable, default)
    if name not in self.settings:
      raise ValueMismatchError(f"${{{name}}}: there is no key {name}")
    return self.settings[name].value

  def check_types(self) -> None:
    for name, setting in self.settings.items():
      key = self._schema.keys[name]
      if setting.origin.kind in (Kind.DEFAULT, Kind.OUR_DEFAULT) or name in self.failed:
        continue
      try:
        read = from_text if setting.is_text else coerce
        self.settings[name] = replace(setting, value=read(key.spec, setting.value), is_text=False)
      except ValueMismatchError as error:
        what = "is not of its type" if name in SECRET_KEYS else str(error)
        self.problems.append(f"{setting.origin.where}: {name}: {what}")
        self.settings[name] = Setting(key.default, setting.origin)
        self.failed.add(name)

  def add_overrides(self, name: str, overrides: Mapping[str, Any]) -> None:
    """Lays the keys that `name` holds over what is set; each is checked against its own key's type."""
    origin = Origin(Kind.OVERRIDES, name)
    for dotted, value in overrides.items():
      for leaf, leaf_value in self._leaves(str(dotted), value, origin):
        key = self._schema.keys[leaf]
        try:
          self._set(leaf, Setting(coerce(key.spec, leaf_value), origin))
        except ValueMismatchError as error:
          self.problems.append(f"{name}: {leaf}: {error}")
          self.failed.add(leaf)

  def add_model(self, folders: Folders) -> None:
    """Lays MaxText's file for `model_name` under what the user set, or notes where both set a key."""
    model = str(self.settings["model_name"].value).replace("-Instruct", "")
    override = bool(self.settings[_OVERRIDE_MODEL].value)
    if model == "default":
      return
    path = folders.maxtext / "models" / f"{model}.yml"
    if not path.is_file():
      if not override:
        where = self.settings["model_name"].origin.where
        self.problems.append(
          f"{where}: model_name={model}: MaxText ships no models/{model}.yml with its sizes; choose another, or give"
          f" the sizes yourself with {_OVERRIDE_MODEL}=true"
        )
      return
    entries = strip_lines(read_yaml(path, folders.label(path)))
    for name, value in entries.items():
      key = self._schema.keys.get(name)
      if key is not None:
        self._set_from_model(key, value, override, Origin(Kind.MODEL, f"maxtext model {model}.yml"), entries)

  def _set_from_model(self, key: Key, value: Any, override: bool, origin: Origin, entries: Mapping[str, Any]) -> None:
    setting = self.settings[key.name]
    value = coerce(key.spec, value)
    if setting.origin.kind not in USER_KINDS:
      if key.name == _RULES and not entries.get(_OVERRIDE_RULES):
        value = merge_rules(setting.value, value)
      self.settings[key.name] = Setting(value, origin)
    elif not override and setting.value != value:
      self.problems.append(
        f"{setting.origin.where}: {key.name}={plain(setting.value)}, but {origin.label} sets {plain(value)};"
        f" remove one, or set {_OVERRIDE_MODEL}=true"
      )

  def fill_from_environment(self, environ: Mapping[str, str]) -> None:
    """What MaxText takes from elsewhere where its key is empty."""
    for name, variable in (("hf_access_token", "HF_TOKEN"), ("run_name", "JOBSET_NAME")):
      if not self.settings[name].value and environ.get(variable):
        origin = Origin(Kind.ENVIRONMENT, f"{variable} in the environment")
        self.settings[name] = Setting(environ[variable], origin)
    if self.settings["steps"].value == -1 and self.settings["learning_rate_schedule_steps"].value > 0:
      self.settings["steps"] = self.settings["learning_rate_schedule_steps"]

  def _set_tree(self, name: str, entry: YamlEntry, origin: Origin) -> None:
    for leaf, value in self._leaves(name, entry, origin):
      line = value.line if isinstance(value, YamlEntry) else origin.line
      self._set(leaf, Setting(strip_lines(value), replace(origin, line=line)))

  def _leaves(self, name: str, value: Any, origin: Origin) -> Iterator[tuple[str, Any]]:
    """The keys a possibly nested value sets; unknown ones are noted and left out."""
    inner = value.value if isinstance(value, YamlEntry) else value
    line = value.line if isinstance(value, YamlEntry) else origin.line
    where = replace(origin, line=line).where
    if name in self._schema.groups:
      if isinstance(inner, Mapping):
        for child, child_value in inner.items():
          yield from self._leaves(f"{name}.{child}", child_value, origin)
      elif inner is not None:
        self.problems.append(f"{where}: {name}: expected a mapping of keys, as {name}.key=value, got {show(inner)}")
      return
    key = self._schema.keys.get(name)
    if key is not None and self._allowed(key, where):
      yield name, value
    elif key is None:
      self.problems.append(f"{where}: {unknown_key(name, self._schema, self._trainer)}")

  def _allowed(self, key: Key, where: str) -> bool:
    if key.derived:
      hint = f"; set base_{key.name}" if f"base_{key.name}" in self._schema.keys else ""
      self.problems.append(f"{where}: {key.name} is computed by MaxText and cannot be set{hint}")
    elif key.trainer is not None and not key.belongs_to(self._trainer):
      self.problems.append(f"{where}: {other_trainers_key(key.name, key.trainer, self._trainer)}")
    else:
      return True
    return False

  def _set(self, name: str, setting: Setting) -> None:
    before = self.settings.get(name)
    if before is not None and self._schema.keys[name].spec.get("type") == "object":
      setting = _merged_mapping(before, setting)
    self.settings[name] = setting


def merge_rules(old: Iterable[Any], new: Iterable[Any]) -> list[Any]:
  """MaxText's rule for logical axis rules: new ones replace the old ones of the same name."""
  new = list(new or [])
  replaced = {str(rule[0]) for rule in new if rule}
  return [rule for rule in old or [] if str(rule[0]) not in replaced] + new


def _merged_mapping(before: Setting, setting: Setting) -> Setting:
  """Free mappings of two layers are merged key by key; what is no mapping is left for the type check."""
  value = setting.value
  if setting.is_text:
    try:
      value = parse_value(value)
    except yaml.YAMLError:
      return setting
  if not isinstance(value, Mapping) or not isinstance(before.value, Mapping):
    return setting
  return Setting(_deep_merge(before.value, value), setting.origin)


def _deep_merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
  merged = dict(old)
  for key, value in new.items():
    both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
    merged[key] = _deep_merge(merged[key], value) if both else value
  return merged


def _command_line_entries(arguments: Sequence[str], schema: Schema, problems: list[str]) -> Iterator[tuple[str, Any]]:
  """The key and text of each `key=value`; a dotted key into a free mapping becomes that mapping."""
  for argument in arguments:
    key, equals, text = argument.partition("=")
    name = key.strip()
    if argument.startswith("-"):
      problems.append(f"command line: {argument}: keys are given as key=value, without dashes")
    elif not equals or not name:
      problems.append(f"command line: {argument}: expected key=value")
    elif name == "base_config":
      problems.append("command line: base_config can only stand in a YAML file")
    elif name in schema.groups:
      yield name, _parsed_or_text(text)
    else:
      free = next((k for k in _prefixes(name) if _is_free_mapping(schema, k)), None)
      yield (name, text) if free is None else (free, _nested(name.removeprefix(f"{free}."), _parsed_or_text(text)))


def _prefixes(name: str) -> Iterator[str]:
  parts = name.split(".")
  for count in range(1, len(parts)):
    yield ".".join(parts[:count])


def _is_free_mapping(schema: Schema, name: str) -> bool:
  key = schema.keys.get(name)
  return key is not None and key.spec.get("type") == "object"


def _nested(dotted: str, value: Any) -> dict[str, Any]:
  for part in reversed(dotted.split(".")):
    value = {part: value}
  return value


def _parsed_or_text(text: str) -> Any:
  try:
    return parse_value(text)
  except yaml.YAMLError:
    return text


def _mentions(value: Any, mark: str) -> bool:
  if isinstance(value, str):
    return mark in value
  if isinstance(value, Mapping):
    return any(_mentions(item, mark) for item in value.values())
  return isinstance(value, list) and any(_mentions(item, mark) for item in value)
