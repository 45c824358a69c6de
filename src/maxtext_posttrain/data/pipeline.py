"""Data sets for training and evaluation: shuffled, repeated, sharded and batched by Grain, resumable anywhere."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from maxtext_posttrain.config.preferences import reference_kind
from maxtext_posttrain.data.batches import PADDING_ROW, Batch, ExampleRows, RowSource, SyntheticRows
from maxtext_posttrain.data.examples import ConversationTokenizer, load_examples
from maxtext_posttrain.data.options import PAIR_COLUMNS, DataOptions
from maxtext_posttrain.data.packing import one_per_row, pack
from maxtext_posttrain.data.pairs import HALVES, PairRows, PromptTokenizer, load_pairs, pair_positions, pairs_per_row
from maxtext_posttrain.data.reference_rows import ReferenceRows
from maxtext_posttrain.data.report import DataReport
from maxtext_posttrain.data.samples import Sample, render_samples
from maxtext_posttrain.errors import ConfigError, DataError
from maxtext_posttrain.tokenizers import configured_tokenizer

SYNTHETIC_ROWS = 1024
"""Different sequences of a synthetic data set, which repeats them without end."""

_ENDLESS_ROWS = 2**52
"""Rows of a data set that repeats without end. Grain's own endless length, 2**63 - 1, overflows in batches of one."""

_SAMPLES = 3
_SAMPLE_PAIRS = 2
_PREFETCH_THREADS = 1
_PREFETCHED_BATCHES = 4
_STATE_VERSION = 1

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PreparedRows:
  """Rows read, tokenised and packed, before it is known how they are batched and shared.

  Attributes:
    source: the sequences.
    report: what became of the rows read.
    num_epoch: passes over them, or None to repeat without end.
    shuffle_seed: None keeps their order.
    identity: what else must be the same when a saved position is restored.
    samples: the first few examples as text; none where the data are no text.
  """

  source: RowSource
  report: DataReport
  num_epoch: int | None
  shuffle_seed: int | None
  identity: Mapping[str, Any]
  samples: Sequence[Sample] = ()

  def dataset(self, *, batch_size: int, mine: Sequence[int] | None = None) -> RowDataset:
    """The data set with `batch_size` sequences of a batch; see `RowDataset` for `mine`."""
    return RowDataset(
      self.source,
      self.report,
      batch_size=batch_size,
      mine=mine,
      num_epoch=self.num_epoch,
      shuffle_seed=self.shuffle_seed,
      samples=self.samples,
      identity=dict(self.identity),
    )


@dataclasses.dataclass(frozen=True)
class PreparedData:
  """A run's data; `evaluation` is None where the configuration names none."""

  train: PreparedRows
  evaluation: PreparedRows | None


def prepare_chats(config: Any) -> PreparedData:
  """Loads the tokenizer and prepares both data sets of a run on chats. Imports neither JAX nor MaxText.

  Args:
    config: MaxText's key names as attributes; see DataOptions and `configured_tokenizer`.

  Raises:
    ConfigError: for options that no data set can be built with.
    TokenizerError: the tokenizer can't be loaded.
    DataError: when the data can't be read, or too few rows are usable.
  """
  tokenizer = configured_tokenizer(config)
  return PreparedData(prepare_train_rows(config, tokenizer), prepare_eval_rows(config, tokenizer))


def prepare_preferences(config: Any) -> PreparedData:
  """Loads the tokenizer and prepares both data sets of a run on preference pairs. Imports neither JAX nor MaxText.

  Arguments and errors are those of `prepare_chats`; `dpo.max_prompt_length` is read too.
  """
  tokenizer = configured_tokenizer(config)
  if tokenizer is None:
    raise ConfigError("dataset_type=synthetic: preference pairs can't be made up; name files or a data set")
  rows = []
  for split in ("train", "eval"):
    options = DataOptions.from_config(config, split, column_rule=PAIR_COLUMNS)
    wanted = split == "train" or options.configured
    rows.append(prepare_pair_rows(options, tokenizer, config) if wanted else None)
  train, evaluation = rows
  assert train is not None
  return PreparedData(train, evaluation)


def prepare_pair_rows(options: DataOptions, tokenizer: PromptTokenizer, config: Any) -> PreparedRows:
  """Reads, tokenises and packs the preference pairs that `options` name.

  Args:
    options: with PAIR_COLUMNS.
    tokenizer: renders prompts and conversations.
    config: MaxText's key names as attributes; of them `packing`, `max_segments_per_seq` and those below `dpo` are read.

  Raises:
    DataError: when the data can't be read, or too few pairs are usable.
  """
  _check_pad_id(options, tokenizer)
  max_prompt_length = config.dpo.max_prompt_length
  examples, report = load_pairs(options, tokenizer, max_prompt_length)
  positions = pair_positions(examples)
  length = options.max_target_length
  packed = pack(positions, length, pairs_per_row(config)) if options.packing else one_per_row(len(positions))
  report.rows = len(packed)
  report.padding_share = 1 - int((examples.lengths - 1).sum()) / (HALVES * len(packed) * length)
  source: RowSource = PairRows(examples, packed, length, tokenizer.pad_id)
  if reference_kind(config) == "precomputed":
    source = ReferenceRows(source, pairs_per_row(config))
  return PreparedRows(
    source,
    report,
    num_epoch=options.num_epoch,
    shuffle_seed=options.seed if options.shuffle else None,
    samples=render_samples(examples, tokenizer, HALVES * _SAMPLE_PAIRS),
    identity={
      "tokenizer": tokenizer.fingerprint,
      "max_target_length": length,
      "packing": options.packing,
      "dpo.max_prompt_length": max_prompt_length,
    },
  )


