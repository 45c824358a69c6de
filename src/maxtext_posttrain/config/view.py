"""The immutable view of one run's configuration that the rest of the package reads."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from maxtext_posttrain.config.layers import SET_KINDS, USER_KINDS, Kind, Resolved
from maxtext_posttrain.config.schema import OWN_MEANING, SECRET_KEYS, Schema
from maxtext_posttrain.config.values import ValueMismatchError, coerce, plain

MASK = "***"

_WIDEST_COLUMN = 60
_CHOSEN_KINDS = USER_KINDS | {Kind.MAXTEXT_FILE}
_FILE_KEYS = ("hf_train_files", "hf_eval_files")
_OVERRIDES = frozenset({"student_overrides", "teacher_overrides"})
_BEYOND_DEFAULTS = SET_KINDS | {Kind.MODEL}


class Group:
  """The keys below one name, as `config.lora`: read as attributes or items, never set."""

  __slots__ = ("_flat", "_prefix")

  _flat: Mapping[str, Any]
  _prefix: str

  def __init__(self, flat: Mapping[str, Any], prefix: str = ""):
    object.__setattr__(self, "_flat", flat)
    object.__setattr__(self, "_prefix", prefix)

  def __getitem__(self, name: str) -> Any:
    key = f"{self._prefix}{name}"
    if key in self._flat:
      return copy.deepcopy(self._flat[key])
    if any(other.startswith(f"{key}.") for other in self._flat):
      return Group(self._flat, f"{key}.")
    raise KeyError(key)

  def __getattr__(self, name: str) -> Any:
    if not name.startswith("_"):
      try:
        return self[name]
      except KeyError:
        pass
    raise AttributeError(f"the configuration has no key {self._prefix}{name}")

  def __contains__(self, name: object) -> bool:
    key = f"{self._prefix}{name}"
    return key in self._flat or any(other.startswith(f"{key}.") for other in self._flat)

  def get(self, name: str, default: Any = None) -> Any:
    """The key's value, or `default` where there is no such key."""
    try:
      return self[name]
    except KeyError:
      return default

  def __setattr__(self, name: str, value: Any) -> None:
    raise AttributeError(f"the configuration cannot be changed (tried to set {self._prefix}{name})")

  def __delattr__(self, name: str) -> None:
    raise AttributeError(f"the configuration cannot be changed (tried to delete {self._prefix}{name})")

  def __deepcopy__(self, memo: Any) -> Group:
    return self

  def __repr__(self) -> str:
    return f"<configuration group {self._prefix.rstrip('.')}>"


