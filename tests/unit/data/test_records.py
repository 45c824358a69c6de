from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_fakes import make_config, write_jsonl

from maxtext_posttrain.data import DataOptions
from maxtext_posttrain.data.records import drop_filled_nulls, find_columns, read_rows
from maxtext_posttrain.errors import DataError

ROWS = [{"question": "a", "answer": "b"}, {"question": "c", "answer": "d"}]


def read(files, split="train", **changes):
  return list(read_rows(DataOptions.from_config(make_config(**{f"hf_{split}_files": files}, **changes), split)))


def values(rows):
  return [row.value for row in rows]


def test_jsonl_rows_carry_their_line_numbers(tmp_path):
  path = tmp_path / "rows.jsonl"
  path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode() + b"\r\n\n  \n" + json.dumps(ROWS[1]).encode())
  rows = read(str(path))
  assert values(rows) == ROWS
  assert [str(row.location) for row in rows] == [f"{path} line 1", f"{path} line 4"]


def test_a_line_separator_inside_a_text_ends_no_line(tmp_path):
  row = {"question": "a\u2028b\x0bc", "answer": "d"}
  path = tmp_path / "rows.jsonl"
  path.write_text(json.dumps(row, ensure_ascii=False) + "\n", "utf-8")
  assert values(read(str(path))) == [row]


@pytest.mark.parametrize(
  ("line", "detail"),
  [
    (b'{"question": "a", "answer": ', "Expecting value at column 28"),
    (b'{"question": "\xff"}', "not UTF-8"),
    (b"[" * 200_000, "nested too deep"),
    (b'{"question": ' + b"1" * 5000 + b"}", "Exceeds the limit"),
  ],
)
def test_a_bad_line_is_a_bad_row_and_the_next_is_read(tmp_path, line, detail):
  path = tmp_path / "rows.jsonl"
  path.write_bytes(json.dumps(ROWS[0]).encode() + b"\n" + line + b"\n" + json.dumps(ROWS[1]).encode() + b"\n")
  rows = read(str(path))
  assert [row.reason for row in rows] == [None, "not valid JSON", None]
  assert detail in rows[1].detail
  assert str(rows[1].location) == f"{path} line 2"


@pytest.mark.parametrize(
  "content",
  [
    json.dumps(ROWS),
    json.dumps({"data": ROWS}, indent=1),
    "\n".join(json.dumps(row) for row in ROWS) + "\n",
    " \ufeff"[1:] + json.dumps(ROWS),
  ],
)
def test_json_is_a_list_an_object_with_data_or_one_object_a_line(tmp_path, content):
  path = tmp_path / "rows.json"
  path.write_text(content, "utf-8")
  assert values(read(str(path))) == ROWS


@pytest.mark.parametrize(
  ("content", "message"),
  [('[{"question": "a",]', "not valid JSON at line 1"), ('"text"', "must hold a list of rows"), ("", "not valid JSON")],
)
def test_broken_json_files_end_the_run(tmp_path, content, message):
  path = tmp_path / "rows.json"
  path.write_text(content, "utf-8")
  with pytest.raises(DataError, match=message) as caught:
    read(str(path))
  assert str(path) in str(caught.value)


def test_compressed_files(tmp_path):
  path = tmp_path / "rows.jsonl.gz"
  path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
  assert values(read(str(path))) == ROWS
  path.write_bytes(path.read_bytes()[:-12])
  with pytest.raises(DataError, match=r"rows\.jsonl\.gz cannot be read"):
    read(str(path))


def test_parquet_rows_and_only_the_columns_in_use(tmp_path):
  path = tmp_path / "rows.parquet"
  pq.write_table(pa.table({"question": ["a", "c"], "answer": ["b", "d"], "other": [1, 2]}), path)
  rows = read(str(path))
  assert values(rows) == ROWS
  assert str(rows[1].location) == f"{path} row 2"


def test_parquet_messages_lose_the_nulls_that_arrow_fills_in(tmp_path):
  messages = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
    {"role": "assistant", "content": "b", "tool_calls": [{"name": "g", "arguments": {"y": 2}}]},
  ]
  path = tmp_path / "rows.parquet"
  pq.write_table(pa.table({"messages": [messages]}), path)
  assert pq.read_table(path).to_pylist()[0]["messages"][0]["tool_calls"] is None  # Arrow did fill them in.
  assert values(read(str(path), train_data_columns=["messages"])) == [{"messages": messages}]


def test_filled_nulls_inside_lists():
  assert drop_filled_nulls({"a": [None, {"b": None, "content": None}]}) == {"a": [None, {"content": None}]}


def test_a_file_that_is_no_parquet(tmp_path):
  path = tmp_path / "rows.parquet"
  path.write_text("not parquet")
  with pytest.raises(DataError, match=r"rows\.parquet is not a readable Parquet file"):
    read(str(path))


