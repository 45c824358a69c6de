"""Rows tokenised once, each token with whether it is trained, kept flat and small."""

from __future__ import annotations

import array
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from maxtext_posttrain.data.conversations import Conversation, UnusableRow, to_conversation
from maxtext_posttrain.data.options import DataOptions
from maxtext_posttrain.data.records import Row, describe_source, read_rows
from maxtext_posttrain.data.report import DataReport
from maxtext_posttrain.errors import ChatTemplateError, DataError

TEMPLATE_REFUSED = "refused by the chat template"
NOT_UNICODE = "text is not valid Unicode"
NOTHING_TRAINED = "no trained token"
TOO_LONG = "no trained token within max_target_length"

_PROGRESS_SECONDS = 15.0

_logger = logging.getLogger(__name__)


class Rendered(Protocol):
  """A conversation as token ids, and which of them the assistant said."""

  @property
  def input_ids(self) -> list[int]:
    """The ids of the rendered conversation."""
    ...

  @property
  def assistant_mask(self) -> list[bool]:
    """For each id, whether it belongs to an assistant's turn or ends one."""
    ...


class ConversationTokenizer(Protocol):
  """What the data need of a tokenizer."""

  @property
  def pad_id(self) -> int:
    """The id that fills the rest of a sequence."""
    ...

  @property
  def fingerprint(self) -> str:
    """Differs between tokenizers, or templates, that give different ids."""
    ...

  def render_conversation(
    self, messages: list[dict[str, Any]], tools: list[Any] | None = None, documents: list[Any] | None = None
  ) -> Rendered:
    """Renders and tokenises one conversation; raises ChatTemplateError where the template refuses it."""
    ...

  def decode(self, ids: Iterable[int]) -> str:
    """The text of ids, special tokens spelled out."""
    ...


class Example(NamedTuple):
  """One example: `tokens` int32 [n], and `trained` bool [n], whether each token counts in the loss as a target."""

  tokens: npt.NDArray[np.int32]
  trained: npt.NDArray[np.bool_]


