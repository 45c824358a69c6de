"""From a row of a preference data set to a prompt and two completions as messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from maxtext_posttrain.data.conversations import (
  MISSING_COLUMN,
  WRONG_TYPE,
  Message,
  UnusableRow,
  kind,
  list_column,
  read_messages,
)
from maxtext_posttrain.data.options import PAIR_COLUMNS

EQUAL = "chosen and rejected are equal"
EMPTY_COMPLETION = "empty completion"
NO_PROMPT = "no prompt"

_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}


class Preference(NamedTuple):
  """A prompt and two ways to go on from it, in the chat format, with what else the template may use."""

  prompt: list[Message]
  chosen: list[Message]
  rejected: list[Message]
  tools: list[Any] | None
  documents: list[Any] | None


def to_preference(row: Any, columns: Sequence[str]) -> Preference:
  """Reads a row's prompt and completions.

  With three columns, each holds a text or a list of messages; a text is one turn, the user's or the assistant's. A
  completion may also be the whole conversation, the prompt's messages included. With two, chosen and rejected are whole
  conversations: messages, or a transcript of the form "\\n\\nHuman: ...\\n\\nAssistant: ..."; the messages that both
  begin with are the prompt.

  Args:
    row: a row as read.
    columns: the columns of prompt, chosen and rejected, or of chosen and rejected.

  Raises:
    UnusableRow: when the row has no such pair, when a completion is empty, or when both are equal.
  """
  if not isinstance(row, Mapping):
    raise UnusableRow(WRONG_TYPE, f"the row is {kind(row)}, not an object with columns")
  for column in columns:
    if column not in row:
      raise UnusableRow(MISSING_COLUMN, f"no {column!r}")
  columns = _in_order(columns)
  *before, chosen_column, rejected_column = columns
  if before:
    prompt = _turns(row[before[0]], before[0], "user")
    chosen, rejected = (
      _after(prompt, _turns(row[column], column, "assistant")) for column in (chosen_column, rejected_column)
    )
  else:
    whole = [_conversation(row[column], column) for column in (chosen_column, rejected_column)]
    if whole[0] == whole[1]:
      raise UnusableRow(EQUAL)
    prompt, chosen, rejected = _split(*whole)
  if not prompt:
    raise UnusableRow(NO_PROMPT, f"{before[0]!r} is empty" if before else "the two conversations share no message")
  for column, completion in ((chosen_column, chosen), (rejected_column, rejected)):
    _require_completion(completion, column)
  if chosen == rejected:
    raise UnusableRow(EQUAL)
  return Preference(prompt, chosen, rejected, list_column(row, "tools"), list_column(row, "documents"))


def _in_order(columns: Sequence[str]) -> Sequence[str]:
  """The columns as prompt, chosen, rejected; those names are recognised in any order."""
  return next((known for known in PAIR_COLUMNS.known if set(known) == set(columns)), columns)


def _turns(value: Any, column: str, role: str) -> list[Message]:
  if isinstance(value, str):
    return [{"role": role, "content": value}] if value.strip() else []
  if isinstance(value, Mapping):
    return read_messages([value], column)
  if isinstance(value, list):
    return read_messages(value, column)
  raise UnusableRow(WRONG_TYPE, f"{column!r} is {kind(value)}, not text or messages")


def _conversation(value: Any, column: str) -> list[Message]:
  if isinstance(value, str):
    return _transcript(value, column)
  return read_messages(value, column)


def _transcript(text: str, column: str) -> list[Message]:
  """The turns of a text in which "Human:" and "Assistant:" after a blank line begin each."""
  parts = _TURN.split(text)
  if parts[0].strip() or len(parts) == 1:
    raise UnusableRow(
      WRONG_TYPE, f"{column!r} is text without a prompt's column; name one, or give messages or Human/Assistant turns"
    )
  return [{"role": _ROLES[role], "content": content} for role, content in zip(parts[1::2], parts[2::2], strict=True)]


def _after(prompt: list[Message], completion: list[Message]) -> list[Message]:
  """A completion without the prompt's messages, where it is given as the whole conversation."""
  whole = prompt and len(completion) > len(prompt) and completion[: len(prompt)] == prompt
  return completion[len(prompt) :] if whole else completion


def _split(chosen: list[Message], rejected: list[Message]) -> tuple[list[Message], list[Message], list[Message]]:
  """What both begin with, and what each goes on with."""
  shared = 0
  while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
    shared += 1
  return chosen[:shared], chosen[shared:], rejected[shared:]


def _require_completion(completion: list[Message], column: str) -> None:
  for message in completion:
    if message["role"] == "assistant" and any(_says(value) for key, value in message.items() if key != "role"):
      return
  raise UnusableRow(EMPTY_COMPLETION, f"the assistant says nothing in {column!r}")


def _says(value: Any) -> bool:
  return bool(value.strip()) if isinstance(value, str) else bool(value)
