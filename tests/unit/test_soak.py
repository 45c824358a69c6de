"""The soak's own book-keeping: it goes on where it ended, counts what failed, and says how to make that again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.soak import Soak
from tests.support.chat_samples import TEMPLATES
from tests.support.soak import mutate
from tests.support.soak.cases import Bench, FaultFoundError, Outcome, Part, require
from tests.support.soak.ledger import Ledger, Record, code_digest, figures

ROWS: Sequence[Any] = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}] * 4


class Fake:
  """A part whose cases draw a number and, where told so, fail."""

  def __init__(self, fails: Sequence[int] = ()):
    self.fails = fails
    self.made: list[int] = []
    self.drawn: dict[int, float] = {}

  def part(self, name: str = "fake") -> Part:
    return Part(name, 6, 3, self.run)

  def run(self, bench: Bench) -> Outcome:
    self.made.append(bench.case)
    self.drawn[bench.case] = bench.random().random()
    (bench.folder / "file").write_text("x")
    require(bench.case not in self.fails, "wrong")
    return Outcome("right", {"things": 2})


def soak(folder: Path, *, seed: int = 0, code: str = "c") -> tuple[Soak, Ledger]:
  book = Ledger(folder / "cases.jsonl", seed=seed, code=code)
  return Soak(folder, book, seed=seed, code=code), book


def test_a_second_call_makes_what_is_missing(tmp_path: Path):
  fake = Fake()
  first, _ = soak(tmp_path)
  assert first.run({"fake": fake.part()}, {"fake": 3}, seconds=60)
  assert fake.made == [0, 1, 2]
  again, book = soak(tmp_path)
  assert again.run({"fake": fake.part()}, {"fake": 6}, seconds=60)
  assert fake.made == [0, 1, 2, 3, 4, 5]
  assert len(book.records()) == 6
  other, _ = soak(tmp_path, code="other code")
  assert other.run({"fake": fake.part()}, {"fake": 1}, seconds=60)
  assert fake.made == [0, 1, 2, 3, 4, 5, 0]


def test_no_case_begins_after_the_time(tmp_path: Path):
  fake = Fake()
  runner, _ = soak(tmp_path)
  assert not runner.run({"fake": fake.part()}, {"fake": 3}, seconds=-1)
  assert fake.made == []


def test_the_part_furthest_behind_is_next(tmp_path: Path):
  order: list[str] = []

  def run(bench: Bench) -> Outcome:
    order.append(bench.part)
    return Outcome("right")

  runner, _ = soak(tmp_path)
  runner.run({name: Part(name, 0, 0, run) for name in ("few", "many")}, {"few": 2, "many": 4}, seconds=60)
  assert order == ["few", "many", "many", "few", "many", "many"]


def test_a_case_is_the_same_when_it_is_made_alone(tmp_path: Path):
  together, alone = Fake(), Fake()
  soak(tmp_path / "a")[0].run({"fake": together.part()}, {"fake": 3}, seconds=60)
  soak(tmp_path / "b")[0].make(alone.part(), 2)
  assert alone.drawn[2] == together.drawn[2]
  assert len(set(together.drawn.values())) == 3
  other = Fake()
  soak(tmp_path / "c", seed=1)[0].make(other.part(), 2)
  assert other.drawn[2] != alone.drawn[2]


def test_a_failure_is_told_with_its_command_and_its_files_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
  runner, book = soak(tmp_path, seed=7)
  runner.run({"fake": Fake(fails=[1]).part()}, {"fake": 3}, seconds=60)
  assert [record.failed for record in book.records()] == [False, True, False]
  assert "fake 1: FAILED: wrong" in capsys.readouterr().out
  lines = figures(book, {"fake": 3})
  assert lines[0].startswith("fake: 3 of 3 cases")
  assert lines[1:] == [
    "       2  right",
    "       1  FAILED",
    "  4 things",
    "1 failed",
    "  fake 1: wrong",
    "    python -m scripts.soak --seed 7 --part fake --case 1",
  ]
  assert [path.name for path in (tmp_path / "cases").iterdir()] == ["fake-1"]
  runner.make(Fake().part(), 1)
  assert figures(book, {"fake": 3})[-1] == "none failed"


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path):
  path = tmp_path / "cases.jsonl"
  record = Record("fake", 0, 0, "c", "right", False, 1.0)
  Ledger(path, seed=0, code="c").add(record)
  with path.open("a") as file:
    file.write('{"part": "fa')
  Ledger(path, seed=0, code="c").add(Record("fake", 1, 0, "c", "right", False, 1.0))
  assert Ledger(path, seed=0, code="c").done("fake") == {0, 1}


def test_the_digest_is_of_the_code(tmp_path: Path):
  (tmp_path / "a.py").write_text("1")
  before = code_digest([tmp_path])
  (tmp_path / "a.pyc").write_text("2")
  assert code_digest([tmp_path]) == before
  (tmp_path / "a.py").write_text("2")
  assert code_digest([tmp_path]) != before


def test_require_raises_what_the_soak_counts():
  require(True, "not raised")
  with pytest.raises(FaultFoundError, match="this"):
    require(False, "this")


def test_mutations_are_the_seeds_and_mostly_changes():
  from importlib import resources

  templates = resources.files("maxtext_posttrain.tokenizers").joinpath("templates")
  text = "steps: 1\nrun_name: r\nlearning_rate: 1.e-3\n"
  source = templates.joinpath(f"{TEMPLATES[0]}.jinja").read_text()

  def made(seed: int) -> tuple[bytes, tuple[str, bytes], bytes]:
    chance = random.Random(seed)
    return (
      mutate.configuration(chance, text, {"steps": {"type": "integer"}, "lora.lora_rank": {"type": "integer"}}),
      mutate.rows(chance, ROWS),
      mutate.template(chance, source),
    )

  many = [made(seed) for seed in range(200)]
  assert many == [made(seed) for seed in range(200)]
  assert sum(each[0] != text.encode() for each in many) > 180
  assert sum(each[2] != source.encode() for each in many) > 180
  assert len({each[1] for each in many}) > 150