class Examples:
  """Tokenised examples in file order: one flat array of ids, offsets, and one bit a token for the loss."""

  def __init__(self, tokens: npt.NDArray[np.int32], trained: npt.NDArray[np.bool_], offsets: npt.NDArray[np.int64]):
    """Takes ids [total], marks [total] and where each example starts [count + 1]."""
    self._tokens = tokens
    self._offsets = offsets
    self._trained_bits = np.packbits(trained)

  def __len__(self) -> int:
    return len(self._offsets) - 1

  def __getitem__(self, index: int) -> Example:
    start, end = int(self._offsets[index]), int(self._offsets[index + 1])
    first_byte = start // 8
    bits = np.unpackbits(self._trained_bits[first_byte : -(-end // 8)])
    return Example(self._tokens[start:end], bits[start - 8 * first_byte : end - 8 * first_byte].astype(np.bool_))

  @property
  def lengths(self) -> npt.NDArray[np.int64]:
    """int64 [count], tokens of each example."""
    return np.diff(self._offsets)

  def fingerprint(self) -> str:
    """A digest of all ids, marks and boundaries."""
    digest = hashlib.blake2b(digest_size=16)
    for values in (self._offsets, self._tokens, self._trained_bits):
      digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


def load_examples(options: DataOptions, tokenizer: ConversationTokenizer) -> tuple[Examples, DataReport]:
  """Reads and tokenises the configured data set.

  Raises:
    DataError: when it can't be read, holds nothing usable, or holds more unusable rows than allowed.
  """
  started = time.perf_counter()
  examples, report = tokenize_rows(read_rows(options), options, tokenizer)
  report.seconds = time.perf_counter() - started
  return examples, report


def tokenize_rows(
  rows: Iterable[Row], options: DataOptions, tokenizer: ConversationTokenizer
) -> tuple[Examples, DataReport]:
  """Tokenises rows in order; those that can't be used are counted in the report and left out.

  An example is cut to its first `max_target_length` tokens and kept where a trained token is among them. The first
  token is never trained, since nothing predicts it.

  Raises:
    DataError: when there are no rows, none is usable, more are unusable than `max_bad_rows` allows, or a token id
      lies outside the model's vocabulary.
  """
  report = DataReport(describe_source(options), sequence_length=options.max_target_length)
  tokens = array.array("i")
  trained = bytearray()
  ends = array.array("q", [0])
  for ids, mask in usable_rows(rows, report, lambda row: _tokenize_row(row, options, tokenizer)):
    report.truncated += len(ids) > options.max_target_length
    kept = ids[: options.max_target_length]
    tokens.extend(kept)
    trained.extend(mask[: len(kept)])
    ends.append(len(tokens))
  check_bad_rows(report, options)
  marks = np.frombuffer(trained, np.bool_)
  report.examples = len(ends) - 1
  report.tokens = len(tokens)
  report.trained_tokens = int(np.count_nonzero(marks))
  return Examples(np.frombuffer(tokens, np.int32), marks, np.frombuffer(ends, np.int64)), report


def usable_rows[T](rows: Iterable[Row], report: DataReport, tokenize: Callable[[Row], T]) -> Iterator[T]:
  """What `tokenize` makes of each row; rows that it, or the reader, refuses are counted in the report and left out."""
  logged = time.monotonic()
  for row in rows:
    report.rows_read += 1
    if time.monotonic() - logged > _PROGRESS_SECONDS:
      logged = time.monotonic()
      _logger.info("%s: %d rows tokenised", report.source, report.rows_read)
    try:
      if row.reason is not None:
        raise UnusableRow(row.reason, row.detail)
      tokenized = tokenize(row)
    except UnusableRow as unusable:
      report.add_bad_row(row.location, unusable.reason, unusable.detail)
    else:
      yield tokenized


@contextlib.contextmanager
def naming_refusals(conversation: Conversation) -> Iterator[None]:
  """Makes an unusable row of a template's refusal, or of text that is not Unicode."""
  try:
    yield
  except ChatTemplateError as error:
    detail = str(error) if conversation.roles in str(error) else f"{error} (roles: {conversation.roles})"
    raise UnusableRow(TEMPLATE_REFUSED, detail) from error
  except UnicodeError as error:
    raise UnusableRow(NOT_UNICODE, str(error)) from error


def check_vocabulary(ids: Sequence[int], row: Row, options: DataOptions) -> None:
  """Refuses ids that the model's embedding table lacks.

  Raises:
    DataError: there is one; the tokenizer is not the model's.
  """
  if ids and not 0 <= min(ids) <= max(ids) < options.vocab_size:
    outside = next(token for token in ids if not 0 <= token < options.vocab_size)
    raise DataError(
      f"{row.location}: token id {outside} does not exist in a model with vocab_size={options.vocab_size};"
      " set tokenizer_path to the model's own tokenizer, or vocab_size to the tokenizer's"
    )


def _tokenize_row(row: Row, options: DataOptions, tokenizer: ConversationTokenizer) -> tuple[list[int], list[bool]]:
  conversation = to_conversation(row.value, options.columns, needs_assistant=options.completion_only)
  with naming_refusals(conversation):
    rendered = tokenizer.render_conversation(conversation.messages, conversation.tools, conversation.documents)
  ids = rendered.input_ids
  check_vocabulary(ids, row, options)
  mask = [False, *(rendered.assistant_mask[1:] if options.completion_only else [True] * (len(ids) - 1))]
  if True not in mask:
    raise UnusableRow(NOTHING_TRAINED, f"{len(ids)} tokens")
  first = mask.index(True)
  if first >= options.max_target_length:
    raise UnusableRow(
      TOO_LONG, f"the first is number {first + 1} of {len(ids)}, max_target_length={options.max_target_length}"
    )
  return ids, mask


def check_bad_rows(report: DataReport, options: DataOptions, *, tolerated: Sequence[str] = ()) -> None:
  """Refuses a data set that has too little in it.

  Args:
    report: with the counts of all rows read.
    options: how many rows may be unusable.
    tolerated: reasons that don't count against that number, since they are a filter's.

  Raises:
    DataError: there are no rows, none is usable, or more are unusable than `max_bad_rows` allows.
  """
  bad = report.bad_row_count
  if report.rows_read == 0:
    raise DataError(f"{report.source} holds no rows")
  first = "; ".join(report.first_bad_rows())
  if bad == report.rows_read:
    raise DataError(f"{report.source}: none of {bad:,} rows can be used ({report.bad_row_summary()}): {first}")
  counted = bad - sum(report.bad_rows[reason].count for reason in tolerated if reason in report.bad_rows)
  allowed = options.max_bad_rows if options.max_bad_rows >= 1 else options.max_bad_rows * report.rows_read
  if counted > allowed:
    raise DataError(
      f"{report.source}: {counted:,} of {report.rows_read:,} rows cannot be used ({report.bad_row_summary()}), more"
      f" than max_bad_rows={options.max_bad_rows:g} allows: {first}; mend or remove them, or raise max_bad_rows"
    )
