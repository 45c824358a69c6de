"""Rows of preference data as prompt, chosen and rejected messages."""

from __future__ import annotations

import pytest

from maxtext_posttrain.data.conversations import EMPTY, MISSING_COLUMN, WRONG_TYPE, UnusableRow
from maxtext_posttrain.data.preferences import EMPTY_COMPLETION, EQUAL, NO_PROMPT, to_preference

THREE = ("prompt", "chosen", "rejected")
TWO = ("chosen", "rejected")


def user(text):
  return {"role": "user", "content": text}


def assistant(text):
  return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
  ("row", "columns"),
  [
    ({"prompt": "Q", "chosen": "A", "rejected": "B"}, THREE),
    ({"prompt": "Q", "chosen": "A", "rejected": "B"}, ("rejected", "prompt", "chosen")),
    ({"q": "Q", "good": "A", "bad": "B"}, ("q", "good", "bad")),
    ({"prompt": [user("Q")], "chosen": [assistant("A")], "rejected": [assistant("B")]}, THREE),
    ({"prompt": "Q", "chosen": [assistant("A")], "rejected": assistant("B")}, THREE),
    # The completions as whole conversations, prompt included, beside the prompt's column.
    ({"prompt": "Q", "chosen": [user("Q"), assistant("A")], "rejected": [user("Q"), assistant("B")]}, THREE),
    # The prompt is what both conversations begin with.
    ({"chosen": [user("Q"), assistant("A")], "rejected": [user("Q"), assistant("B")]}, TWO),
    ({"chosen": "\n\nHuman: Q\n\nAssistant: A", "rejected": "\n\nHuman: Q\n\nAssistant: B"}, TWO),
  ],
)
def test_every_form_of_the_same_pair(row, columns):
  preference = to_preference(row, columns)
  assert preference.prompt == [user("Q")]
  assert preference.chosen == [assistant("A")]
  assert preference.rejected == [assistant("B")]
  assert preference.tools is preference.documents is None


def test_a_shared_prompt_of_several_turns():
  start = [{"role": "system", "content": "S"}, user("1"), assistant("2"), user("3")]
  row = {"chosen": [*start, assistant("same start, A")], "rejected": [*start, assistant("same start, B")]}
  preference = to_preference(row, TWO)
  assert preference.prompt == start
  assert preference.chosen == [assistant("same start, A")]


def test_a_completion_that_repeats_the_prompt_is_a_completion():
  preference = to_preference({"prompt": [assistant("A")], "chosen": "A", "rejected": "B"}, THREE)
  assert preference.chosen == [assistant("A")]


def test_completions_of_several_messages():
  row = {
    "prompt": "Q",
    "chosen": [assistant("A"), user("more"), assistant("B")],
    "rejected": "C",
    "tools": '[{"a": 1}]',
  }
  preference = to_preference(row, THREE)
  assert preference.chosen == [assistant("A"), user("more"), assistant("B")]
  assert preference.tools == [{"a": 1}]


def test_a_transcript_with_the_markers_inside_a_turn():
  text = "\n\nHuman: What says\nAssistant: here?\n\nAssistant: Nothing."
  preference = to_preference({"chosen": text, "rejected": text + " At all."}, TWO)
  assert preference.prompt == [user("What says\nAssistant: here?")]
  assert preference.rejected == [assistant("Nothing. At all.")]


@pytest.mark.parametrize(
  ("row", "columns", "reason", "detail"),
  [
    ("text", THREE, WRONG_TYPE, "not an object"),
    ({"prompt": "Q", "chosen": "A"}, THREE, MISSING_COLUMN, "'rejected'"),
    ({"prompt": 3, "chosen": "A", "rejected": "B"}, THREE, WRONG_TYPE, "'prompt' is a number"),
    ({"prompt": "Q", "chosen": None, "rejected": "B"}, THREE, WRONG_TYPE, "'chosen' is null"),
    ({"prompt": "Q", "chosen": [3], "rejected": "B"}, THREE, WRONG_TYPE, "message 1 of 'chosen'"),
    ({"prompt": "Q", "chosen": "A", "rejected": ["B"]}, THREE, WRONG_TYPE, "message 1 of 'rejected'"),
    ({"prompt": "", "chosen": "A", "rejected": "B"}, THREE, NO_PROMPT, "'prompt' is empty"),
    ({"prompt": [], "chosen": "A", "rejected": "B"}, THREE, NO_PROMPT, "'prompt' is empty"),
    ({"prompt": "Q", "chosen": "", "rejected": "B"}, THREE, EMPTY_COMPLETION, "'chosen'"),
    ({"prompt": "Q", "chosen": "A", "rejected": " \n"}, THREE, EMPTY_COMPLETION, "'rejected'"),
    ({"prompt": "Q", "chosen": "A", "rejected": []}, THREE, EMPTY_COMPLETION, "'rejected'"),
    ({"prompt": "Q", "chosen": "A", "rejected": [assistant("")]}, THREE, EMPTY_COMPLETION, "'rejected'"),
    ({"prompt": "Q", "chosen": [assistant(None)], "rejected": "B"}, THREE, EMPTY, "message 1 of 'chosen'"),
    ({"prompt": "Q", "chosen": "A", "rejected": [user("B")]}, THREE, EMPTY_COMPLETION, "'rejected'"),
    ({"prompt": "Q", "chosen": "A", "rejected": "A"}, THREE, EQUAL, ""),
    ({"prompt": "Q", "chosen": "A", "rejected": [assistant("A")]}, THREE, EQUAL, ""),
    ({"chosen": [user("Q"), assistant("A")], "rejected": [user("Q"), assistant("A")]}, TWO, EQUAL, ""),
    ({"chosen": [user("Q"), assistant("A")], "rejected": [user("Q")]}, TWO, EMPTY_COMPLETION, "'rejected'"),
    ({"chosen": [user("Q"), assistant("A")], "rejected": [user("R"), assistant("A")]}, TWO, NO_PROMPT, "share no"),
    ({"chosen": "A", "rejected": "B"}, TWO, WRONG_TYPE, "without a prompt's column"),
    ({"prompt": "Q", "chosen": "A", "rejected": "B", "tools": 3}, THREE, WRONG_TYPE, "'tools'"),
  ],
)
def test_rows_that_hold_no_pair(row, columns, reason, detail):
  with pytest.raises(UnusableRow) as caught:
    to_preference(row, columns)
  assert caught.value.reason == reason
  assert detail in caught.value.detail
