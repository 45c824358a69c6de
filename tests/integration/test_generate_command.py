"""`posttrain generate`: prompts, chats, JSON, and what it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tests.support import runs
from tests.support.cli import run_cli

MISTAKES = [
  ([], "the following arguments are required: RUN_OR_ITEMS"),
  (["run", "--prompt", ""], "--prompt is empty"),
  (["run", "--prompt", "a", "--stop", ""], "--stop is empty"),
  (["run", "--prompt", "a", "--temperature", "-1"], "temperature is -1.0"),
  (["run", "--prompt", "a", "--temperature", "warm"], "invalid float value"),
  (["run", "--prompt", "a", "--top-p", "0"], "top_p is 0.0"),
  (["run", "--prompt", "a", "--top-p", "1.5"], "top_p is 1.5"),
  (["run", "--prompt", "a", "--top-k", "-2"], "top_k is -2"),
  (["run", "--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens is 0"),
  (["run", "--prompt", "a", "--max-new-tokens", "1.5"], "invalid int value"),
  (["run", "--prompt", "a", "--seed", "-1"], "seed is -1"),
  (["run", "--prompt", "a", "--samples", "0"], "n is 0"),
  (["run", "a prompt"], "keys are given as key=value, prompts with --prompt"),
  (["run", "--prompt", "a", "--raw", "--system", "b"], "--system is a turn of a chat"),
  (["run", "--raw"], "--raw needs --prompt"),
  (["run", "--json"], "--json and --samples need --prompt"),
  (["run", "--prompt", "a", "--beams", "4"], "unrecognized arguments: --beams 4"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_in_the_command_line(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]):
  outcome = run_cli(["generate", *arguments], capfd)
  assert outcome.code == 2
  assert len(outcome.errors) == 1
  assert message in outcome.errors[0]


TOKENIZER = (
  "dataset_type=hf",
  "hf_path=json",
  "tokenizer_type=sentencepiece",
  "tokenizer_path=maxtext://tokenizers/tokenizer.llama2",
  "chat_template=chatml",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A run of two synthetic steps with the vocabulary of the Llama 2 tokenizer."""
  folder = tmp_path_factory.mktemp("generate")
  argv = runs.arguments(folder, "made", "steps=2", "max_target_length=96")
  argv[0] = str(_with_vocabulary(folder))
  runs.sft_session(argv)
  return folder / "made"


def _with_vocabulary(folder: Path) -> Path:
  path = runs.write_config(folder)
  lines = [line for line in path.read_text().splitlines() if not line.startswith(("vocab_size", "max_target_length"))]
  path.write_text("\n".join([*lines, "vocab_size: 32000"]) + "\n")
  return path


@pytest.mark.slow
def test_prompts_and_samples(run: Path, capfd: pytest.CaptureFixture[str]):
  arguments = ["generate", str(run), *TOKENIZER, "--prompt", "Hello", "--prompt", "Good bye", "--max-new-tokens", "5"]
  plain = run_cli(arguments, capfd)
  assert plain.code == 0, plain.err
  assert "--- prompt 1 of 2" in plain.out
  lines = run_cli([*arguments, "--json", "--samples", "2", "--temperature", "1", "--raw"], capfd)
  assert lines.code == 0, lines.err
  rows = [json.loads(line) for line in lines.out.splitlines() if line.startswith("{")]
  assert [(row["prompt"], row["sample"]) for row in rows] == [
    ("Hello", 0),
    ("Hello", 1),
    ("Good bye", 0),
    ("Good bye", 1),
  ]
  assert all(len(row["token_ids"]) == len(row["log_probs"]) == 5 for row in rows)


@pytest.mark.slow
def test_a_chat_keeps_what_was_said(run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
  def chat(text: str) -> list[str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    outcome = run_cli(["generate", str(run), *TOKENIZER, "--max-new-tokens", "4"], capfd)
    assert outcome.code == 0, outcome.err
    return outcome.out.splitlines()

  first = chat("One\n\nTwo\n")
  again = chat("One\n/reset\nTwo\n/quit\nThree\n")
  assert first[0] == again[0]
  # With the first turn before it, the second is another prompt.
  assert first != again


@pytest.mark.slow
@pytest.mark.parametrize(
  ("extra", "code", "message"),
  [
    ((), 2, "names no tokenizer"),
    ((*TOKENIZER, "--stop", "two words"), 1, "stop token 'two words' is"),
    ((*TOKENIZER, "max_target_length=8"), 1, "no room in a context of 8"),
  ],
)
def test_what_the_model_does_not_allow(
  run: Path, extra: tuple[str, ...], code: int, message: str, capfd: pytest.CaptureFixture[str]
):
  outcome = run_cli(["generate", str(run), *extra, "--prompt", "What is the capital of France?"], capfd)
  assert (outcome.code, len(outcome.errors)) == (code, 1)
  assert message in outcome.errors[0]


@pytest.mark.slow
def test_no_such_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
  outcome = run_cli(["generate", str(tmp_path / "none"), "--prompt", "a"], capfd)
  assert outcome.code == 1
  assert "no such folder" in outcome.errors[0]