def prepare_train_rows(config: Any, tokenizer: ConversationTokenizer | None) -> PreparedRows:
  """Reads, tokenises and packs the training data.

  Args:
    config: MaxText's key names as attributes; see DataOptions.
    tokenizer: renders conversations; None only for synthetic data.

  Raises:
    ConfigError: for options that no data set can be built with.
    DataError: when the data can't be read, or too few rows are usable.
  """
  return prepare_rows(DataOptions.from_config(config, "train"), tokenizer)


def prepare_eval_rows(config: Any, tokenizer: ConversationTokenizer | None) -> PreparedRows | None:
  """Reads the evaluation data, once through and in order; None where none are configured.

  Arguments and errors are those of `prepare_train_rows`.
  """
  options = DataOptions.from_config(config, "eval")
  if options.dataset_type == "synthetic" or not options.configured:
    return None
  return prepare_rows(options, tokenizer)


def prepare_rows(options: DataOptions, tokenizer: ConversationTokenizer | None) -> PreparedRows:
  """Reads, tokenises and packs what `options` name.

  Arguments and errors are those of `prepare_train_rows`.
  """
  source: RowSource
  samples: Sequence[Sample] = ()
  if options.dataset_type == "synthetic":
    source = SyntheticRows(SYNTHETIC_ROWS, options.max_target_length, options.vocab_size, options.seed)
    tokens = SYNTHETIC_ROWS * options.max_target_length
    report = DataReport(
      "synthetic",
      SYNTHETIC_ROWS,
      SYNTHETIC_ROWS,
      tokens=tokens,
      trained_tokens=tokens,
      rows=SYNTHETIC_ROWS,
      sequence_length=options.max_target_length,
    )
  else:
    if tokenizer is None:
      raise ValueError(f"dataset_type={options.dataset_type!r} needs a tokenizer")
    source, report, samples = _example_rows(options, tokenizer)
  return PreparedRows(
    source,
    report,
    num_epoch=None if options.dataset_type == "synthetic" else options.num_epoch,
    shuffle_seed=options.seed if options.shuffle else None,
    samples=samples,
    identity={
      "tokenizer": None if tokenizer is None else tokenizer.fingerprint,
      "max_target_length": options.max_target_length,
      "packing": options.packing,
      "sft_train_on_completion_only": options.completion_only,
    },
  )


def _check_pad_id(options: DataOptions, tokenizer: ConversationTokenizer) -> None:
  if not 0 <= tokenizer.pad_id < options.vocab_size:
    raise DataError(
      f"the tokenizer's pad id {tokenizer.pad_id} does not exist in a model with vocab_size={options.vocab_size}"
    )


def _example_rows(
  options: DataOptions, tokenizer: ConversationTokenizer
) -> tuple[RowSource, DataReport, Sequence[Sample]]:
  _check_pad_id(options, tokenizer)
  examples, report = load_examples(options, tokenizer)
  positions = examples.lengths - 1
  if options.packing:
    packed = pack(positions, options.max_target_length, options.max_segments)
  else:
    packed = one_per_row(len(examples))
  report.rows = len(packed)
  report.padding_share = 1 - int(positions.sum()) / (len(packed) * options.max_target_length)
  rows = ExampleRows(examples, packed, options.max_target_length, tokenizer.pad_id)
  return rows, report, render_samples(examples, tokenizer, _SAMPLES)


