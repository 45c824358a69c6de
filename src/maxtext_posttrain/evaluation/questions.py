"""Rows of mathematics as questions: what a model is asked, and the number its answer has to end with."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from maxtext_posttrain.data.conversations import UnusableRow
from maxtext_posttrain.data.options import DataOptions
from maxtext_posttrain.data.prompts import PROMPT_TOO_LONG, PromptTokenizer, prompt_ids, split_at_answer
from maxtext_posttrain.data.records import read_rows
from maxtext_posttrain.data.report import BadRows
from maxtext_posttrain.evaluation.answers import Answer, find_answer

NO_NUMBER = "the reference ends with no number"
NOT_MARKED = "the reference marks no final number"


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
      conversation, text, reference = split_at_answer(row, options.columns)
      answer = find_answer(reference, marked_only=marked_only)
      if answer is None:
        raise UnusableRow(NOT_MARKED if marked_only else NO_NUMBER)
      with_number += 1
      prompt = prompt_ids(conversation, tokenizer)
      if len(prompt) > longest_prompt:
        raise UnusableRow(PROMPT_TOO_LONG, f"{len(prompt)} tokens, at most {longest_prompt} leave room for an answer")
    except UnusableRow as unusable:
      left_out.setdefault(unusable.reason, BadRows()).add(f"{row.location}: {unusable}")
      continue
    asked.append(Question(str(row.location), text, reference, answer, prompt))
  return Questions(asked, rows, with_number, left_out, digest.hexdigest())
