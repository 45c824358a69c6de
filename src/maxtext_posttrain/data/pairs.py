"""Preference pairs tokenised once, and rows of them as the arrays that one forward over both halves takes."""

from __future__ import annotations

import array
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from maxtext_posttrain.data.batches import (
  BATCH_KEYS,
  PADDING_ROW,
  Batch,
  PackedExamples,
  empty_batch,
  fill_example,
)
from maxtext_posttrain.data.conversations import Conversation, UnusableRow
from maxtext_posttrain.data.examples import (
  NOTHING_TRAINED,
  ConversationTokenizer,
  Examples,
  check_bad_rows,
  check_vocabulary,
  naming_refusals,
  usable_rows,
)
from maxtext_posttrain.data.options import DataOptions
from maxtext_posttrain.data.preferences import EQUAL, to_preference
from maxtext_posttrain.data.records import Row, describe_source, read_rows
from maxtext_posttrain.data.report import DataReport

CHOSEN, REJECTED = 0, 1
HALVES = 2

DEFAULT_PAIRS_PER_ROW = 64
"""Most pairs packed into one row where `max_segments_per_seq` does not say: sums of pairs are arrays of this width."""


class PromptTokenizer(ConversationTokenizer, Protocol):
  """What pairs need of a tokenizer beside what chats do."""

  def apply_chat_template(
    self,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: list[Any] | None,
    documents: list[Any] | None,
  ) -> list[int]:
    """The ids of a prompt as it is before the assistant's answer."""
    ...


class TokenPair(NamedTuple):
  """A prompt's ids and, for each completion, its ids and which of them are the assistant's."""

  prompt: list[int]
  chosen: tuple[list[int], list[bool]]
  rejected: tuple[list[int], list[bool]]


def pairs_per_row(config: Any) -> int:
  """Most pairs that share a row: 1 without `packing`, else `max_segments_per_seq`, else DEFAULT_PAIRS_PER_ROW."""
  if not config.packing:
    return 1
  limit = int(config.max_segments_per_seq or -1)
  return limit if limit > 0 else DEFAULT_PAIRS_PER_ROW


def load_pairs(
  options: DataOptions, tokenizer: PromptTokenizer, max_prompt_length: int | None
) -> tuple[Examples, DataReport]:
  """Reads and tokenises the configured preference data.

  Returns:
    Examples 2 i and 2 i + 1 are the chosen and the rejected sequence of pair i; and the report.

  Raises:
    DataError: when it can't be read, holds nothing usable, or holds more unusable rows than allowed.
  """
  started = time.perf_counter()
  examples, report = tokenize_pairs(read_rows(options), options, tokenizer, max_prompt_length)
  report.seconds = time.perf_counter() - started
  return examples, report


def tokenize_pairs(
  rows: Iterable[Row], options: DataOptions, tokenizer: PromptTokenizer, max_prompt_length: int | None
) -> tuple[Examples, DataReport]:
  """Tokenises rows in order; see `load_pairs` and `truncate_pair`."""
  report = DataReport(describe_source(options), sequence_length=options.max_target_length)
  tokens = array.array("i")
  trained = bytearray()
  ends = array.array("q", [0])

  def tokenize(row: Row) -> tuple[TokenPair, bool]:
    whole = tokenize_pair(row, options, tokenizer)
    kept = truncate_pair(whole, options.max_target_length, max_prompt_length)
    for ids, mask in (kept.chosen, kept.rejected):
      if True not in mask:
        raise UnusableRow(NOTHING_TRAINED, f"{len(kept.prompt)} tokens of the prompt, {len(ids)} of a completion")
    if kept.chosen[0] == kept.rejected[0]:
      raise UnusableRow(EQUAL, "" if kept is whole else f"within max_target_length={options.max_target_length}")
    return kept, kept is not whole

  for pair, truncated in usable_rows(rows, report, tokenize):
    report.truncated += truncated
    for ids, mask in (pair.chosen, pair.rejected):
      tokens.extend(pair.prompt)
      tokens.extend(ids)
      trained.extend([False] * len(pair.prompt))
      trained.extend(mask)
      ends.append(len(tokens))
  check_bad_rows(report, options)
  marks = np.frombuffer(trained, np.bool_)
  report.examples = (len(ends) - 1) // HALVES
  report.tokens = len(tokens)
  report.trained_tokens = int(np.count_nonzero(marks))
  return Examples(np.frombuffer(tokens, np.int32), marks, np.frombuffer(ends, np.int64)), report


