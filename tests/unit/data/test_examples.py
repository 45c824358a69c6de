from __future__ import annotations

import json

import numpy as np
import pytest
from data_fakes import ASSISTANT, BOS, END, USER, CharTokenizer, make_config, question_rows, write_jsonl

from maxtext_posttrain.data import DataOptions
from maxtext_posttrain.data.examples import load_examples
from maxtext_posttrain.errors import DataError

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
# BOS USER h i END ASSISTANT y o END
GOOD_IDS = [BOS, USER, ord("h"), ord("i"), END, ASSISTANT, ord("y"), ord("o"), END]
GOOD_TRAINED = [0, 0, 0, 0, 0, 0, 1, 1, 1]


def load(path, tokenizer=None, **changes):
  config = make_config(**({"train_data_columns": ["messages"], "hf_train_files": str(path)} | changes))
  return load_examples(DataOptions.from_config(config), tokenizer or CharTokenizer())


def with_role(role):
  return {"messages": [{"role": role, "content": "s"}, *GOOD["messages"]]}


def test_ids_and_marks_of_one_example(tmp_path):
  examples, report = load(write_jsonl(tmp_path / "rows.jsonl", [GOOD]))
  assert examples[0].tokens.tolist() == GOOD_IDS
  assert examples[0].trained.astype(int).tolist() == GOOD_TRAINED
  assert examples[0].tokens.dtype == np.int32
  assert (report.rows_read, report.examples, report.tokens, report.trained_tokens) == (1, 1, 9, 3)


def test_all_tokens_but_the_first_are_trained_when_not_only_completions_are(tmp_path):
  examples, report = load(write_jsonl(tmp_path / "rows.jsonl", [GOOD]), sft_train_on_completion_only=False)
  assert examples[0].trained.tolist() == [False] + [True] * 8
  assert report.trained_tokens == 8


