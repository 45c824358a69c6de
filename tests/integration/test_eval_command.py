"""`posttrain eval`: the trainer's own figure, answers that are graded, the files it leaves, and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from maxtext_posttrain.evaluation.output import FORMAT
from maxtext_posttrain.report import read_metrics
from tests.support import runs
from tests.support.cli import Outcome, run_cli

STEPS = 25
TRAIN = [{"question": f"What is {number} and {5 - number}?", "answer": "It is 5.\n#### 5"} for number in range(5)]
# Training leaves a model that answers 5 to everything.
EVAL = [
  {"question": "What is 1 and 4?", "answer": "1 + 4 = <<1+4=5>>5.\n#### 5"},
  {"question": "What is 2 and 3?", "answer": "#### 5.00"},
  {"question": "What is 3 and 4?", "answer": "#### 7"},
  {"question": "What is 10/2?", "answer": r"\boxed{\frac{10}{2}}"},
  {"question": "Who are you?", "answer": "A model."},
  {"question": "What is " + "1 and " * 60 + "1?", "answer": "#### 61"},
]
CONFIG = """\
base_config: [sft.yml, models/tiny.yml]
run_name: run
base_output_directory: {folder}
base_emb_dim: 32
base_mlp_dim: 64
max_target_length: 64
per_device_batch_size: 2
learning_rate: 2.e-2
steps: {steps}
eval_interval: {steps}
enable_tensorboard: false
tokenizer_type: sentencepiece
tokenizer_path: maxtext://tokenizers/tokenizer.llama2
chat_template: llama2
hf_train_files: {folder}/train.jsonl
hf_eval_files: {folder}/eval.jsonl
train_data_columns: [question, answer]
eval_data_columns: [question, answer]
max_bad_rows: 2
"""


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
  folder = tmp_path_factory.mktemp("eval")
  write_rows(folder / "train.jsonl", TRAIN)
  write_rows(folder / "eval.jsonl", EVAL)
  config = folder / "sft.yml"
  config.write_text(CONFIG.format(folder=folder, steps=STEPS))
  runs.sft_session([str(config)])
  return folder / "run"


@pytest.mark.slow
def test_the_runs_own_evaluation_and_its_answers(run: Path, capfd: pytest.CaptureFixture[str]):
  arguments = ["eval", str(run), "--samples", "3", "--temperature", "0.7", "--seed", "1", "--max-new-tokens", "16"]
  outcome = run_cli(arguments, capfd)
  assert outcome.code == 0, outcome.err
  figures = json.loads((run / f"eval-{STEPS}.json").read_text())

  # The figure that training reported for the same weights and rows.
  reported = [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "eval"][-1]
  assert reported["step"] == figures["model"]["step"] == STEPS
  tokens = figures["tokens"]
  assert tokens["loss"] == pytest.approx(reported["loss"], rel=1e-6)
  assert tokens["perplexity"] == pytest.approx(math.exp(tokens["loss"]))
  assert tokens["trained_tokens"] == reported["trained_tokens"]
  assert tokens["token_accuracy"] == pytest.approx(reported["token_accuracy"])
  assert 0 < tokens["token_accuracy"] < 1

  # 5 is right three times of four; the model's words and the long question are named.
  answers = figures["answers"]
  assert {reason: rows["count"] for reason, rows in answers["rows_left_out"].items()} == {
    "the reference marks no final number": 1,
    "prompt too long": 1,
  }
  assert figures["data"]["rows_left_out"]["no trained token within max_target_length"]["count"] == 1
  greedy, sampled = answers["greedy"], answers["sampled"]
  assert (greedy["questions"], greedy["answers"], greedy["correct"], greedy["accuracy"]) == (4, 4, 3, 0.75)
  assert greedy["standard_error"] == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
  assert (greedy["cut"], greedy["without_number"]) == (0, 0)
  assert (sampled["questions"], sampled["answers"]) == (4, 12)
  assert sampled["accuracy"] == pytest.approx(sampled["correct"] / 12)

  lines = [json.loads(line) for line in (run / f"eval-{STEPS}-answers.jsonl").read_text().splitlines()]
  assert [line["question"] for line in lines] == [row["question"] for row in EVAL[:4]]
  assert [line["reference_value"] for line in lines] == ["5", "5", "7", "5"]
  assert [answer["by"] for answer in lines[0]["answers"]] == ["greedy", *["sampled"] * 3]
  first = lines[0]["answers"][0]
  assert (first["text"].strip(), first["value"], first["rule"], first["correct"]) == (
    "It is 5.\n#### 5",
    "5",
    "####",
    True,
  )
  assert first["finish_reason"] == "stop"
  assert sum(answer["correct"] for line in lines for answer in line["answers"][1:]) == sampled["correct"]

  for text in ("exact match, greedy", "75.00%", "pass@1 of 3 samples", "questions not asked: 2 of 6"):
    assert text in outcome.out


@pytest.mark.slow
def test_other_data_for_items_that_lie_alone(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
  step = tmp_path / "0"
  shutil.copytree(run / "checkpoints" / str(STEPS), step)
  turns = [
    [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": "It is 5."}] for row in TRAIN
  ]
  data = write_rows(tmp_path / "chats.jsonl", [{"messages": each} for each in turns])
  # An earlier evaluation is replaced.
  (tmp_path / "eval-0.json").write_text(json.dumps({"format": FORMAT}))
  arguments = ["eval", str(step), "--config", str(run / "config.yml"), "--data", str(data), "--columns", "messages"]
  arguments += ["--limit", "2", "--batch", "1", "--generate", "--max-new-tokens", "3", "packing=false"]
  outcome = run_cli(arguments, capfd)
  assert outcome.code == 0, outcome.err
  figures = json.loads((tmp_path / "eval-0.json").read_text())
  assert figures["data"]["rows_read"] == figures["data"]["rows_evaluated"] == figures["settings"]["limit"] == 2
  # It was trained on these words; only the end of the turn comes too soon.
  assert 0.5 < figures["tokens"]["token_accuracy"] < 1
  # Asked for, the last number of a reference counts; "It is" is cut before its own.
  greedy = figures["answers"]["greedy"]
  assert (greedy["questions"], greedy["cut"], greedy["without_number"], greedy["correct"]) == (2, 2, 2, 0)
  assert "2 with no number; 2 cut at their length" in outcome.out


ARGUMENTS = [
  ([], "the following arguments are required: RUN_OR_ITEMS"),
  (["run", "data.jsonl"], "data.jsonl: keys are given as key=value, data with --data"),
  (["run", "--samples", "0"], "--samples is 0: it must be at least 1"),
  (["run", "--limit", "0"], "--limit is 0"),
  (["run", "--limit", "all"], "invalid int value: 'all'"),
  (["run", "--batch", "-2"], "--batch is -2"),
  (["run", "--data", ""], "--data is empty"),
  (["run", "--columns", " , "], "--columns is empty"),
  (["run", "--max-new-tokens", "0"], "max_new_tokens is 0"),
  (["run", "--samples", "2", "--temperature", "-1"], "temperature is -1.0"),
  (["run", "--samples", "2", "--temperature", "nan"], "temperature is nan"),
  (["run", "--samples", "2", "--temperature", "0"], "--temperature is 0: each sample would be the greedy answer"),
  (["run", "--samples", "2", "--top-p", "2"], "top_p is 2.0"),
  (["run", "--samples", "2", "--top-k", "-1"], "top_k is -1"),
  (["run", "--samples", "2", "--seed", "-1"], "seed is -1"),
  (["run", "--temperature", "0.5"], "--temperature is of samples: give --samples"),
  (["run", "--top-k", "5"], "--top-k is of samples"),
  (["run", "--no-generate", "--samples", "2"], "leave --no-generate out"),
  (["run", "--greedy"], "unrecognized arguments: --greedy"),
]


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS)
def test_mistakes_in_the_command_line(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]):
  check_refusal(run_cli(["eval", *arguments], capfd), 2, message)


def check_refusal(outcome: Outcome, code: int, message: str) -> None:
  assert (outcome.code, len(outcome.errors)) == (code, 1), outcome.err
  assert message in outcome.errors[0]
  assert "Traceback" not in outcome.err


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """What is looked at before a model is loaded: an import's folders, without weights, and its configuration."""
  folder = tmp_path_factory.mktemp("items")
  (folder / "0" / "items").mkdir(parents=True)
  config = CONFIG.format(folder=folder, steps=1).replace(f"hf_eval_files: {folder}/eval.jsonl\n", "")
  (folder / "model.yml").write_text(config)
  write_rows(folder / "good.jsonl", EVAL[:4])
  write_rows(folder / "words.jsonl", EVAL[4:5] * 3)
  write_rows(folder / "long.jsonl", [*EVAL[:1] * 2, *EVAL[5:]])
  write_rows(folder / "broken.jsonl", [*EVAL[:1], 1, 2, 3])
  (folder / "torn.jsonl").write_text('{"question": "What')
  (folder / "empty.jsonl").write_text("")
  (folder / "rows.csv").write_text("question,answer\n")
  (folder / "other.json").write_text("{}")
  return folder


