"""From a row of a data set to a conversation that a chat template can render."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]

NO_ASSISTANT_TURN = "no assistant turn"
EMPTY = "empty"
WRONG_TYPE = "wrong type"
MISSING_COLUMN = "missing column"

_NAMED_PAIRS = (("prompt", "completion"), ("question", "answer"))


class Conversation(NamedTuple):
  """Messages in the chat format, with what else the template may use."""

  messages: list[Message]
  tools: list[Any] | None
  documents: list[Any] | None

  @property
  def roles(self) -> str:
    """The roles in order, for messages about a conversation that a template refuses."""
    roles = [str(message["role"]) for message in self.messages]
    return ", ".join(roles[:8]) + (f", ... ({len(roles)} in all)" if len(roles) > 8 else "")


class UnusableRow(Exception):
  """A row that training cannot use.

  Attributes:
    reason: the kind of fault, one of a few, under which rows are counted.
    detail: what this row has, or '' where the reason says all.
  """

  def __init__(self, reason: str, detail: str = ""):
    self.reason = reason
    self.detail = detail
    super().__init__(f"{reason}: {detail}" if detail else reason)


def to_conversation(row: Any, columns: Sequence[str], *, needs_assistant: bool = True) -> Conversation:
  """Reads a row's conversation from one column of messages, or from the user's and the assistant's column.

  Each of the two columns holds a text or a list of messages. `tools` and `documents` are read where the row has
  them, as lists or as JSON text.

  Args:
    row: a row as read.
    columns: one or two column names.
    needs_assistant: refuse a conversation without an assistant turn that says something.

  Raises:
    UnusableRow: when the row has no such conversation.
  """
  if not isinstance(row, Mapping):
    raise UnusableRow(WRONG_TYPE, f"the row is {kind(row)}, not an object with columns")
  for column in columns:
    if column not in row:
      raise UnusableRow(MISSING_COLUMN, f"no {column!r}")
  if len(columns) == 1:
    messages = read_messages(row[columns[0]], columns[0])
  else:
    user, assistant = _user_and_assistant(columns)
    messages = _turns(row[user], user, "user") + _turns(row[assistant], assistant, "assistant")
  if not messages:
    raise UnusableRow(EMPTY, "no messages")
  if needs_assistant:
    _require_assistant(messages)
  return Conversation(messages, list_column(row, "tools"), list_column(row, "documents"))


def _user_and_assistant(columns: Sequence[str]) -> tuple[str, str]:
  """The two columns in the order user, assistant; a known pair is recognised in either order, as MaxText does."""
  return next((pair for pair in _NAMED_PAIRS if set(pair) == set(columns)), (columns[0], columns[1]))


def _turns(value: Any, column: str, role: str) -> list[Message]:
  if isinstance(value, str):
    return [{"role": role, "content": value}]
  if isinstance(value, list):
    return read_messages(value, column)
  raise UnusableRow(WRONG_TYPE, f"{column!r} is {kind(value)}, not text or messages")


def read_messages(value: Any, column: str) -> list[Message]:
  """A column's value as messages.

  Raises:
    UnusableRow: it is no list of messages in the chat format.
  """
  if not isinstance(value, list):
    raise UnusableRow(WRONG_TYPE, f"{column!r} is {kind(value)}, not a list of messages")
  for number, message in enumerate(value, start=1):
    where = f"message {number} of {column!r}"
    if not isinstance(message, Mapping):
      raise UnusableRow(WRONG_TYPE, f"{where} is {kind(message)}, not an object")
    if not isinstance(message.get("role"), str):
      raise UnusableRow(WRONG_TYPE, f"{where} has no 'role' (its keys: {', '.join(map(str, message)) or 'none'})")
    if not isinstance(message.get("content"), str | list | None):
      raise UnusableRow(WRONG_TYPE, f"the content of {where} is {kind(message['content'])}, not text")
    if message.get("content") is None and not any(
      message.get(key) for key in message if key not in ("role", "content")
    ):
      raise UnusableRow(EMPTY, f"{where} has no content")
  return [dict(message) for message in value]


def _require_assistant(messages: list[Message]) -> None:
  turns = [message for message in messages if message["role"] == "assistant"]
  if not turns:
    raise UnusableRow(NO_ASSISTANT_TURN)
  if not any(value for turn in turns for key, value in turn.items() if key != "role"):
    raise UnusableRow(EMPTY, "the assistant says nothing")


def list_column(row: Mapping[str, Any], column: str) -> list[Any] | None:
  """A column that may hold a list, as such or as JSON text; None where the row has none.

  Raises:
    UnusableRow: it holds something else.
  """
  value = row.get(column)
  if isinstance(value, str):
    try:
      value = json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
      raise UnusableRow(WRONG_TYPE, f"{column!r} is text that is not JSON") from error
  if value is not None and not isinstance(value, list):
    raise UnusableRow(WRONG_TYPE, f"{column!r} is {kind(value)}, not a list")
  return value or None


def kind(value: Any) -> str:
  """What JSON calls a value, for messages about rows."""
  if value is None:
    return "null"
  names: dict[type, str] = {
    str: "text",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
  }
  return names.get(type(value), f"a {type(value).__name__}")
