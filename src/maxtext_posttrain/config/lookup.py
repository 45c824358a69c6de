"""Where configuration files are looked for, and the chain of files a YAML builds on."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from maxtext_posttrain.config.yaml_reader import YamlEntry, read_yaml, strip_lines
from maxtext_posttrain.errors import ConfigError

BASE_KEY = "base_config"
ASSET_SCHEME = "maxtext://"

_ROOT_FILE = "base.yml"


@dataclass(frozen=True)
class Folders:
  """Where configuration files lie.

  Attributes:
    ours: our `configs`, of the checkout or inside the installed package.
    maxtext: MaxText's `configs`.
    assets: MaxText's `assets`, which `maxtext://` names.
  """

  ours: Path
  maxtext: Path
  assets: Path

  @classmethod
  def find(cls, environ: Mapping[str, str]) -> Folders:
    """Finds the folders without importing MaxText; `MAXTEXT_CONFIGS_DIR` counts as it does there.

    Raises:
      ConfigError: MaxText is not installed.
    """
    spec = importlib.util.find_spec("maxtext")
    if spec is None or not spec.submodule_search_locations:
      raise ConfigError(
        "maxtext is not installed in this Python; install it with: pip install -r requirements/base.txt"
      )
    package = Path(next(iter(spec.submodule_search_locations)))
    here = Path(__file__).resolve()
    installed = here.parents[1] / "configs"
    return cls(
      ours=installed if installed.is_dir() else here.parents[3] / "configs",
      maxtext=Path(environ.get("MAXTEXT_CONFIGS_DIR") or package / "configs"),
      assets=package / "assets",
    )

  def label(self, path: Path) -> str:
    """How messages and `--print-config` name a configuration file."""
    resolved = path.resolve()
    for folder, prefix in ((self.maxtext, "MaxText "), (self.ours, "configs/"), (Path.cwd(), "")):
      if resolved.is_relative_to(folder.resolve()):
        return prefix + resolved.relative_to(folder.resolve()).as_posix()
    return str(path)

  def is_maxtexts(self, path: Path) -> bool:
    """Whether a file lies in MaxText's own `configs`."""
    return path.resolve().is_relative_to(self.maxtext.resolve())

  @property
  def root(self) -> Path:
    """MaxText's base.yml, which every configuration builds on."""
    return self.maxtext / _ROOT_FILE


@dataclass(frozen=True)
class ConfigFile:
  """One YAML of the chain.

  Attributes:
    path: the file.
    label: its name in messages.
    is_maxtexts: it is one of MaxText's own.
    entries: its keys, without `base_config`.
  """

  path: Path
  label: str
  is_maxtexts: bool
  entries: Mapping[str, YamlEntry]


def resolve_asset(text: str, folders: Folders) -> str:
  """`maxtext://tokenizers/x` as the path of that file in MaxText's assets; any other text as it is."""
  return str(folders.assets / text.removeprefix(ASSET_SCHEME)) if text.startswith(ASSET_SCHEME) else text


def find_config(name: str, folders: Folders) -> Path:
  """The file a configuration's name means: that path, or one in our `configs`.

  Raises:
    ConfigError: there is no such file.
  """
  candidates = [Path(name), folders.ours / name]
  for candidate in candidates:
    if candidate.is_file():
      return candidate
  if Path(name).is_dir():
    raise ConfigError(f"{name}: is a folder; name a YAML file in it")
  hint = "" if name.endswith((".yml", ".yaml")) else "; the first argument must be a YAML file"
  raise ConfigError(f"{name}: no such file, here or in {folders.ours}{hint}")


def read_chain(path: Path, folders: Folders) -> list[ConfigFile]:
  """The files a configuration is made of, each once, what others build on first; MaxText's base.yml leads.

  `base_config:` names the file a YAML builds on, or a list of files that are laid over each other in that order.

  Raises:
    ConfigError: a file is missing, broken, or builds on itself.
  """
  chain: list[ConfigFile] = []
  _append_with_bases(folders.root, folders, [], chain)
  _append_with_bases(path, folders, [], chain)
  return chain


def _append_with_bases(path: Path, folders: Folders, above: list[Path], chain: list[ConfigFile]) -> None:
  resolved = path.resolve()
  if resolved in above:
    names = [folders.label(file) for file in [*above[above.index(resolved) :], resolved]]
    raise ConfigError(f"{names[0]}: builds on itself by base_config: {' -> '.join(names)}")
  if any(file.path.resolve() == resolved for file in chain):
    return
  label = folders.label(path)
  entries = read_yaml(path, label)
  base = entries.pop(BASE_KEY, None)
  if base is not None:
    for name in _base_names(base, label):
      found = _find_base(name, path, folders, f"{label}, line {base.line}")
      _append_with_bases(found, folders, [*above, resolved], chain)
  chain.append(ConfigFile(path, label, folders.is_maxtexts(path), entries))


def _base_names(entry: YamlEntry, label: str) -> list[str]:
  value = strip_lines(entry.value)
  names = [] if value is None else value if isinstance(value, list) else [value]
  if not all(isinstance(name, str) and name for name in names):
    raise ConfigError(f"{label}, line {entry.line}: base_config must name a YAML file, or be a list of them")
  return names


def _find_base(name: str, path: Path, folders: Folders, where: str) -> Path:
  """The file `base_config: name` means in `path`; a file is never its own base, so the search goes on."""
  for folder in (path.parent, folders.ours, folders.maxtext):
    candidate = folder / Path(name).expanduser()
    if candidate.is_file() and candidate.resolve() != path.resolve():
      return candidate
  raise ConfigError(
    f"{where}: base_config {name}: no such file beside this one, in {folders.ours}, or in MaxText's configs"
  )