def tokenize_pair(row: Row, options: DataOptions, tokenizer: PromptTokenizer) -> TokenPair:
  """Renders a row's prompt, and each completion behind it, with the chat template.

  The prompt's tokens are those that the prompt, rendered as a request for an answer, and both conversations begin with.
  What follows is a completion, to the token that ends its last turn; of it the assistant's tokens are trained.

  Raises:
    UnusableRow: there is no such pair in the row.
    DataError: an id lies outside the model's vocabulary.
  """
  preference = to_preference(row.value, options.columns)
  tools, documents = preference.tools, preference.documents
  prompt = Conversation(preference.prompt, tools, documents)
  with naming_refusals(prompt):
    prompt_ids = tokenizer.apply_chat_template(
      prompt.messages, add_generation_prompt=True, tools=tools, documents=documents
    )
  rendered = []
  for completion in (preference.chosen, preference.rejected):
    conversation = Conversation([*prompt.messages, *completion], tools, documents)
    with naming_refusals(conversation):
      each = tokenizer.render_conversation(conversation.messages, tools, documents)
    check_vocabulary(each.input_ids, row, options)
    rendered.append(each)
  shared = min(_shared_length(prompt_ids, each.input_ids) for each in rendered)
  # The first token is predicted by none, so it can't be trained.
  shared = max(shared, 1)
  chosen, rejected = (_up_to_last_trained(each.input_ids[shared:], each.assistant_mask[shared:]) for each in rendered)
  return TokenPair(rendered[CHOSEN].input_ids[:shared], chosen, rejected)


def truncate_pair(pair: TokenPair, max_length: int, max_prompt_length: int | None) -> TokenPair:
  """A pair whose sequences have at most `max_length` tokens; the pair itself where nothing had to be cut.

  The prompt gives way first, from its left: to its last `max_prompt_length` tokens, where that is set, then to what
  the longer completion leaves. Only a completion that does not fit behind one token of the prompt is cut, from its
  right, and then to what `max_prompt_length` tokens of the prompt leave, half of `max_length` where that is not set.
  """
  prompt, chosen, rejected = pair
  longest = max(len(chosen[0]), len(rejected[0]))
  if longest < max_length:
    room = max_length - longest
  else:
    room = min(max_prompt_length or max(max_length // 2, 1), max_length - 1)
  kept = min(len(prompt), room, max_prompt_length or len(prompt))
  if kept == len(prompt) and kept + longest <= max_length:
    return pair
  left = max_length - kept
  return TokenPair(
    prompt[len(prompt) - kept :], (chosen[0][:left], chosen[1][:left]), (rejected[0][:left], rejected[1][:left])
  )


def _shared_length(left: Sequence[int], right: Sequence[int]) -> int:
  """Tokens that both begin with."""
  return next(
    (index for index, (one, other) in enumerate(zip(left, right, strict=False)) if one != other),
    min(len(left), len(right)),
  )


def _up_to_last_trained(ids: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
  """A completion without what the template puts behind its last trained token: nothing there counts."""
  end = len(mask) - mask[::-1].index(True) if True in mask else 0
  return ids[:end], mask[:end]


class PairRows(PackedExamples):
  """Pairs in packed (or single) rows, each array int32 [rows, 2, length]: index 0 is chosen, 1 rejected.

  Its examples are as `load_pairs` gives them, its rows of pairs.

  A pair takes as many positions as its longer half. Its halves begin at the same position and have the same number,
  from 1 on, in `inputs_segmentation`; otherwise each half is laid out as `ExampleRows` lays out a row.
  """

  layout = "pairs "

  def assemble(self, rows: Sequence[int]) -> Batch:
    """The sequences of `rows`, int32 [len(rows), 2, length] under each of BATCH_KEYS."""
    flat = empty_batch(len(rows) * HALVES, self._length, self._pad_id)
    for place, row in enumerate(rows):
      if row == PADDING_ROW:
        continue
      start = 0
      for segment, pair in enumerate(self._packed[row].tolist(), start=1):
        halves = [self._examples[HALVES * pair + half] for half in (CHOSEN, REJECTED)]
        for half, example in enumerate(halves):
          fill_example(flat, HALVES * place + half, start, segment, example)
        start += max(len(example.tokens) for example in halves) - 1
    return {key: flat[key].reshape(len(rows), HALVES, self._length) for key in BATCH_KEYS}


def pair_positions(examples: Examples) -> npt.NDArray[np.int64]:
  """int64 [pairs], positions each pair takes: one fewer than the tokens of its longer half."""
  return examples.lengths.reshape(-1, HALVES).max(axis=1) - 1
