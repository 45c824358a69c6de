"""What a run says at its end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from maxtext_posttrain.trainers import plan


def said_at_the_end(folder: Path, capsys: pytest.CaptureFixture[str], *, done: int) -> list[str]:
  session: Any = SimpleNamespace(
    config=SimpleNamespace(enable_checkpointing=True),
    maxtext=SimpleNamespace(steps=6, run_name="r", enable_checkpointing=True),
    objective=SimpleNamespace(name="sft", checkpoint_role=""),
    checkpoint_directory=f"{folder}/",
    run_directory=folder,
    lora=None,
  )
  reporter: Any = SimpleNamespace(last={})
  plan.print_end(session, reporter, done=done, exhausted=False, stopped=done < 6)
  return capsys.readouterr().out.splitlines()


def test_a_checkpoint_that_is_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
  (tmp_path / "6").mkdir()
  first, second, third = said_at_the_end(tmp_path, capsys, done=6)
  assert first == "sft ended at step 6 of 6 (all steps done)"
  assert second == f"checkpoint: {tmp_path}/6/items"
  assert f"load_full_state_path={tmp_path}/6/items" in third


def test_a_run_stopped_before_its_first_update_names_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
  assert said_at_the_end(tmp_path, capsys, done=0) == [
    "sft ended at step 0 of 6 (stopped by a signal)",
    "no checkpoint of step 0 was written",
  ]
