"""The command line: exit codes, one line an error, and nothing heavy imported before it is needed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from maxtext_posttrain import __version__, cli
from maxtext_posttrain.commands import TRAINERS
from maxtext_posttrain.config import OUR_KEYS
from maxtext_posttrain.errors import ConfigError, DataError, TrainingError
from tests.conftest import REPOSITORY

ROOT = Path(__file__).parents[2]
HEAVY = ("jax", "jaxlib", "numpy", "transformers", "datasets", "maxtext", "pydantic", "omegaconf", "tensorflow", "flax")
GOOD = "run_name: r\nbase_output_directory: out\nsteps: 5\ndataset_type: synthetic\n"


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
  monkeypatch.chdir(tmp_path)
  (tmp_path / "c.yml").write_text(GOOD)
  return "c.yml"


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch):
  """Puts a base in place of the real one, without JAX; `does` is what it does instead of training."""
  from maxtext_posttrain import trainers

  def install(does):
    def run(objective, config, *, dry_run, compiles, prepared):
      return does(config, dry_run=dry_run, prepared=prepared)

    for name, value in (("base", {"run": run}), ("sft", {"SFT": object})):
      module = types.ModuleType(f"maxtext_posttrain.trainers.{name}")
      vars(module).update(value)
      monkeypatch.setitem(sys.modules, module.__name__, module)
      monkeypatch.setattr(trainers, name, module, raising=False)

  return install


def raising(error: BaseException):
  def main(config, *, dry_run, prepared):
    raise error

  return main


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]):
  assert cli.main(argv) == 0
  out = capsys.readouterr().out
  assert out.startswith("usage: posttrain TRAINER CONFIG")
  assert "sft" in out


def test_trainer_help_names_every_option_and_key_of_ours(capsys: pytest.CaptureFixture[str]):
  for trainer in ("sft", "dpo", "distill"):
    assert cli.main([trainer, "--help", "--nonsense"]) == 0
    out = capsys.readouterr().out
    for name in ("--dry-run", "--no-compile", "--print-config", "--debug"):
      assert f"  {name}" in out
    for name, key in OUR_KEYS.items():
      assert (f"  {name}: " in out) == (key.trainer in (None, trainer)), name


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainers_help_fits_a_page_and_its_example_is_there(trainer: str, capsys: pytest.CaptureFixture[str]):
  assert cli.main([trainer, "--help"]) == 0
  out = capsys.readouterr().out
  assert max(map(len, out.splitlines())) < 100
  (example,) = re.findall(r"configs/\S+\.yml", out)
  assert (REPOSITORY / example).is_file()


def test_version(capsys: pytest.CaptureFixture[str]):
  assert cli.main(["--version"]) == 0
  assert capsys.readouterr().out == f"maxtext-posttrain {__version__}\n"


def test_nothing_asked_for(capsys: pytest.CaptureFixture[str]):
  assert cli.main([]) == 2
  assert capsys.readouterr().err.startswith("usage: posttrain")


@pytest.mark.parametrize(
  ("argv", "line"),
  [
    (["sftt"], "error: sftt: no such command (posttrain --help lists them)"),
    (["sft"], "error: name a configuration: posttrain sft config.yml [key=value ...] (--help lists more)"),
    (["sft", "c.yml", "--no-compile"], "error: --no-compile: belongs to --dry-run; a run compiles its steps"),
    (["sft", "c.yml", "--dryrun"], "error: --dryrun: no such option (see posttrain sft --help)"),
    (["sft", "c.yml", "--steps=5"], "error: --steps=5: keys are given without dashes: steps=5"),
    (
      ["sft", "c.yml", "steps=x"],
      'error: command line: steps: expected a whole number of at least -1, got the text "x"',
    ),
  ],
)
def test_wrong_command_lines(argv: list[str], line: str, config_file: str, capsys: pytest.CaptureFixture[str]):
  assert cli.main(argv) == 2
  captured = capsys.readouterr()
  assert captured.err == line + "\n"
  assert captured.out == ""


@pytest.mark.parametrize("order", [["c.yml", "steps=9", "--dry-run"], ["--dry-run", "c.yml", "steps=9"]])
def test_trainer_gets_the_configuration(order: list[str], config_file: str, trainer):
  seen = {}

  def main(config, *, dry_run, prepared):
    seen.update(steps=config.steps, dry_run=dry_run)
    return 143

  trainer(main)
  assert cli.main(["sft", *order]) == 143
  assert seen == {"steps": 9, "dry_run": True}


def test_print_config_trains_nothing(config_file: str, trainer, capsys: pytest.CaptureFixture[str]):
  trainer(raising(AssertionError("trained")))
  assert cli.main(["sft", config_file, "--print-config", "hf_access_token=s3cret"]) == 0
  out = capsys.readouterr().out
  assert [line.split() for line in out.splitlines() if line.startswith("steps = ")] == [
    ["steps", "=", "5", "#", "c.yml"]
  ]
  assert "s3cret" not in out


@pytest.mark.parametrize(
  ("error", "code", "lines"),
  [
    (DataError("a.jsonl, line 3: is not JSON"), 1, ["error: a.jsonl, line 3: is not JSON"]),
    (ConfigError(["one", "two"]), 2, ["error: one", "error: two"]),
    (TrainingError(""), 1, ["error: TrainingError"]),
    (
      ValueError("wrong\n  shape"),
      1,
      ["error: internal: ValueError: wrong shape (run again with --debug for the traceback)"],
    ),
    (RuntimeError(), 1, ["error: internal: RuntimeError (run again with --debug for the traceback)"]),
    (KeyboardInterrupt(), 130, ["error: interrupted"]),
  ],
  ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_errors_are_lines(
  error: BaseException, code: int, lines: list[str], config_file: str, trainer, capsys: pytest.CaptureFixture[str]
):
  trainer(raising(error))
  assert cli.main(["sft", config_file]) == code
  assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.parametrize("error", [ValueError("wrong"), DataError("bad row"), KeyboardInterrupt()])
def test_debug_shows_the_traceback(error: BaseException, config_file: str, trainer, capsys: pytest.CaptureFixture[str]):
  trainer(raising(error))
  cli.main(["sft", config_file, "--debug"])
  err = capsys.readouterr().err
  assert "Traceback (most recent call last)" in err
  assert err.splitlines()[-1].startswith("error: ")
  assert "--debug for" not in err


def run(*arguments: str, cwd: Path = ROOT, **options) -> subprocess.CompletedProcess[str]:
  environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
  return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environ, capture_output=True, text=True, **options)


PROBE = f"""
import sys
from maxtext_posttrain import cli
code = cli.main(sys.argv[1:])
heavy = sorted(set(sys.modules) & set({HEAVY}))
assert not heavy, heavy
sys.exit(code)
"""


@pytest.mark.parametrize(
  ("argv", "code"),
  [
    (["--help"], 0),
    (["sft", "--help"], 0),
    (["sft", "configs/quickstart/sft.yml", "--print-config"], 0),
    (["sft", "configs/quickstart/sft.yml", "stpes=3"], 2),
  ],
)
def test_nothing_heavy_is_imported(argv: list[str], code: int):
  result = run("-c", PROBE, *argv)
  assert result.returncode == code, result.stderr
  assert "AssertionError" not in result.stderr


def test_python_m_train_sft_is_posttrain_sft():
  result = run("-m", "train_sft", "--help")
  assert (result.returncode, result.stderr) == (0, "")
  assert result.stdout == run("-m", "maxtext_posttrain.cli", "sft", "--help").stdout
  result = run("-m", "train_sft", "configs/quickstart/sft.yml", "steps=0")
  assert (result.returncode, result.stdout) == (2, "")
  assert result.stderr == "error: command line: steps=0: must be at least 1\n"


def test_reader_that_goes_away_leaves_no_traceback():
  script = f"{sys.executable} -m train_sft configs/quickstart/sft.yml --print-config | head -1"
  environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
  result = subprocess.run(["bash", "-c", script], cwd=ROOT, env=environ, capture_output=True, text=True)
  assert result.stdout.startswith("abort_on_inf_loss = true")
  assert result.stderr == ""