def test_the_store_returns_each_example_whatever_its_bit_offset(tmp_path):
  rows = question_rows(50)
  path = write_jsonl(tmp_path / "rows.jsonl", rows)
  tokenizer = CharTokenizer()
  examples, _ = load(path, train_data_columns=["question", "answer"])
  assert len(examples) == 50
  for index, row in enumerate(rows):
    user, assistant = ({"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]})
    expected = tokenizer.render_conversation([user, assistant])
    assert examples[index].tokens.tolist() == expected.input_ids
    assert examples[index].trained.tolist() == expected.assistant_mask
  assert examples.lengths.tolist() == [len(example.tokens) for example in (examples[i] for i in range(50))]


def test_tools_and_documents_reach_the_template(tmp_path):
  tokenizer = CharTokenizer()
  row = GOOD | {"tools": [{"name": "f"}], "documents": [{"title": "t"}]}
  load(write_jsonl(tmp_path / "rows.jsonl", [row, GOOD]), tokenizer)
  assert tokenizer.rendered[0] == (GOOD["messages"], [{"name": "f"}], [{"title": "t"}])
  assert tokenizer.rendered[1] == (GOOD["messages"], None, None)


@pytest.mark.parametrize(("limit", "kept"), [(7, 7), (8, 8), (9, 9), (50, 9)])
def test_truncation_keeps_the_prefix_and_its_marks(tmp_path, limit, kept):
  examples, report = load(write_jsonl(tmp_path / "rows.jsonl", [GOOD]), max_target_length=limit)
  assert examples[0].tokens.tolist() == GOOD_IDS[:kept]
  assert examples[0].trained.astype(int).tolist() == GOOD_TRAINED[:kept]
  assert report.truncated == (limit < 9)


def test_a_prompt_that_fills_the_length_leaves_nothing_to_train(tmp_path):
  path = write_jsonl(tmp_path / "rows.jsonl", [GOOD, {"messages": [{"role": "assistant", "content": "o"}]}])
  examples, report = load(path, max_target_length=6, max_bad_rows=1)
  assert len(examples) == 1
  assert report.bad_rows["no trained token within max_target_length"].first == [
    f"{path} line 1: no trained token within max_target_length (the first is number 7 of 9, max_target_length=6)"
  ]
  assert report.truncated == 0


class MaskNothing(CharTokenizer):
  def render_conversation(self, messages, tools=None, documents=None):
    rendered = super().render_conversation(messages, tools, documents)
    return rendered._replace(assistant_mask=[False] * len(rendered.input_ids))


def test_a_template_that_marks_nothing_is_no_silent_zero_loss(tmp_path):
  with pytest.raises(DataError, match=r"none of 1 rows can be used \(1 no trained token\)"):
    load(write_jsonl(tmp_path / "rows.jsonl", [GOOD]), MaskNothing())


REFUSED = [
  (
    with_role("system"),
    "refused by the chat template",
    "(this template has no place for a system turn (roles: system, user, assistant))",
  ),
  ({"messages": GOOD["messages"][:1]}, "no assistant turn", "line 2: no assistant turn"),
  ({"messages": []}, "empty", "no messages"),
  ({"messages": "hi"}, "wrong type", "'messages' is text"),
  ({"other": 1}, "missing column", "no 'messages'"),
  ('{"messages": [', "not valid JSON", "Expecting value at column 15"),
  (json.dumps(GOOD).replace("yo", "\\ud800"), "text is not valid Unicode", "surrogates not allowed"),
]


@pytest.mark.parametrize(("row", "reason", "detail"), REFUSED, ids=[reason for _, reason, _ in REFUSED])
def test_every_kind_of_bad_row_is_counted_and_named(tmp_path, row, reason, detail):
  path = write_jsonl(tmp_path / "rows.jsonl", [GOOD, row, GOOD])
  examples, report = load(path, max_bad_rows=1)
  assert (len(examples), report.rows_read, report.examples, report.bad_row_count) == (2, 3, 2, 1)
  assert list(report.bad_rows) == [reason]
  assert report.bad_rows[reason].first[0].startswith(f"{path} line 2: {reason}")
  assert detail in report.bad_rows[reason].first[0]
  with pytest.raises(DataError, match=f"1 of 3 rows cannot be used \\(1 {reason}\\), more than max_bad_rows=0"):
    load(path, max_bad_rows=0)


@pytest.mark.parametrize(
  ("allowed", "fine"),
  [(0, False), (0.01, False), (0.19, False), (0.2, True), (0.9, True), (1, False), (2, True), (5, True)],
)
def test_max_bad_rows_is_a_share_below_one_and_a_number_from_one(tmp_path, allowed, fine):
  path = write_jsonl(tmp_path / "rows.jsonl", [GOOD] * 8 + [{"messages": []}] * 2)
  if fine:
    assert load(path, max_bad_rows=allowed)[1].bad_row_count == 2
  else:
    with pytest.raises(DataError, match=f"2 of 10 rows .* max_bad_rows={allowed} allows"):
      load(path, max_bad_rows=allowed)


def test_the_message_is_one_line_with_counts_and_first_rows_of_each_kind(tmp_path):
  path = write_jsonl(tmp_path / "rows.jsonl", [GOOD, *[{"messages": []}] * 3, "{", GOOD])
  with pytest.raises(DataError) as caught:
    load(path)
  assert str(caught.value) == (
    f"{path}: 4 of 6 rows cannot be used (3 empty, 1 not valid JSON), more than max_bad_rows=0.01 allows:"
    f" {path} line 2: empty (no messages); {path} line 5: not valid JSON (Expecting property name enclosed in double"
    f" quotes at column 2); {path} line 3: empty (no messages); mend or remove them, or raise max_bad_rows"
  )


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_with_nothing_in_it(tmp_path, content):
  path = tmp_path / "rows.jsonl"
  path.write_text(content)
  with pytest.raises(DataError, match="holds no rows"):
    load(path)


def test_nothing_usable_is_an_error_however_many_bad_rows_are_allowed(tmp_path):
  path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": []}, "{"])
  with pytest.raises(DataError, match="none of 2 rows can be used"):
    load(path, max_bad_rows=100)


def test_a_token_outside_the_vocabulary_stops_the_run(tmp_path):
  path = write_jsonl(tmp_path / "rows.jsonl", [GOOD])
  load(path, vocab_size=ord("y") + 1)
  with pytest.raises(DataError, match=f"line 1: token id {ord('y')} does not exist in a model with vocab_size=121"):
    load(path, vocab_size=ord("y"), max_bad_rows=100)


def test_a_pad_id_equal_to_the_end_token_hides_no_end_token(tmp_path):
  examples, _ = load(write_jsonl(tmp_path / "rows.jsonl", [GOOD]), CharTokenizer(pad_id=END))
  assert examples[0].tokens[-1] == END
  assert examples[0].trained[-1]


def test_the_fingerprint_follows_ids_marks_and_boundaries(tmp_path):
  path = write_jsonl(tmp_path / "rows.jsonl", [GOOD])
  first = load(path)[0].fingerprint()
  assert load(path)[0].fingerprint() == first
  assert load(path, sft_train_on_completion_only=False)[0].fingerprint() != first
  assert load(path, max_target_length=8)[0].fingerprint() != first


def test_the_report_as_lines_and_as_json(tmp_path):
  path = write_jsonl(tmp_path / "rows.jsonl", [GOOD, {"messages": []}, GOOD])
  _, report = load(path, max_bad_rows=1, max_target_length=8)
  report.seconds = 0.25
  report.rows, report.padding_share = 2, 0.125
  assert report.lines() == [
    f"{path}: 3 rows read, 2 used, 2 of them cut to 8 tokens (0.2 s)",
    "16 tokens, 4 trained, in 2 sequences of 8 (12.5% padding)",
    "1 row not used: 1 empty",
    f"  {path} line 2: empty (no messages)",
  ]
  assert json.loads(json.dumps(report.as_dict()))["bad_rows"] == {
    "empty": {"count": 1, "first": [f"{path} line 2: empty (no messages)"]}
  }
