"""Rows of a data set, read in order from files or through `datasets`, each with the place it came from."""

from __future__ import annotations

import contextlib
import glob
import gzip
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from maxtext_posttrain.data.options import DataOptions
from maxtext_posttrain.errors import DataError

OPTIONAL_COLUMNS = ("tools", "documents")
BAD_JSON = "not valid JSON"

_SUFFIXES = (".jsonl", ".json", ".parquet")
_PEEKED_ROWS = 100
_READ_BATCH = 1024


class Location(NamedTuple):
  """Where a row stands: a file's line or row, or a row of a hub data set, counted from 1."""

  source: str
  unit: str
  number: int

  def __str__(self) -> str:
    return f"{self.source} {self.unit} {self.number}"


class Row(NamedTuple):
  """One row: its value as read, or, where it could not be read, the reason and the detail."""

  location: Location
  value: Any
  reason: str | None = None
  detail: str = ""


def read_rows(options: DataOptions) -> Iterator[Row]:
  """Yields the rows of the configured data set in order, at most `limit` of them, those that cannot be read included.

  Raises:
    DataError: when the files or the data set cannot be found or read at all, or have none of the columns.
  """
  rows = itertools.islice(_read_source(options), options.limit)
  peeked = list(itertools.islice(rows, _PEEKED_ROWS))
  _check_columns(peeked, options)
  return itertools.chain(peeked, rows)


def find_columns(options: DataOptions) -> tuple[str, ...] | None:
  """The columns of chats, by the names that are common, which the first rows of a data set have; None without any.

  Raises:
    DataError: the files or the data set cannot be found or read at all.
  """
  peeked = list(itertools.islice(_read_source(options), _PEEKED_ROWS))
  existing = {key for row in peeked if isinstance(row.value, dict) for key in row.value}
  return next((known for known in options.column_rule.known if existing.issuperset(known)), None)


def describe_source(options: DataOptions) -> str:
  """The data set's name for logs and messages."""
  if options.files:
    return ", ".join(options.files)
  return f"{options.hub_path}[{options.hub_split}]"


def _read_source(options: DataOptions) -> Iterator[Row]:
  if options.files:
    paths = _matching_files(options)
    if paths:
      return itertools.chain.from_iterable(_read_file(path, options) for path in paths)
  if not options.hub_path:
    raise DataError(
      f"no {options.split} data is configured: set {options.files_key} to a .jsonl, .json or .parquet file"
      + (", or hf_path to a folder or hub data set" if options.dataset_type == "hf" else "")
    )
  return _read_datasets(options)


def _matching_files(options: DataOptions) -> list[Path]:
  """The local files that are named, globs in sorted order; empty where the names are files of a hub repository."""
  paths: list[Path] = []
  for name in options.files:
    if Path(name).is_dir():
      raise DataError(
        f"{options.files_key}: {name} is a folder; name its files, for example {name.rstrip('/')}/*.jsonl"
      )
    # Path.glob takes no absolute patterns.
    matches = [name] if Path(name).exists() else sorted(glob.glob(name, recursive=True))  # noqa: PTH207
    if not matches:
      if options.hub_path and not paths:
        return []
      remote = " (only local or mounted paths are read)" if "://" in name else ""
      raise DataError(f"{options.files_key}: no file matches {name}{remote}")
    paths.extend(Path(match) for match in matches)
  for path in paths:
    if _format(path) is None:
      raise DataError(f"{options.files_key}: {path} is not one of {', '.join(_SUFFIXES)} (or one of these with .gz)")
  return paths


def _format(path: Path) -> str | None:
  name = path.name.lower().removesuffix(".gz")
  return next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)


def _read_file(path: Path, options: DataOptions) -> Iterator[Row]:
  suffix = _format(path)
  with _naming_the_file(path), _open(path) as file:
    if suffix == ".jsonl":
      yield from _read_jsonl(file, str(path))
    elif suffix == ".json":
      yield from _read_json(file, str(path))
    else:
      yield from _read_parquet(file, str(path), options)


def _open(path: Path) -> IO[bytes]:
  if path.name.lower().endswith(".gz"):
    return cast("IO[bytes]", gzip.open(path, "rb"))
  return path.open("rb")


@contextlib.contextmanager
def _naming_the_file(path: Path) -> Iterator[None]:
  try:
    yield
  except (OSError, EOFError, zlib.error) as error:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    raise DataError(f"{path} cannot be read: {reason}") from error


def _read_jsonl(lines: Iterable[bytes], source: str) -> Iterator[Row]:
  """One JSON value a line; blank lines are skipped but counted, so that numbers are those an editor shows."""
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    location = Location(source, "line", number)
    try:
      yield Row(location, json.loads(line.rstrip()))
    except json.JSONDecodeError as error:
      yield Row(location, None, BAD_JSON, f"{error.msg} at column {error.colno}")
    except UnicodeDecodeError:
      yield Row(location, None, BAD_JSON, "the line is not UTF-8")
    except RecursionError:
      yield Row(location, None, BAD_JSON, "nested too deep")
    except ValueError as error:
      yield Row(location, None, BAD_JSON, str(error))


