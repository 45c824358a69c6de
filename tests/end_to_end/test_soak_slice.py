"""A few minutes of the soak: kills, faults of the disk, mutated input, random conversations."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.soak import main

pytestmark = pytest.mark.slow


def test_a_slice_of_the_soak_finds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
  code = main(["--slice", "ci", "--minutes", "4", "--folder", str(tmp_path)])
  said = capsys.readouterr().out
  assert code == 0, said[-8000:]
  assert "none failed" in said
