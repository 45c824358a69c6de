"""Trainers and models in one process, as a notebook has them: several, one after another, while an event loop runs."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from maxtext_posttrain import DPO, SFT, Model
from maxtext_posttrain.errors import CheckpointError
from tests.conftest import REPOSITORY
from tests.support import runs

pytestmark = pytest.mark.slow

DATA = REPOSITORY / "configs" / "data"
SMALL: dict[str, Any] = {
  "base_emb_dim": 16,
  "base_mlp_dim": 32,
  "base_num_decoder_layers": 1,
  "max_target_length": 96,
  "enable_tensorboard": False,
  "steps": 2,
  "eval_interval": 2,
}
CHATS = {"hf_train_files": DATA / "quickstart_chat.jsonl", "hf_eval_files": DATA / "quickstart_chat_eval.jsonl"}
PAIRS = {"hf_train_files": DATA / "quickstart_pairs.jsonl", "hf_eval_files": DATA / "quickstart_pairs_eval.jsonl"}
QUESTIONS = ["What do bees make?", "Say hello in French."]


def sft(folder: Path, name: str, **keys: Any) -> SFT:
  return SFT("quickstart/sft.yml", **{**SMALL, **CHATS, "run_name": name, "base_output_directory": folder, **keys})


def test_what_ran_before_in_this_process_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
  async def cells() -> tuple[list[str], list[str]]:
    first = sft(tmp_path, "first").train()
    before = Model(first.path)
    answers = before.generate(QUESTIONS, max_new_tokens=4)
    preferred = DPO(
      "quickstart/dpo.yml",
      **{**SMALL, **PAIRS, "learning_rate": 0.1},
      run_name="preferred",
      base_output_directory=tmp_path,
      load_parameters_path=first.newest.items,
    ).train()
    assert preferred.last_step == 2
    assert Model(preferred.path).generate(QUESTIONS, max_new_tokens=4) != answers
    assert before.generate(QUESTIONS, max_new_tokens=4) == answers
    second = sft(tmp_path, "second").train()
    return answers, Model(second.path).generate(QUESTIONS, max_new_tokens=4)

  # A notebook's cells run while its kernel's event loop does.
  answers, again = asyncio.run(cells())
  assert again == answers
  assert runs.metrics(tmp_path / "first") == runs.metrics(tmp_path / "second")
  steps = [path / "checkpoints" / "2" for path in (tmp_path / "first", tmp_path / "second")]
  runs.assert_same_items(runs.items(steps[1]), runs.items(steps[0]))
  said = capsys.readouterr()
  assert said.out.count("step 2/2") == 3
  assert said.err == ""


def test_a_run_goes_on_and_is_done_once(tmp_path: Path):
  whole = sft(tmp_path, "whole", steps=3).train()
  parts = [sft(tmp_path, "parts", steps=steps, learning_rate_schedule_steps=3).train() for steps in (2, 3)]
  assert [run.last_step for run in parts] == [2, 3]
  done = sft(tmp_path, "parts", steps=3, learning_rate_schedule_steps=3).train()
  assert done.last_step == 3
  assert done.curve("train", "loss") == whole.curve("train", "loss")
  with pytest.raises(CheckpointError, match="beyond steps=2; raise steps"):
    sft(tmp_path, "parts").train()


def test_a_thread_may_train(tmp_path: Path):
  found = []
  thread = threading.Thread(target=lambda: found.append(sft(tmp_path, "thread").train().last_step))
  thread.start()
  thread.join()
  assert found == [2]
