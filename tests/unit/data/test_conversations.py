from __future__ import annotations

import pytest

from maxtext_posttrain.data.conversations import UnusableRow, to_conversation

USER = {"role": "user", "content": "hi"}
BOT = {"role": "assistant", "content": "yo"}


@pytest.mark.parametrize(
  ("row", "columns"),
  [
    ({"messages": [USER, BOT]}, ["messages"]),
    ({"dialogue": [USER, BOT]}, ["dialogue"]),
    ({"prompt": "hi", "completion": "yo"}, ["prompt", "completion"]),
    ({"prompt": [USER], "completion": [BOT]}, ["prompt", "completion"]),
    ({"prompt": [USER], "completion": "yo"}, ["prompt", "completion"]),
    ({"question": "hi", "answer": "yo"}, ["question", "answer"]),
    ({"question": "hi", "answer": "yo"}, ["answer", "question"]),
    ({"ask": "hi", "reply": "yo"}, ["ask", "reply"]),
  ],
)
def test_every_shape_gives_the_same_messages(row, columns):
  conversation = to_conversation(row, columns)
  assert conversation.messages == [USER, BOT]
  assert (conversation.tools, conversation.documents) == (None, None)


def test_messages_are_passed_on_with_all_their_keys():
  call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
  parts = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
  row = {"messages": [parts, call, {"role": "tool", "content": "3"}, BOT]}
  assert to_conversation(row, ["messages"]).messages == row["messages"]


def test_tools_and_documents_as_lists_or_json_text():
  row = {"question": "hi", "answer": "yo", "tools": '[{"name": "f"}]', "documents": [{"title": "t"}]}
  conversation = to_conversation(row, ["question", "answer"])
  assert conversation.tools == [{"name": "f"}]
  assert conversation.documents == [{"title": "t"}]
  for nothing in ("", [], None, "[]"):
    assert to_conversation(row | {"tools": nothing}, ["question", "answer"]).tools is None


@pytest.mark.parametrize(
  ("row", "columns", "reason", "detail"),
  [
    ([1], ["messages"], "wrong type", "the row is a list, not an object with columns"),
    (None, ["messages"], "wrong type", "the row is null"),
    ({"question": "a"}, ["question", "answer"], "missing column", "no 'answer'"),
    ({"messages": "hi"}, ["messages"], "wrong type", "'messages' is text, not a list of messages"),
    ({"messages": ["hi"]}, ["messages"], "wrong type", "message 1 of 'messages' is text, not an object"),
    ({"messages": [{"from": "human", "value": "a"}]}, ["messages"], "wrong type", "no 'role' (its keys: from, value)"),
    ({"messages": [USER, {"role": "assistant", "content": 3}]}, ["messages"], "wrong type", "content of message 2"),
    ({"messages": [{"role": "user"}, BOT]}, ["messages"], "empty", "message 1 of 'messages' has no content"),
    ({"messages": []}, ["messages"], "empty", "no messages"),
    ({"messages": [USER]}, ["messages"], "no assistant turn", ""),
    ({"messages": [USER, BOT | {"content": ""}]}, ["messages"], "empty", "the assistant says nothing"),
    ({"question": "a", "answer": ""}, ["question", "answer"], "empty", "the assistant says nothing"),
    ({"question": "a", "answer": 42}, ["question", "answer"], "wrong type", "'answer' is a number"),
    ({"question": None, "answer": "b"}, ["question", "answer"], "wrong type", "'question' is null"),
    ({"question": "a", "answer": "b", "tools": "{"}, ["question", "answer"], "wrong type", "not JSON"),
    ({"question": "a", "answer": "b", "tools": {"a": 1}}, ["question", "answer"], "wrong type", "not a list"),
  ],
)
def test_unusable_rows(row, columns, reason, detail):
  with pytest.raises(UnusableRow) as caught:
    to_conversation(row, columns)
  assert caught.value.reason == reason
  assert detail in caught.value.detail


def test_an_assistant_turn_is_needed_only_where_completions_are_trained():
  assert to_conversation({"messages": [USER]}, ["messages"], needs_assistant=False).messages == [USER]


def test_roles_for_messages():
  conversation = to_conversation({"messages": [USER, BOT]}, ["messages"])
  assert conversation.roles == "user, assistant"
  conversation.messages.extend([USER, BOT] * 10)
  assert conversation.roles.endswith("user, assistant, ... (22 in all)")
