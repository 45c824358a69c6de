"""Which weights and which configuration a path names."""

from pathlib import Path

import pytest

from maxtext_posttrain.errors import CheckpointError, ConfigError
from maxtext_posttrain.models.source import find_items, find_source


@pytest.fixture
def run(tmp_path: Path) -> Path:
  run = tmp_path / "run"
  for step in (2, 10):
    (run / "checkpoints" / str(step) / "items").mkdir(parents=True)
  (run / "checkpoints" / "12").mkdir()  # killed before its items were there
  (run / "config.yml").write_text("steps: 10\n")
  return run


@pytest.mark.parametrize(
  ("named", "step"),
  [
    ("", 10),
    ("checkpoints", 10),
    ("checkpoints/", 10),
    ("checkpoints/2", 2),
    ("checkpoints/2/items", 2),
    ("checkpoints/2/items/", 2),
  ],
)
def test_a_path_names_the_newest_step_below_it(run: Path, named: str, step: int):
  source = find_source(f"{run}/{named}")
  assert str(source.items) == str(run / "checkpoints" / str(step) / "items")
  assert (source.step, source.config) == (step, run / "config.yml")


def test_a_relative_path_becomes_absolute(run: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.chdir(run.parent)
  source = find_source("run")
  assert str(source.items) == str(run / "checkpoints" / "10" / "items")
  assert source.config == run / "config.yml"


def test_the_actor_of_a_reinforcement_learning_run(tmp_path: Path):
  items = tmp_path / "checkpoints" / "actor" / "3" / "items"
  items.mkdir(parents=True)
  assert str(find_items(str(tmp_path))) == str(items)


def test_an_import_has_its_configuration_beside_its_step(tmp_path: Path):
  (tmp_path / "0" / "items").mkdir(parents=True)
  (tmp_path / "model.yml").write_text("vocab_size: 8\n")
  assert find_source(str(tmp_path)).config == tmp_path / "model.yml"


def test_a_named_configuration_wins(run: Path, tmp_path: Path):
  other = tmp_path / "other.yml"
  other.write_text("vocab_size: 8\n")
  assert find_source(str(run), str(other)).config == other


def test_paths_without_weights(run: Path, tmp_path: Path):
  (tmp_path / "empty").mkdir()
  (tmp_path / "file").write_text("x")
  for name, message in {
    "nowhere": "no such folder",
    "file": "is a file",
    "empty": "holds no checkpoint in MaxText's layout",
    "run/checkpoints/12": "holds no checkpoint in MaxText's layout",
  }.items():
    with pytest.raises(CheckpointError, match=message) as caught:
      find_source(str(tmp_path / name))
    assert str(caught.value).startswith(str(tmp_path / name))


def test_weights_without_a_configuration(run: Path):
  (run / "config.yml").unlink()
  with pytest.raises(ConfigError, match="name the configuration with --config FILE"):
    find_source(str(run))
  with pytest.raises(ConfigError, match=r"gone.yml: no such file"):
    find_source(str(run), "gone.yml")
