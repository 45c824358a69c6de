"""Shared set-up: the CPU, one compilation cache for every test and every process a test starts."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
CACHE = REPOSITORY / ".cache" / "jax"

TABLE_HEAD = """\
# Who reads what whom wrote

Made by `make handback-matrix` (`tests/end_to_end/test_handback_matrix.py`): each writer trains the same tiny model,
each reader starts from its checkpoint for real and goes on. "everything" is weights, optimizer, rngs and step, compared
leaf by leaf with what lies on disk; "weights" is the weights, compared likewise. Pre-training's first loss is the one
computed from the writer's state in memory. By a run's name pre-training looks for `checkpoints/<step>`: there the steps
that GRPO wrote to `checkpoints/actor` are moved up first.

"""

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption("--handback-table", metavar="FILE", help="write which trainer read what, as a table")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  if importlib.util.find_spec("vllm") is not None:
    return
  there = (REPOSITORY / ".venv-vllm" / ".installed").exists()
  reason = "needs vLLM: " + ("make test-vllm" if there else ".venv-vllm is missing, make vllm-env makes it")
  for item in items:
    if item.get_closest_marker("vllm") is not None:
      item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def handback_table(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str, str, str], None]]:
  """Takes (layout, writer, reader, outcome) of each pair; at the end they are a table in the file asked for."""
  outcomes: dict[tuple[str, str, str], str] = {}

  def note(layout: str, writer: str, reader: str, outcome: str) -> None:
    outcomes[layout, writer, reader] = outcome

  yield note
  path = request.config.getoption("--handback-table")
  if path is None or not outcomes:
    return
  lines = []
  for layout in dict.fromkeys(key[0] for key in outcomes):
    readers = list(dict.fromkeys(key[2] for key in outcomes))
    lines += [f"## Layers {layout}", "", f"| written by | {' | '.join(readers)} |", "|---" * (len(readers) + 1) + "|"]
    for writer in dict.fromkeys(key[1] for key in outcomes):
      cells = [outcomes.get((layout, writer, reader), "FAILED") for reader in readers]
      lines.append(f"| {writer} | {' | '.join(cells)} |")
    lines.append("")
  Path(path).write_text(TABLE_HEAD + "\n".join(lines), encoding="utf-8")