class Config(Group):
  """One run's configuration: MaxText's keys and ours, each checked, each with where it came from.

  `config.steps`, `config["steps"]` and `config.lora.lora_rank` read values; nothing can be set.

  Attributes:
    path: the YAML that was given.
    trainer: whose configuration it is, as 'sft'; None where it only describes a model.
    sources: dotted key to where its value came from, as `configs/sft.yml` or `command line`.
    beyond_defaults: the keys that something other than defaults and MaxText's base.yml set.
    environment: variables of the environment that set keys. MaxText reads these too, and refuses a key that is given
      to it both ways: hide them from it when it is handed `maxtext_overrides()`.
    teacher: the model a run learns from, where it is distilled from one at hand.
  """

  __slots__ = ("_chosen", "_overrides", "beyond_defaults", "environment", "path", "sources", "teacher", "trainer")

  path: Path
  trainer: str | None
  teacher: Config | None
  sources: Mapping[str, str]
  beyond_defaults: frozenset[str]
  environment: tuple[str, ...]
  _chosen: dict[str, Any]
  _overrides: dict[str, Any]

  def __init__(self, resolved: Resolved, schema: Schema, trainer: str | None, teacher: Config | None = None):
    settings = resolved.settings
    super().__init__(MappingProxyType({name: settings[name].value for name in sorted(settings)}))
    put = object.__setattr__
    put(self, "path", resolved.path)
    put(self, "trainer", trainer)
    put(self, "teacher", teacher)
    put(self, "sources", MappingProxyType({name: settings[name].origin.label for name in sorted(settings)}))
    beyond = (name for name, each in settings.items() if each.origin.kind in _BEYOND_DEFAULTS)
    put(self, "beyond_defaults", frozenset(beyond))
    put(self, "environment", resolved.environment)
    put(self, "_overrides", _maxtext_overrides(resolved, schema))
    # Not what student_overrides set: those are kept as they were given.
    below = {
      name: resolved.beneath[name] if each.origin.kind is Kind.OVERRIDES else each for name, each in settings.items()
    }
    put(self, "_chosen", {name: each.value for name, each in below.items() if each.origin.kind in _CHOSEN_KINDS})

  def maxtext_overrides(self) -> dict[str, Any]:
    """What to hand to MaxText on top of its base.yml: its keys that anything here set, nested as it has them.

    Left out are keys that only this package has, `chat_template` (which means more here), `student_overrides` (whose
    keys are among the others) and `teacher_overrides` (see `teacher`), keys that MaxText has for one trainer alone, and
    values that MaxText's own type for a key does not take, such as `num_epoch=null`; this package acts on those itself.
    Files named without `hf_path`, or as a list, are told in the form that MaxText's own checks ask for; its data
    pipeline is not used.
    """
    return copy.deepcopy(self._overrides)

  def chosen(self) -> dict[str, Any]:
    """What files, the environment and the command line set, as nested dicts and without secrets.

    Written as YAML it is a configuration that comes to the same, whatever becomes of the files it was made of.
    """
    kept = {name: value for name, value in self._chosen.items() if name not in SECRET_KEYS}
    return _nested(copy.deepcopy(kept))

  def as_dict(self) -> dict[str, Any]:
    """All keys and values as plain nested dicts, with secrets masked."""
    return _nested({name: _masked(name, value) for name, value in copy.deepcopy(dict(self._flat)).items()})

  def __repr__(self) -> str:
    return f"<{self.trainer} configuration {self.path}>"


def shown_values(config: Config) -> dict[str, str]:
  """Every key's value as `--print-config` shows it, sorted by key, secrets masked."""
  return {name: plain(_masked(name, config[name])) for name in sorted(config.sources)}


def describe_config(config: Config) -> str:
  """Every key with its value and where it came from, sorted, secrets masked: `key = value  # source`."""
  shown = {name: f"{name} = {value}" for name, value in shown_values(config).items()}
  width = min(max(map(len, shown.values())), _WIDEST_COLUMN)
  return "\n".join(f"{line:<{width}}  # {config.sources[name]}" for name, line in shown.items())


def _masked(name: str, value: Any) -> Any:
  return MASK if name in SECRET_KEYS and value else value


def _maxtext_overrides(resolved: Resolved, schema: Schema) -> dict[str, Any]:
  chosen: dict[str, Any] = {}
  for name, setting in resolved.settings.items():
    spec = schema.maxtext_specs.get(name)
    kept_back = name in OWN_MEANING | _OVERRIDES or name in schema.trainer_only
    if spec is None or kept_back or setting.origin.kind not in SET_KINDS:
      continue
    value = ",".join(setting.value) if name in _FILE_KEYS and isinstance(setting.value, list) else setting.value
    with contextlib.suppress(ValueMismatchError):
      chosen[name] = coerce(spec, value)
  files = chosen.get("hf_train_files")
  if chosen.get("dataset_type") == "hf" and files and not chosen.get("hf_path"):
    chosen["hf_path"] = "parquet" if files.endswith(".parquet") else "json"
  rules = chosen.get("logical_axis_rules")
  if rules is not None and not resolved.base_rules <= {str(rule[0]) for rule in rules}:
    chosen["override_logical_axis_rules"] = True
  return _nested(chosen)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
  nested: dict[str, Any] = {}
  for name, value in flat.items():
    *groups, last = name.split(".")
    inner = nested
    for group in groups:
      inner = inner.setdefault(group, {})
    inner[last] = value
  return nested
