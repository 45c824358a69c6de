"""Rows of prompts with answers, for trainers that let the model write the completions."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from maxtext_posttrain.data.batches import Batch
from maxtext_posttrain.data.conversations import Conversation, UnusableRow, to_conversation
from maxtext_posttrain.data.examples import NOT_UNICODE, TEMPLATE_REFUSED, check_bad_rows
from maxtext_posttrain.data.options import DataOptions, Split
from maxtext_posttrain.data.pipeline import BatchIterator, PreparedData, PreparedRows, RowDataset
from maxtext_posttrain.data.records import Row, describe_source, read_rows
from maxtext_posttrain.data.report import DataReport
from maxtext_posttrain.errors import ChatTemplateError, ConfigError, DataError
from maxtext_posttrain.tokenizers import Tokenizer, configured_tokenizer

PROMPT_TOO_LONG = "prompt too long"
NO_PROMPT = "nothing is said before the answer"


class PromptTokenizer(Protocol):
  """What prompts need of a tokenizer."""

  def apply_chat_template(
    self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, tools: Any, documents: Any
  ) -> Any:
    """The ids of a conversation up to where the assistant answers."""
    ...


class PromptRows:
  """Prompts by number, as a source of rows.

  Attributes:
    tokens: of each prompt, up to where the assistant answers.
    texts: what each prompt asks: its last message before the answer.
    answers: the rows' own answers.
  """

  def __init__(self, tokens: Sequence[Sequence[int]], texts: Sequence[str], answers: Sequence[str]):
    """Takes the three, of one length each."""
    self.tokens = [list(prompt) for prompt in tokens]
    self.texts = list(texts)
    self.answers = list(answers)

  def __len__(self) -> int:
    return len(self.tokens)

  def assemble(self, rows: Sequence[int]) -> Batch:
    """The numbers themselves, int32 [len(rows)] under `row`: the prompts stay here."""
    return {"row": np.asarray(rows, np.int32)}

  def fingerprint(self) -> str:
    """A digest of all prompts and answers."""
    digest = hashlib.blake2b(digest_size=16)
    for row in zip(self.tokens, self.texts, self.answers, strict=True):
      digest.update(json.dumps(row).encode() + b"\n")
    return digest.hexdigest()


def load_prompts(
  options: DataOptions, tokenizer: PromptTokenizer, *, longest: int, system_prompt: str = ""
) -> tuple[PromptRows, DataReport]:
  """Reads prompts and answers; rows that can't be used are counted and left out.

  A row has two columns, the prompt (text or messages) and the answer (text or a number), or one of messages whose last
  assistant turn is the answer.

  Args:
    options: the data and its columns.
    tokenizer: with the chat template.
    longest: most tokens of a prompt.
    system_prompt: goes before conversations that have no system message.

  Raises:
    DataError: the data can't be read, holds nothing usable, or holds more unusable rows than `max_bad_rows` allows;
      prompts that are too long are left out whatever their number.
  """
  started = time.perf_counter()
  report = PromptReport(describe_source(options), sequence_length=options.max_target_length)
  tokens: list[list[int]] = []
  texts: list[str] = []
  answers: list[str] = []
  for row in read_rows(options):
    report.rows_read += 1
    try:
      ids, text, answer = _prompt(row, options, tokenizer, system_prompt)
      if len(ids) > longest:
        raise UnusableRow(PROMPT_TOO_LONG, f"{len(ids)} tokens, max_prefill_predict_length={longest}")
    except UnusableRow as unusable:
      report.add_bad_row(row.location, unusable.reason, unusable.detail)
      continue
    tokens.append(ids)
    texts.append(text)
    answers.append(answer)
  check_bad_rows(report, options, tolerated=(PROMPT_TOO_LONG,))
  report.examples = report.rows = len(tokens)
  report.tokens = sum(map(len, tokens))
  report.seconds = time.perf_counter() - started
  return PromptRows(tokens, texts, answers), report


def _prompt(
  row: Row, options: DataOptions, tokenizer: PromptTokenizer, system_prompt: str
) -> tuple[list[int], str, str]:
  """A row's prompt as ids, what it asks, and its answer."""
  if row.reason is None:
    row = row._replace(value=_with_text_answer(row.value, options.columns))
  conversation, text, answer = split_at_answer(row, options.columns)
  if system_prompt and conversation.messages[0]["role"] != "system":
    messages = [{"role": "system", "content": system_prompt}, *conversation.messages]
    conversation = conversation._replace(messages=messages)
  ids = [int(token) for token in prompt_ids(conversation, tokenizer)]
  outside = [token for token in ids if not 0 <= token < options.vocab_size]
  if outside:
    raise DataError(
      f"{row.location}: token id {outside[0]} does not exist in a model with vocab_size={options.vocab_size};"
      " set tokenizer_path to the model's own tokenizer, or vocab_size to the tokenizer's"
    )
  if not ids:
    raise UnusableRow(NO_PROMPT, "the chat template makes no token of it")
  return ids, text, answer