Change = Callable[[Path], Sequence[str]]
GOOD: Change = lambda folder: ["--data", f"{folder}/good.jsonl"]  # noqa: E731
REFUSALS: list[tuple[str, Change, int, str]] = [
  ("no data", lambda folder: [], 2, "names no evaluation data: give --data FILE"),
  ("synthetic data", lambda folder: ["dataset_type=synthetic"], 2, "names no evaluation data"),
  ("missing file", lambda folder: ["--data", f"{folder}/none.jsonl"], 1, "no file matches"),
  ("a folder for data", lambda folder: ["--data", str(folder)], 1, "is a folder; name its files"),
  ("another format", lambda folder: ["--data", f"{folder}/rows.csv"], 1, "is not one of .jsonl, .json, .parquet"),
  ("no rows", lambda folder: ["--data", f"{folder}/empty.jsonl"], 1, "holds no rows"),
  ("torn rows", lambda folder: ["--data", f"{folder}/torn.jsonl"], 1, "none of 1 rows can be used (1 not valid JSON)"),
  ("bad rows", lambda folder: ["--data", f"{folder}/broken.jsonl"], 1, "3 of 4 rows cannot be used (3 wrong type)"),
  ("wrong columns", lambda folder: [*GOOD(folder), "--columns", "problem,solution"], 1, "has no column 'problem'"),
  (
    "three columns",
    lambda folder: [*GOOD(folder), "--columns", "a,b,c"],
    2,
    "must name one column of messages, or two",
  ),
  ("a column twice", lambda folder: [*GOOD(folder), "--columns", "a,a"], 2, "or two different columns"),
  ("no tokenizer", lambda folder: [*GOOD(folder), "tokenizer_path="], 2, "names no tokenizer"),
  ("missing tokenizer", lambda folder: [*GOOD(folder), "tokenizer_path=/none.model"], 2, "no such file"),
  ("unknown key", lambda folder: [*GOOD(folder), "vocab=3"], 2, "vocab"),
  ("data twice", lambda folder: [*GOOD(folder), "hf_eval_files=x.jsonl"], 2, "hf_eval_files is given twice"),
  (
    "small vocabulary",
    lambda folder: [*GOOD(folder), "vocab_size=100"],
    1,
    "does not exist in a model with vocab_size",
  ),
  (
    "no numbers",
    lambda folder: ["--data", f"{folder}/words.jsonl", "--generate"],
    1,
    "no reference ends with a number",
  ),
  (
    "no room for a prompt",
    lambda folder: [*GOOD(folder), "--generate", "max_target_length=12", "sft_train_on_completion_only=false"],
    1,
    "no question can be asked",
  ),
  ("output in no folder", lambda folder: [*GOOD(folder), "--output", f"{folder}/a/b.json"], 2, "there is no folder"),
  ("output is a folder", lambda folder: [*GOOD(folder), "--output", str(folder)], 2, "is a folder; name a file"),
  (
    "output is another's",
    lambda folder: [*GOOD(folder), "--output", f"{folder}/other.json"],
    2,
    "exists and is no evaluation",
  ),
  ("no configuration", lambda folder: [*GOOD(folder), "--config", "/none.yml"], 2, "/none.yml: no such file"),
  ("no weights", GOOD, 1, "checkpoint"),
]


@pytest.mark.parametrize(("change", "code", "message"), [case[1:] for case in REFUSALS], ids=[c[0] for c in REFUSALS])
def test_refusals(items: Path, change: Change, code: int, message: str, capfd: pytest.CaptureFixture[str]):
  before = sorted(items.rglob("*"))
  check_refusal(run_cli(["eval", str(items), *change(items)], capfd), code, message)
  assert sorted(items.rglob("*")) == before


def test_no_such_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
  check_refusal(run_cli(["eval", str(tmp_path / "none")], capfd), 1, "no such folder")
