"""The wheel, installed into an environment of its own: every entry point works from another folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from maxtext_posttrain import __version__
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow

UV = Path(sys.executable).parent / "uv"
PROGRAMS = ("train_sft", "train_dpo", "train_distill", "train_grpo", "train_rl")


@dataclass(frozen=True)
class Installed:
  """An environment with the wheel and, behind it, this environment's other packages."""

  wheel: Path
  python: Path
  elsewhere: Path

  def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder that is not the repository, as a user would."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(command, cwd=self.elsewhere, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
  folder = tmp_path_factory.mktemp("wheel")
  built, environment, elsewhere = folder / "dist", folder / "env", folder / "elsewhere"
  elsewhere.mkdir()
  build = [UV, "build", "--quiet", "--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", built]
  subprocess.run([*build, REPOSITORY], check=True)
  (wheel,) = built.glob("*.whl")
  python = environment / "bin" / "python"
  subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, environment], check=True)
  install = [UV, "pip", "install", "--quiet", "--no-deps", "--no-index", "--python", python, wheel]
  subprocess.run(install, check=True)
  (packages,) = environment.glob("lib/python*/site-packages")
  (packages / "others.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n", encoding="utf-8")
  return Installed(wheel, python, elsewhere)


def test_the_wheel_holds_configurations_templates_and_programs(installed: Installed):
  names = set(zipfile.ZipFile(installed.wheel).namelist())
  for folder, inside in (("configs", "maxtext_posttrain/configs"), ("src", "")):
    for path in (REPOSITORY / folder).rglob("*"):
      if path.is_file() and path.suffix in (".py", ".yml", ".jsonl", ".jinja", ".json"):
        assert (Path(inside) / path.relative_to(REPOSITORY / folder)).as_posix() in names
  assert not [name for name in names if name.startswith(("tests", "docs", "scripts", "benchmarks"))]


def test_it_is_the_installed_package_that_runs(installed: Installed):
  told = installed.run(installed.python, "-c", "import maxtext_posttrain as package; print(package.__file__)")
  assert Path(told.stdout.strip()).is_relative_to(installed.python.parents[1]), told.stderr
  told = installed.run(installed.python.parent / "posttrain", "--version")
  assert (told.returncode, told.stdout) == (0, f"maxtext-posttrain {__version__}\n")


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_answers(installed: Installed, program: str):
  told = installed.run(installed.python, "-m", program, "--help")
  assert told.returncode == 0, told.stderr
  assert "usage: posttrain" in told.stdout


def test_a_configuration_is_found_in_the_wheel(installed: Installed):
  keys = ["run_name=a", "base_output_directory=out", "steps=1", "dataset_type=synthetic"]
  posttrain = installed.python.parent / "posttrain"
  told = installed.run(posttrain, "sft", "sft.yml", *keys, "--print-config")
  assert told.returncode == 0, told.stderr
  assert "configs/sft.yml" in told.stdout


def test_a_template_is_found_in_the_wheel(installed: Installed):
  code = "from maxtext_posttrain.tokenizers.chat_template import builtin_names as names; print(*names())"
  told = installed.run(installed.python, "-c", code)
  assert {"llama2", "llama3", "gemma", "mistral", "chatml", "plain"} <= set(told.stdout.split()), told.stderr
