"""Reward functions in processes of their own: what they do wrong costs their scores and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from maxtext_posttrain.errors import RewardError
from maxtext_posttrain.rewards import pool as pool_module
from maxtext_posttrain.rewards.pool import RewardPool
from maxtext_posttrain.rewards.sample import RewardSample, RewardSettings

BAD = """
import os, sys, time
import numpy as np

def length(prompts, completions, answers):
  print("a line on standard output")
  return [float(len(each)) for each in completions]

def arrays(prompts, completions, answers):
  return np.arange(len(completions), dtype=np.float32)

def sometimes(prompts, completions, answers):
  if prompts[0] == "second":
    raise ValueError("no\\nnumber")
  return [1] * len(prompts)

def hang(prompts, completions, answers):
  time.sleep(1000)

def spin(prompts, completions, answers):
  while True:
    pass

def brief(prompts, completions, answers):
  time.sleep(0.3)
  return [2.0] * len(prompts)

def die(prompts, completions, answers):
  os._exit(7)

def leave(prompts, completions, answers):
  sys.exit(3)

def nan(prompts, completions, answers):
  return [float("nan")] * len(prompts)

def infinite(prompts, completions, answers):
  return [1.0, float("inf")][: len(prompts)]

def short(prompts, completions, answers):
  return [1.0]

def long(prompts, completions, answers):
  return [1.0] * 5

def text(prompts, completions, answers):
  return "11"

def nothing(prompts, completions, answers):
  return None

def words(prompts, completions, answers):
  return ["1"] * len(prompts)

def recursion(prompts, completions, answers):
  return recursion(prompts, completions, answers)

def memory(prompts, completions, answers):
  raise MemoryError

not_callable = 3
"""


def sample(prompt: str, completion: str) -> RewardSample:
  return RewardSample(prompt, completion, "4", 3, False)


GROUPS = [[sample("first", "4"), sample("first", "it is 5")], [sample("second", "4"), sample("second", "four")]]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
  path = tmp_path_factory.mktemp("rewards") / "mine.py"
  path.write_text(BAD)
  return str(path)


def pool_of(file: str, *names: str, **options) -> RewardPool:
  weights = {"exact_answer": 1.0, **{f"{file}:{name}": 0.5 for name in names}}
  return RewardPool(weights, RewardSettings(), **{"workers": 2, "time_limit": 20.0, "failure_score": -1.0, **options})


@pytest.fixture(scope="module")
def pool(file: str) -> Iterator[RewardPool]:
  good, bad = "length arrays sometimes", "die leave nan infinite short long text nothing words recursion memory"
  names = f"{good} {bad}".split()
  pool = pool_of(file, *names)
  yield pool
  pool.close()


def test_scores_in_order_and_bad_calls_counted(file: str, pool: RewardPool):
  scores = pool.score(GROUPS)
  by_name = {name.rpartition(":")[2]: values.tolist() for name, values in scores.by_function.items()}
  failures = {name.rpartition(":")[2]: count for name, count in scores.failures.items()}
  assert by_name["exact_answer"] == [1, 0, 1, 0]
  assert by_name["length"] == [1, 7, 1, 4]
  assert by_name["arrays"] == [0, 1, 0, 1]
  assert by_name["sometimes"] == [1, 1, -1, -1]
  assert failures == {"exact_answer": 0, "length": 0, "arrays": 0, "sometimes": 1} | {
    name: 2 for name in by_name if name not in ("exact_answer", "length", "arrays", "sometimes")
  }
  for name, count in failures.items():
    if count == 2:
      assert by_name[name] == [-1] * 4, name
  errors = {name.rpartition(":")[2]: text for name, text in scores.first_errors.items()}
  assert errors["sometimes"] == "ValueError: no number"
  assert errors["die"] == "its process ended (exit code 7)"
  assert errors["nan"] == "ValueError: it returned nan, not a finite number"
  assert errors["short"] == "ValueError: it returned 1 numbers for 2 completions"
  assert errors["long"] == "ValueError: it returned 5 numbers for 2 completions"
  assert errors["nothing"] == "ValueError: it returned NoneType, not a list of numbers"
  assert errors["recursion"].startswith("RecursionError")
  assert all("\n" not in text for text in errors.values())
  expected = sum((1.0 if name == "exact_answer" else 0.5) * np.array(values) for name, values in by_name.items())
  np.testing.assert_allclose(scores.rewards, expected)


def test_the_same_pool_goes_on_working(pool: RewardPool):
  assert pool.score(GROUPS[:1]).by_function["exact_answer"].tolist() == [1, 0]
  assert pool.score([]).rewards.tolist() == []
  assert pool.score([[], GROUPS[0]]).rewards.shape == (2,)


def test_a_call_that_hangs_is_ended_in_time(file: str):
  pool = pool_of(file, "hang", "spin", "length", time_limit=0.6)
  try:
    started = time.monotonic()
    scores = pool.score(GROUPS)
    assert time.monotonic() - started < 15
  finally:
    pool.close()
  assert {name.rpartition(":")[2]: count for name, count in scores.failures.items()} == {
    "exact_answer": 0, "hang": 2, "spin": 2, "length": 0,
  }  # fmt: skip
  assert scores.first_errors[f"{file}:hang"] == "it took longer than 0.6 s"
  assert scores.by_function[f"{file}:length"].tolist() == [1, 7, 1, 4]


def test_an_answer_in_time_counts_though_another_process_was_started_again_meanwhile(
  file: str, monkeypatch: pytest.MonkeyPatch
):
  restart = pool_module._Worker.restart

  def slow_restart(worker: pool_module._Worker) -> None:
    time.sleep(1.5)
    restart(worker)

  monkeypatch.setattr(pool_module._Worker, "restart", slow_restart)
  weights = {f"{file}:die": 1.0, f"{file}:brief": 1.0}
  pool = RewardPool(weights, RewardSettings(), workers=2, time_limit=1.0)
  try:
    scores = pool.score(GROUPS[:1])
  finally:
    pool.close()
  assert scores.failures == {f"{file}:die": 1, f"{file}:brief": 0}
  assert scores.by_function[f"{file}:brief"].tolist() == [2, 2]


@pytest.mark.parametrize(
  ("name", "source", "says"),
  [
    ("gone.py:f", None, "no such file"),
    ("syntax.py:f", "def f(:", "SyntaxError"),
    ("raises.py:f", "raise ValueError('at import')", "ValueError: at import"),
    ("exits.py:f", "import sys; sys.exit(1)", "SystemExit"),
    ("import_.py:f", "import no_such_module_at_all", "No module named"),
    ("lacks.py:f", "x = 1", "has no function f"),
    ("value.py:f", "f = 1", "has no function f"),
    ("dies.py:f", "import os; os._exit(9)", "its process ended (exit code 9)"),
  ],
)
def test_functions_that_cannot_be_had_end_the_run_at_its_start(
  tmp_path: Path, name: str, source: str | None, says: str
):
  if source is not None:
    (tmp_path / name.split(":")[0]).write_text(source)
  with pytest.raises(RewardError) as refused:
    RewardPool({f"{tmp_path}/{name}": 1.0}, RewardSettings(), workers=1)
  assert says in str(refused.value)
  assert "\n" not in str(refused.value)
