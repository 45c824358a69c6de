"""What is kept off the screen, and what is not."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from maxtext_posttrain.logs import quiet_late_writes


@pytest.mark.parametrize(
  ("error", "show", "told"),
  [
    (RuntimeError("Event loop is closed"), False, False),
    (RuntimeError("Event loop is closed"), True, True),
    (RuntimeError("another"), False, True),
    (ValueError("Event loop is closed"), False, True),
  ],
)
def test_late_writes_alone_are_kept_off(error: Exception, show: bool, told: bool, monkeypatch: pytest.MonkeyPatch):
  said: list[Any] = []
  monkeypatch.setattr(sys, "unraisablehook", said.append)
  before = sys.unraisablehook
  unraisable: Any = SimpleNamespace(exc_value=error)
  with quiet_late_writes(show=show):
    sys.unraisablehook(unraisable)
  assert said == ([unraisable] if told else [])
  assert sys.unraisablehook is before
