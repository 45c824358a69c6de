"""The site builds strictly, holds what the code says, and asks for nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from maxtext_posttrain.commands import TOOLS, TRAINERS
from maxtext_posttrain.config import OUR_KEYS
from tests.conftest import REPOSITORY
from tests.support import browser

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="MkDocs is not installed"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
  folder = tmp_path_factory.mktemp("site")
  environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "NO_MKDOCS_2_WARNING": "1"}
  build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
  built = subprocess.run(build, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
  assert built.returncode == 0, built.stderr
  return folder


def test_every_key_and_command_is_there(site: Path):
  keys = (site / "configuration.html").read_text(encoding="utf-8")
  assert all(f'<code id="{name}">' in keys for name in OUR_KEYS)
  assert '<code id="adam_b1">' in (site / "configuration_maxtext.html").read_text(encoding="utf-8")
  commands = (site / "commands.html").read_text(encoding="utf-8")
  assert all(f"posttrain {name}" in commands for name in (*TRAINERS, *TOOLS))
  assert "RowDataset" in (site / "api" / "data.html").read_text(encoding="utf-8")


def test_what_has_no_page_is_named_by_its_path(site: Path):
  home = (site / "index.html").read_text(encoding="utf-8")
  assert "see <code>LICENSE</code>" in home
  assert "<code>notebooks/sft.ipynb</code>" in home


def test_names_in_tables_break_between_their_words(site: Path):
  assert "<code>nonfinite_<wbr>gradients=<wbr>skip</code>" in (site / "sft.html").read_text(encoding="utf-8")


def test_nothing_is_left_to_be_filled_in(site: Path):
  for page in site.rglob("*.html"):
    assert "<!-- generated" not in page.read_text(encoding="utf-8"), page


def test_no_page_loads_from_elsewhere(site: Path):
  for page in site.rglob("*.html"):
    text = page.read_text(encoding="utf-8")
    loaded = re.findall(r'<(?:script|img|iframe)[^>]*src="(https?:[^"]*)"', text)
    loaded += re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect|preload)"[^>]*href="(https?:[^"]*)"', text)
    assert not loaded, page


@pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("page", ["index.html", "architecture.html", "configuration.html"])
def test_a_browser_opens_it_in_peace(site: Path, page: str):
  opened = browser.open_page(site / page)
  assert not opened.requests
  assert not [line for line in opened.console if "ERROR" in line]