def _read_json(file: IO[bytes], source: str) -> Iterator[Row]:
  """A list of rows, an object with the list under "data", or, as many .json files are, one JSON object a line."""
  content = file.read().removeprefix(b"\xef\xbb\xbf")
  try:
    value = json.loads(content)
  except (ValueError, RecursionError) as error:
    if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data" and content.lstrip()[:1] == b"{":
      yield from _read_jsonl(content.split(b"\n"), source)
      return
    where = f" at line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else f": {error}"
    raise DataError(f"{source} is not valid JSON{where}") from error
  if isinstance(value, dict):
    value = value["data"] if isinstance(value.get("data"), list) else [value]
  if not isinstance(value, list):
    raise DataError(f'{source} must hold a list of rows, or an object with such a list under "data"')
  for number, row in enumerate(value, start=1):
    yield Row(Location(source, "row", number), row)


def _read_parquet(file: IO[bytes], source: str, options: DataOptions) -> Iterator[Row]:
  import pyarrow
  import pyarrow.parquet

  try:
    parquet = pyarrow.parquet.ParquetFile(file)
    present = parquet.schema_arrow.names
    wanted = [name for name in (*options.columns, *OPTIONAL_COLUMNS) if name in present]
    if not set(options.columns) <= set(wanted):
      wanted = present  # The message about missing columns names those that exist.
    numbers = itertools.count(1)
    for batch in parquet.iter_batches(batch_size=_READ_BATCH, columns=wanted):
      for row in batch.to_pylist():
        yield Row(Location(source, "row", next(numbers)), drop_filled_nulls(row))
  except (pyarrow.ArrowException, OSError) as error:  # Arrow reports a broken footer as an OSError.
    raise DataError(f"{source} is not a readable Parquet file: {_first_line(error)}") from error


def _read_datasets(options: DataOptions) -> Iterator[Row]:
  dataset = _load_datasets(options)
  source = describe_source(options)
  numbers = itertools.count(1)
  for batch in dataset.with_format(None).iter(batch_size=_READ_BATCH):
    names = list(batch)
    for values in zip(*batch.values(), strict=True):
      row = dict(zip(names, values, strict=True))
      yield Row(Location(source, "row", next(numbers)), drop_filled_nulls(row))


def _load_datasets(options: DataOptions) -> Any:
  """The configured split as a `datasets.Dataset`, from a folder saved by `datasets`, or by `load_dataset`."""
  path = Path(options.hub_path)
  if path.is_file():
    raise DataError(f"hf_path={options.hub_path} is a file: name it in {options.files_key} instead")
  if not path.exists() and (options.hub_path.startswith((".", "/", "~")) or options.hub_path.count("/") > 1):
    raise DataError(f"hf_path={options.hub_path}: there is no such folder")
  import datasets

  try:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
      loaded = datasets.load_from_disk(str(path))
    else:
      return datasets.load_dataset(
        options.hub_path,
        options.hub_config,
        data_dir=options.hub_data_dir,
        data_files=list(options.files) or None,
        split=options.hub_split,
        token=options.hub_token,
      )
  except Exception as error:  # `datasets` raises errors of many libraries; each ends the run with its first line.
    raise DataError(f"hf_path={options.hub_path} (split {options.hub_split}): {_first_line(error)}") from error
  key = "train_split" if options.split == "train" else "hf_eval_split"
  if not isinstance(loaded, datasets.DatasetDict):
    if options.split == "eval":
      raise DataError(f"{options.hub_path} holds one data set without splits: leave {key} out, or set hf_eval_files")
    return loaded
  if options.hub_split not in loaded:
    raise DataError(
      f"{options.hub_path} has no split {options.hub_split!r}; set {key} to one of {', '.join(map(str, loaded))}"
    )
  return loaded[options.hub_split]


def drop_filled_nulls(value: Any) -> Any:
  """A row without the nulls that a columnar file has wherever another row's object has a key.

  Arrow gives every object in a column the union of all keys. A template that asks `'tool_calls' in message`
  would see them. `content`, null beside tool calls in the chat format itself, stays.
  """
  if isinstance(value, dict):
    return {key: drop_filled_nulls(item) for key, item in value.items() if item is not None or key == "content"}
  if isinstance(value, list):
    return [drop_filled_nulls(item) for item in value]
  return value


def _check_columns(rows: list[Row], options: DataOptions) -> None:
  """Refuses a data set whose first rows have none of a column that is asked for."""
  existing = dict.fromkeys(key for row in rows if isinstance(row.value, dict) for key in row.value)
  missing = [name for name in options.columns if name not in existing]
  if not missing or not existing:
    return
  usable = [known for known in options.column_rule.known if set(known) <= set(existing)]
  names = [str(name) for name in existing]
  hint = f"; set {options.columns_key}={json.dumps(usable[0])}" if usable else f"; set {options.columns_key}"
  raise DataError(
    f"{describe_source(options)} has no column {', '.join(repr(name) for name in missing)}"
    f" ({options.columns_key}={json.dumps(list(options.columns))}); its columns are {', '.join(names)}{hint}"
  )


def _first_line(error: BaseException) -> str:
  text = str(error).strip()
  return text.splitlines()[0] if text else type(error).__name__
