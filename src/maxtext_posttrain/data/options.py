"""The data part of a configuration, typed and checked, in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from maxtext_posttrain.errors import ConfigError

Split = Literal["train", "eval"]

FILE_FORMAT_NAMES = ("json", "parquet")
_DATASET_TYPES = ("hf", "grain", "synthetic")
_MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class ColumnRule:
  """Which columns a kind of rows has.

  Attributes:
    default: where the configuration names none.
    counts: how many may be named.
    what: what they are, for messages.
    known: names that data sets often have, looked for where those that are configured are missing.
  """

  default: tuple[str, ...]
  counts: tuple[int, ...]
  what: str
  known: tuple[tuple[str, ...], ...]


CHAT_COLUMNS = ColumnRule(
  ("messages",),
  (1, 2),
  "one column of messages, or two different columns: the user's text and the assistant's",
  (("messages",), ("prompt", "completion"), ("question", "answer")),
)
PAIR_COLUMNS = ColumnRule(
  ("prompt", "chosen", "rejected"),
  (2, 3),
  "three different columns: the prompt, the chosen and the rejected completion; or two, chosen and rejected, that both"
  " hold the prompt too",
  (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
)


@dataclass(frozen=True)
class DataOptions:
  """What one data set is read from and how its rows become batches. MaxText's key names are given in brackets.

  Attributes:
    split: which of the two data sets of a run this is.
    dataset_type: 'hf', 'grain' or 'synthetic' [dataset_type].
    files: local paths or globs, or file names inside the hub repository [hf_train_files, hf_eval_files,
      grain_train_files, grain_eval_files].
    hub_path: a folder saved by `datasets` or the name of a hub data set; '' where the files alone say it [hf_path].
    hub_config: configuration of the hub data set, or None [hf_name].
    hub_data_dir: folder inside the hub data set, or None [hf_data_dir].
    hub_split: split of the folder or hub data set [train_split, hf_eval_split].
    hub_token: access token, or None [hf_access_token].
    columns: one column of messages, or two: the user's text and the assistant's
      [train_data_columns, eval_data_columns].
    completion_only: train only on the assistant's tokens [sft_train_on_completion_only].
    packing: several examples in one sequence [packing].
    max_segments: most examples packed into one sequence, or None [max_segments_per_seq].
    max_target_length: positions of a sequence and most tokens of an example [max_target_length].
    num_epoch: passes over the data, or None to repeat without end [num_epoch].
    shuffle: shuffle the sequences anew in each epoch [enable_data_shuffling].
    seed: seed of the order, or of synthetic tokens [data_shuffle_seed].
    max_bad_rows: rows that may be unusable: a share of all rows below 1, a number of rows from 1 [max_bad_rows].
    vocab_size: token ids are below this [vocab_size].
    limit: rows that are read at most, or None for all.
    column_rule: which columns there may be.
  """

  split: Split
  dataset_type: str
  files: tuple[str, ...]
  hub_path: str
  hub_config: str | None
  hub_data_dir: str | None
  hub_split: str
  hub_token: str | None = field(repr=False)
  columns: tuple[str, ...]
  completion_only: bool
  packing: bool
  max_segments: int | None
  max_target_length: int
  num_epoch: int | None
  shuffle: bool
  seed: int
  max_bad_rows: float
  vocab_size: int
  limit: int | None = None
  column_rule: ColumnRule = CHAT_COLUMNS

  @property
  def files_key(self) -> str:
    """The configuration key that names this data set's files."""
    return f"{self.dataset_type}_{self.split}_files"

  @property
  def columns_key(self) -> str:
    """The configuration key that names this data set's columns."""
    return f"{self.split}_data_columns"

  @property
  def configured(self) -> bool:
    """Whether the configuration names any data for this split."""
    return bool(self.dataset_type == "synthetic" or self.files or (self.hub_path and self.hub_split))

  @classmethod
  def from_config(cls, config: Any, split: Split = "train", *, column_rule: ColumnRule = CHAT_COLUMNS) -> DataOptions:
    """Reads the options of one split from a configuration with MaxText's names as attributes.

    An evaluation data set is read once, in order; where the training data are files or synthetic, only
    evaluation files configure it, so that a hub name left in a base configuration is never fetched unasked.

    Raises:
      ConfigError: for values that no data set can be built with; all of them are listed.
    """
    dataset_type = _text(config, "dataset_type") or "hf"
    train = split == "train"
    prefix = "grain" if dataset_type == "grain" else "hf"
    files = _names(getattr(config, f"{prefix}_{split}_files", None))
    hub_path = _text(config, "hf_path") if dataset_type == "hf" else ""
    if hub_path in FILE_FORMAT_NAMES or (not train and not files and _names(getattr(config, "hf_train_files", None))):
      hub_path = ""
    columns = _names(getattr(config, f"{split}_data_columns", None)) or _names(
      getattr(config, "train_data_columns", None)
    )
    max_segments = int(getattr(config, "max_segments_per_seq", None) or -1)
    num_epoch = getattr(config, "num_epoch", None)
    max_bad_rows = getattr(config, "max_bad_rows", None)
    options = cls(
      split=split,
      dataset_type=dataset_type,
      files=files,
      hub_path=hub_path,
      hub_config=_text(config, "hf_name") or None,
      hub_data_dir=_text(config, "hf_data_dir") or None,
      hub_split=(_text(config, "train_split") or "train") if train else _text(config, "hf_eval_split"),
      hub_token=_text(config, "hf_access_token") or None,
      columns=columns or column_rule.default,
      completion_only=bool(getattr(config, "sft_train_on_completion_only", True)),
      packing=bool(getattr(config, "packing", True)),
      max_segments=max_segments if max_segments > 0 else None,
      max_target_length=int(config.max_target_length),
      num_epoch=1 if not train else None if num_epoch is None else int(num_epoch),
      shuffle=train and bool(getattr(config, "enable_data_shuffling", True)),
      seed=int(getattr(config, "data_shuffle_seed", None) or 0),
      max_bad_rows=0.01 if max_bad_rows is None else float(max_bad_rows),
      vocab_size=int(config.vocab_size),
      column_rule=column_rule,
    )
    options._check()
    return options

  def _check(self) -> None:
    problems = []
    if self.dataset_type not in _DATASET_TYPES:
      problems.append(
        f"dataset_type={self.dataset_type!r} is not supported here: use one of {', '.join(_DATASET_TYPES)}"
      )
    if len(self.columns) not in self.column_rule.counts or len(set(self.columns)) != len(self.columns):
      problems.append(f"{self.columns_key}={list(self.columns)} must name {self.column_rule.what}")
    if self.max_target_length < 2:
      problems.append(f"max_target_length={self.max_target_length} must be at least 2: one token predicts the next")
    if self.num_epoch is not None and self.num_epoch < 1:
      problems.append(f"num_epoch={self.num_epoch} must be at least 1; leave it out to repeat until `steps` are done")
    if not 0 <= self.seed <= _MAX_SEED:
      problems.append(f"data_shuffle_seed={self.seed} must lie between 0 and {_MAX_SEED}")
    if not self.max_bad_rows >= 0:
      problems.append(f"max_bad_rows={self.max_bad_rows} must be a share below 1, or a number of rows from 1")
    if self.vocab_size < 1:
      problems.append(f"vocab_size={self.vocab_size} must be at least 1")
    if problems:
      raise ConfigError(problems)


def _text(config: Any, key: str) -> str:
  value = getattr(config, key, None)
  return "" if value is None else str(value)


def _names(value: str | Sequence[str] | None) -> tuple[str, ...]:
  """A configured name or list of names as a tuple, empty names left out."""
  if value is None:
    return ()
  values = [value] if isinstance(value, str) else list(value)
  return tuple(str(name) for name in values if str(name))
