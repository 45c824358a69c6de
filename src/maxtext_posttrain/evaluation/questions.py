"""Rows of mathematics as questions: what a model is asked, and the number its answer has to end with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from maxtext_posttrain.data.conversations import Conversation, UnusableRow, to_conversation
from maxtext_posttrain.data.examples import NOT_UNICODE, TEMPLATE_REFUSED
from maxtext_posttrain.data.options import DataOptions
from maxtext_posttrain.data.records import Row, read_rows
from maxtext_posttrain.data.report import BadRows
from maxtext_posttrain.errors import ChatTemplateError
from maxtext_posttrain.evaluation.answers import Answer, find_answer

NO_QUESTION = "nothing is said before the answer"
NO_NUMBER = "the reference ends with no number"
NOT_MARKED = "the reference marks no final number"
PROMPT_TOO_LONG = "prompt too long"


class PromptTokenizer(Protocol):
  """What questions need of a tokenizer."""

  def apply_chat_template(
    self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, tools: Any, documents: Any
  ) -> Any:
    """The ids of a conversation up to where the assistant answers."""
    ...


@dataclass(frozen=True)
class Question:
  """A row as it is asked.

  Attributes:
    location: where the row stands.
    text: the last turn before the answer.
    reference: the row's own solution.
    answer: the number that it ends with.
    prompt: token ids, up to where the assistant answers.
  """

  location: str
  text: str
  reference: str
  answer: Answer
  prompt: list[int]


@dataclass(frozen=True)
class Questions:
  """What became of the rows.

  Attributes:
    asked: the questions.
    rows: rows read.
    with_number: rows whose reference ends with a number.
    left_out: the other rows by reason.
    fingerprint: a digest of the rows as read, whatever the tokenizer.
  """

  asked: list[Question]
  rows: int
  with_number: int
  left_out: dict[str, BadRows]
  fingerprint: str


def read_questions(
  options: DataOptions, tokenizer: PromptTokenizer, *, longest_prompt: int, marked_only: bool
) -> Questions:
  """Reads rows as questions with numbers for answers.

  The last assistant turn is the reference; what stands before it is the prompt.

  Args:
    options: the data, and its columns.
    tokenizer: with the chat template.
    longest_prompt: most tokens of a prompt.
    marked_only: leave out references that don't say which number is the final one (`####`, a box, or nothing else).

  Raises:
    DataError: the data can't be found or read at all.
  """
  asked: list[Question] = []
  left_out: dict[str, BadRows] = {}
  digest = hashlib.blake2b(digest_size=16)
  rows = with_number = 0
  for row in read_rows(options):
    rows += 1
    digest.update(json.dumps(row.value, sort_keys=True, default=repr).encode() + b"\n")
    try:
      conversation, text, reference = _parts(row, options.columns)
      answer = find_answer(reference, marked_only=marked_only)
      if answer is None:
        raise UnusableRow(NOT_MARKED if marked_only else NO_NUMBER)
      with_number += 1
      prompt = _prompt(conversation, tokenizer)
      if len(prompt) > longest_prompt:
        raise UnusableRow(PROMPT_TOO_LONG, f"{len(prompt)} tokens, at most {longest_prompt} leave room for an answer")
    except UnusableRow as unusable:
      left_out.setdefault(unusable.reason, BadRows()).add(f"{row.location}: {unusable}")
      continue
    asked.append(Question(str(row.location), text, reference, answer, prompt))
  return Questions(asked, rows, with_number, left_out, digest.hexdigest())


def _parts(row: Row, columns: Sequence[str]) -> tuple[Conversation, str, str]:
  """The conversation before its last assistant turn, that part's last turn, and the assistant's."""
  if row.reason is not None:
    raise UnusableRow(row.reason, row.detail)
  conversation = to_conversation(row.value, columns)
  messages = conversation.messages
  last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
  if not last:
    raise UnusableRow(NO_QUESTION)
  return conversation._replace(messages=messages[:last]), _text(messages[last - 1]), _text(messages[last])


def _text(message: Mapping[str, Any]) -> str:
  content = message.get("content")
  if isinstance(content, list):
    parts = [part.get("text") for part in content if isinstance(part, Mapping)]
    return "\n".join(part for part in parts if isinstance(part, str))
  return content or ""


def _prompt(conversation: Conversation, tokenizer: PromptTokenizer) -> list[int]:
  try:
    return tokenizer.apply_chat_template(
      conversation.messages, add_generation_prompt=True, tools=conversation.tools, documents=conversation.documents
    )
  except ChatTemplateError as error:
    raise UnusableRow(TEMPLATE_REFUSED, str(error)) from error
  except UnicodeError as error:
    raise UnusableRow(NOT_UNICODE, str(error)) from error