def _with_text_answer(row: Any, columns: Sequence[str]) -> Any:
  """The row with a number in one of two columns as text, which is how answers often stand in data."""
  if not isinstance(row, Mapping) or len(columns) != 2:
    return row
  numbers = {
    column: json.dumps(row[column])
    for column in columns
    if isinstance(row.get(column), int | float) and not isinstance(row[column], bool)
  }
  return {**row, **numbers} if numbers else row


def split_at_answer(row: Row, columns: Sequence[str]) -> tuple[Conversation, str, str]:
  """The conversation before its last assistant turn, that part's last turn, and the assistant's.

  Raises:
    UnusableRow: the row has no such conversation, or nothing stands before the answer.
  """
  if row.reason is not None:
    raise UnusableRow(row.reason, row.detail)
  conversation = to_conversation(row.value, columns)
  messages = conversation.messages
  last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
  if not last:
    raise UnusableRow(NO_PROMPT)
  return conversation._replace(messages=messages[:last]), _text(messages[last - 1]), _text(messages[last])


def prompt_ids(conversation: Conversation, tokenizer: PromptTokenizer) -> list[int]:
  """A conversation's ids, up to where the assistant answers.

  Raises:
    UnusableRow: the chat template refuses it, or it is no Unicode.
  """
  try:
    return tokenizer.apply_chat_template(
      conversation.messages, add_generation_prompt=True, tools=conversation.tools, documents=conversation.documents
    )
  except ChatTemplateError as error:
    raise UnusableRow(TEMPLATE_REFUSED, str(error)) from error
  except UnicodeError as error:
    raise UnusableRow(NOT_UNICODE, str(error)) from error


def _text(message: Mapping[str, Any]) -> str:
  content = message.get("content")
  if isinstance(content, list):
    parts = [part.get("text") for part in content if isinstance(part, Mapping)]
    return "\n".join(part for part in parts if isinstance(part, str))
  return content or ""


@dataclasses.dataclass(frozen=True)
class RolloutShape:
  """How many of everything.

  Attributes:
    prompts: of one rollout.
    generations: completions of a prompt.
    updates: optimizer updates that all its sequences make once.
    iterations: times that these updates are made.
    accumulation: micro-batches of an update.
    micro_batch: sequences of a micro-batch.
    length: positions of a sequence.
  """

  prompts: int
  generations: int
  updates: int
  iterations: int
  accumulation: int
  micro_batch: int
  length: int

  @property
  def micro_batches(self) -> int:
    """Micro-batches that one rollout is trained on for."""
    return self.updates * self.iterations * self.accumulation


class PromptReport(DataReport):
  """What became of rows that are prompts: nothing of them is trained, and none is padded."""

  def lines(self) -> list[str]:
    """The counts as a few lines of text."""
    first, second, *rest = super().lines()
    del second
    return [first, f"{self.tokens:,} tokens in {self.rows:,} prompts", *rest]


