"""`posttrain doctor` with no vLLM, with one that can't be imported, and with the real one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.support.cli import Outcome, run_cli


def section(outcome: Outcome, title: str) -> list[str]:
  """The lines below a title."""
  lines = outcome.out.splitlines()
  start = lines.index(title) + 1
  rest = [index for index, line in enumerate(lines[start:], start) if not line.startswith("  ")]
  return [line.strip() for line in lines[start : rest[0] if rest else None]]


def hide_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
  find_spec = importlib.util.find_spec
  hidden = ("vllm", "tpu_inference")
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else find_spec(name))


def test_without_vllm(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
  hide_vllm(monkeypatch)
  outcome = run_cli(["doctor"], capfd)
  assert outcome.code == 0, outcome.err
  versions = dict(line.split(maxsplit=1) for line in section(outcome, "versions"))
  assert versions["maxtext"] == "0.2.5"
  assert versions["vllm"] == "-"
  assert "JAX: 1 cpu device (cpu)" in section(outcome, "devices")
  assert section(outcome, "patches of vLLM") == ["none: vLLM is not installed"]
  native, vllm = section(outcome, "engines")
  assert native.startswith("native: MaxText's own model on 1 cpu device")
  assert vllm.startswith("vllm: can't run: vLLM is not installed; pip install")


def test_with_a_vllm_that_cannot_be_imported(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
  (tmp_path / "vllm").mkdir()
  (tmp_path / "vllm" / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open\\nand more')\n")
  monkeypatch.syspath_prepend(tmp_path)
  for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
    monkeypatch.delitem(sys.modules, name)
  outcome = run_cli(["doctor"], capfd)
  assert outcome.code == 0, outcome.err
  assert section(outcome, "patches of vLLM") == [
    "unknown: vLLM can't be imported: OSError: libcudart.so.13: cannot open"
  ]
  assert section(outcome, "engines")[1].endswith("can't be imported: OSError: libcudart.so.13: cannot open")


def test_help_and_mistakes(capfd: pytest.CaptureFixture[str]):
  outcome = run_cli(["doctor", "--fast"], capfd)
  assert (outcome.code, len(outcome.errors)) == (2, 1)


@pytest.mark.vllm
@pytest.mark.slow
def test_with_vllm(capfd: pytest.CaptureFixture[str]):
  outcome = run_cli(["doctor"], capfd)
  assert outcome.code == 0, outcome.err
  (dropped, patches) = section(outcome, "patches of vLLM")
  assert dropped.startswith("engine arguments that it has no more: swap_space_vllm_gb (swap_space)")
  assert patches.startswith("none: tpu-inference is not installed")
  assert "on cpu in the trainer's process" in section(outcome, "engines")[1]