class RowDataset:
  """Sequences ready to train on, and the order in which they come.

  The order of rows is the same for any number of processes: each assembles, of the same batches, the rows that its
  devices hold. Without `num_epoch` rows repeat without end, and a batch may hold the end of one epoch and the start of
  the next. With it the last batch is filled with padding rows.

  Attributes:
    report: what became of the rows read.
    samples: the first few examples as text.
    source: the rows.
    rows: sequences of one epoch, over all processes.
    batches_per_epoch: batches that hold one epoch.
    total_batches: batches in all, or None without end.
  """

  def __init__(
    self,
    source: RowSource,
    report: DataReport,
    *,
    batch_size: int,
    mine: Sequence[int] | None = None,
    num_epoch: int | None = None,
    shuffle_seed: int | None = None,
    samples: Sequence[Sample] = (),
    identity: dict[str, Any] | None = None,
  ):
    """Takes the rows, their report, and how to batch, share, repeat and shuffle them.

    Args:
      source: the rows.
      report: what became of the rows read.
      batch_size: sequences of a batch, over all processes.
      mine: places in a batch whose rows this process assembles, in this order; None is all of them.
      num_epoch: passes over the rows, or None to repeat without end.
      shuffle_seed: None keeps their order.
      samples: the first few examples as text.
      identity: what else must be the same when a saved position is restored.
    """
    if batch_size < 1 or (mine is not None and not all(0 <= place < batch_size for place in mine)):
      raise ValueError(f"batch_size={batch_size}, mine={mine}")
    if not len(source):
      raise DataError(f"{report.source} holds no rows")
    self.report = report
    self.samples = samples
    self.rows = len(source)
    self.batches_per_epoch = math.ceil(self.rows / batch_size)
    self.total_batches = None if num_epoch is None else math.ceil(self.rows * num_epoch / batch_size)
    self.source = source
    self._batch_size = batch_size
    self._mine = mine
    self._num_epoch = num_epoch
    self._shuffle_seed = shuffle_seed
    self._identity = {
      **(identity or {}),
      "data_shuffle_seed": shuffle_seed,
      "global batch size": batch_size,
      "data": source.fingerprint(),
    }

  def iterator(self) -> BatchIterator:
    """A new iterator at the first batch."""
    import grain

    order = grain.MapDataset.range(self.rows)
    if self._shuffle_seed is not None:
      order = order.seed(self._shuffle_seed).shuffle()
    order = order.repeat(self._num_epoch or _ENDLESS_ROWS // self.rows)
    if self.total_batches is not None:
      padding = self.total_batches * self._batch_size - len(order)
      if padding:
        order = grain.MapDataset.concatenate([order, grain.MapDataset.source([PADDING_ROW] * padding)])
    batches = order.batch(self._batch_size, batch_fn=self._assemble)
    read_options = grain.ReadOptions(num_threads=_PREFETCH_THREADS, prefetch_buffer_size=_PREFETCHED_BATCHES)
    return BatchIterator(
      iter(batches.to_iter_dataset(read_options)),
      self._identity,
      total_batches=self.total_batches,
      total_rows=None if self._num_epoch is None else self.rows * self._num_epoch,
    )

  def _assemble(self, rows: Sequence[int]) -> Batch:
    """Of the rows of a batch, those of this process."""
    return self.source.assemble(rows if self._mine is None else [rows[place] for place in self._mine])


class BatchIterator(Iterator[Batch]):
  """Batches in order, with a position that can be saved and restored.

  Attributes:
    total_batches: batches from the first to the last, or None without end.
  """

  def __init__(
    self, batches: Any, identity: dict[str, Any], *, total_batches: int | None = None, total_rows: int | None = None
  ):
    """Takes Grain's iterator over batches, and what must be the same when its position is restored."""
    self.total_batches = total_batches
    self._batches = batches
    self._identity = identity
    self._total_rows = total_rows
    self._closed = False

  def __next__(self) -> Batch:
    if self._closed:
      raise StopIteration
    return next(self._batches)

  @property
  def position(self) -> int:
    """Batches yielded since the first."""
    return self._batches.get_state()["next_index"]

  def metrics(self) -> dict[str, float]:
    """None: rows of data have nothing to say of themselves."""
    return {}

  def get_state(self) -> dict[str, Any]:
    """The position after the batches that were yielded, as values that JSON holds; prefetched ones do not count."""
    return {
      "version": _STATE_VERSION,
      "position": self.position,
      "total_rows": self._total_rows,
      "identity": dict(self._identity),
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes to a saved position, at the same cost wherever it is.

    The number of processes may differ from that of the run that saved it, and so may `num_epoch`.

    Raises:
      DataError: when the state is none, or was saved with other data, another tokenizer or other options.
    """
    position = state.get("position")
    saved = state.get("identity")
    if state.get("version") != _STATE_VERSION or not isinstance(position, int) or not isinstance(saved, dict):
      raise DataError("the saved data position was not written by this version: its content is not known here")
    changed = [
      f"{key} was {saved.get(key)}, is {self._identity.get(key)}"
      for key in dict.fromkeys((*saved, *self._identity))
      if saved.get(key) != self._identity.get(key)
    ]
    if changed:
      raise DataError(
        f"the saved data position (batch {position}) belongs to other data or options: {'; '.join(changed)};"
        " restore them, or start a new run from the weights with load_parameters_path"
      )
    self._warn_of_skipped_rows(position, state.get("total_rows"))
    if self.total_batches is not None:
      position = min(position, self.total_batches)
    self._batches.set_state({"next_index": position})

  def _warn_of_skipped_rows(self, position: int, saved_total_rows: int | None) -> None:
    """A last batch was filled with padding; where epochs are added later, rows of the next one stand there."""
    if saved_total_rows is None or saved_total_rows == self._total_rows:
      return
    skipped = position * self._identity["global batch size"] - saved_total_rows
    if skipped > 0:
      _logger.warning(
        "num_epoch has changed after its last batch: the first %d rows of the next epoch are left out", skipped
      )

  def close(self) -> None:
    """Ends prefetching; the iterator yields nothing more."""
    self._closed = True
    self._batches.close()