class PromptDataset:
  """Prompts in batches of a rollout, counted in the micro-batches that are trained on.

  Attributes:
    report: what became of the rows read.
    samples: none; what is trained on is not written yet.
    rows: prompts of one epoch.
    source: the prompts.
    shape: the sizes of a rollout.
    mine: places in a micro-batch whose rows this process trains on; None is all of them.
    batches_per_epoch: micro-batches that one epoch makes.
    total_batches: micro-batches in all, or None without end.
  """

  def __init__(self, prompts: RowDataset, source: PromptRows, shape: RolloutShape, mine: Sequence[int] | None = None):
    """Takes the data set whose batches are those of a rollout, its rows, the sizes, and this process's share."""
    self.report = prompts.report
    self.samples = prompts.samples
    self.rows = prompts.rows
    self.source = source
    self.shape = shape
    self.mine = mine
    self.batches_per_epoch = prompts.batches_per_epoch * shape.micro_batches
    self.total_batches = None if prompts.total_batches is None else prompts.total_batches * shape.micro_batches
    self._prompts = prompts

  def iterator(self) -> BatchIterator:
    """A new iterator over batches of prompts, at the first."""
    return self._prompts.iterator()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedPrompts(PreparedRows):
  """Prompts read and tokenised, before it is known how many sequences an update takes.

  Attributes:
    source: the prompts.
    prompts: of one rollout; None is what one update takes.
    generations: completions of a prompt.
    iterations: times that a rollout is trained on.
    accumulation: micro-batches of an update.
    length: positions of a sequence.
  """

  source: PromptRows
  prompts: int | None
  generations: int
  iterations: int
  accumulation: int
  length: int

  def dataset(  # pyright: ignore[reportIncompatibleMethodOverride]
    self, *, batch_size: int, mine: Sequence[int] | None = None
  ) -> PromptDataset:
    """The data set for micro-batches of `batch_size` sequences.

    Every process gets all prompts: all of them write each completion together, on all devices.

    Raises:
      ConfigError: completions, prompts and updates do not come out even.
    """
    sequences = batch_size * self.accumulation
    wanted = f"{sequences} sequences of an update (per_device_batch_size, gradient_accumulation_steps)"
    if self.prompts is None and sequences % self.generations:
      raise ConfigError(
        f"rl.num_generations={self.generations}: the {wanted} are not whole groups; make them a multiple, or say how"
        " many prompts a rollout has with batch_size"
      )
    prompts = self.prompts or sequences // self.generations
    updates, rest = divmod(prompts * self.generations, sequences)
    if rest or not updates:
      raise ConfigError(
        f"batch_size={prompts}: {prompts} prompts with rl.num_generations={self.generations} completions each are"
        f" {prompts * self.generations} sequences, which is no multiple of the {wanted}"
      )
    shape = RolloutShape(
      prompts, self.generations, updates, self.iterations, self.accumulation, batch_size, self.length
    )
    rows = super().dataset(batch_size=prompts)
    return PromptDataset(rows, self.source, shape, mine)


def prepare_prompts(config: Any) -> PreparedData:
  """Loads the tokenizer and prepares both sets of prompts of a run. Imports neither JAX nor MaxText.

  Evaluation takes each prompt once, with one completion.

  Args:
    config: MaxText's key names as attributes.

  Raises:
    ConfigError: for options that no data set can be built with.
    TokenizerError: the tokenizer can't be loaded.
    DataError: the data can't be read, or too few rows are usable.
  """
  tokenizer = prompt_tokenizer(config)
  train = _prepare(config, "train", tokenizer)
  evaluation = _prepare(config, "eval", tokenizer) if DataOptions.from_config(config, "eval").configured else None
  return PreparedData(train, evaluation)


def prompt_tokenizer(config: Any) -> Tokenizer:
  """The run's tokenizer.

  Raises:
    ConfigError: the data are made up, and have none.
    TokenizerError: it can't be loaded.
  """
  tokenizer = configured_tokenizer(config)
  if tokenizer is None:
    raise ConfigError(f"dataset_type={config.dataset_type}: prompts can't be made up; use hf or grain")
  return tokenizer


def _prepare(config: Any, split: Split, tokenizer: Tokenizer) -> PreparedPrompts:
  options = DataOptions.from_config(config, split)
  training = split == "train"
  longest = int(config.max_prefill_predict_length)
  source, report = load_prompts(options, tokenizer, longest=longest, system_prompt=config.rl.system_prompt)
  return PreparedPrompts(
    source=source,
    report=report,
    num_epoch=options.num_epoch,
    shuffle_seed=options.seed if options.shuffle else None,
    identity={"tokenizer": tokenizer.fingerprint, "max_prefill_predict_length": longest},
    prompts=config.batch_size if training else None,
    generations=config.rl.num_generations if training else 1,
    iterations=config.rl.num_iterations if training else 1,
    accumulation=config.gradient_accumulation_steps if training else 1,
    length=options.max_target_length,
  )