def test_globs_are_read_in_sorted_order_and_names_with_brackets_as_they_are(tmp_path):
  for name, row in (("b.jsonl", ROWS[1]), ("a.jsonl", ROWS[0])):
    write_jsonl(tmp_path / name, [row])
  assert values(read(str(tmp_path / "*.jsonl"))) == ROWS
  assert values(read(write_jsonl(tmp_path / "c[1].jsonl", ROWS[:1]))) == ROWS[:1]


@pytest.mark.parametrize(
  ("files", "message"),
  [
    ("missing.jsonl", "hf_train_files: no file matches missing.jsonl"),
    ("gs://bucket/a.jsonl", "only local or mounted paths are read"),
    ("rows.csv", r"rows.csv is not one of .jsonl, .json, .parquet"),
    (".", "is a folder"),
    ("", "no train data is configured: set hf_train_files"),
  ],
)
def test_files_that_cannot_be_found_or_read(tmp_path, monkeypatch, files, message):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "rows.csv").write_text("a,b\n")
  with pytest.raises(DataError, match=message):
    read(files)


def test_local_files_work_whatever_hf_path_says(tmp_path):
  path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
  for hf_path in ("", "json", "parquet", "owner/name"):
    assert values(read(path, hf_path=hf_path)) == ROWS


def test_missing_columns_name_those_that_exist_and_what_to_set(tmp_path):
  path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b", "id": 3}])
  with pytest.raises(DataError) as caught:
    read(path)
  assert str(caught.value) == (
    f"{path} has no column 'question', 'answer' (train_data_columns=[\"question\", \"answer\"]); its columns are"
    ' prompt, completion, id; set train_data_columns=["prompt", "completion"]'
  )


def test_missing_parquet_columns_name_those_that_exist(tmp_path):
  path = tmp_path / "rows.parquet"
  pq.write_table(pa.table({"text": ["a"], "id": [1]}), path)
  with pytest.raises(DataError, match="its columns are text, id; set eval_data_columns"):
    read(str(path), split="eval")


@pytest.mark.parametrize(
  ("row", "columns"),
  [
    ({"id": 1, "messages": [], "prompt": "a", "completion": "b"}, ("messages",)),
    ({"answer": "b", "question": "a"}, ("question", "answer")),
    ({"question": "a", "text": "b"}, None),
  ],
)
def test_columns_of_chats_are_found_by_their_usual_names(tmp_path, row, columns):
  path = write_jsonl(tmp_path / "rows.jsonl", [row])
  assert find_columns(DataOptions.from_config(make_config(hf_eval_files=path), "eval")) == columns


def test_a_column_that_only_some_rows_lack_is_no_error_of_the_file(tmp_path):
  path = write_jsonl(tmp_path / "rows.jsonl", [{"question": "a"}, *ROWS])
  assert len(read(path)) == 3


@pytest.fixture(scope="module")
def saved_folder(tmp_path_factory):
  import datasets

  root = tmp_path_factory.mktemp("saved")
  tools = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
  parts = {"train": datasets.Dataset.from_list(ROWS), "held_out": datasets.Dataset.from_list(ROWS[:1])}
  datasets.DatasetDict(parts).save_to_disk(root / "dict")
  datasets.Dataset.from_list(tools).save_to_disk(root / "single")
  return root


def test_folder_saved_by_datasets(saved_folder):
  folder = str(saved_folder / "dict")
  rows = read("", hf_path=folder)
  assert values(rows) == ROWS
  assert str(rows[1].location) == f"{folder}[train] row 2"
  assert values(read("", "eval", hf_path=folder, hf_eval_split="held_out")) == ROWS[:1]
  with pytest.raises(DataError, match="has no split 'test'; set train_split to one of train, held_out"):
    read("", hf_path=folder, train_split="test")


def test_folder_with_a_single_data_set(saved_folder):
  folder = str(saved_folder / "single")
  rows = read("", hf_path=folder, train_data_columns=["messages"])
  assert rows[0].value["messages"][1] == {"role": "assistant", "content": "b"}
  with pytest.raises(DataError, match="holds one data set without splits"):
    read("", "eval", hf_path=folder, hf_eval_split="test", eval_data_columns=["messages"])


def test_a_folder_that_is_no_data_set(tmp_path):
  (tmp_path / "empty").mkdir()
  with pytest.raises(DataError, match=r"hf_path=.*empty \(split train\): "):
    read("", hf_path=str(tmp_path / "empty"))


@pytest.mark.parametrize("hf_path", ["./missing", "/missing", "some/where/missing"])
def test_a_path_that_is_no_hub_name_is_not_looked_for_there(hf_path):
  with pytest.raises(DataError, match="there is no such folder"):
    read("", hf_path=hf_path)


def test_a_file_as_hf_path_is_sent_to_the_right_key(tmp_path):
  with pytest.raises(DataError, match="is a file: name it in hf_train_files"):
    read("", hf_path=write_jsonl(tmp_path / "rows.jsonl", ROWS))
