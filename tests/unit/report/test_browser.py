"""The page in a real browser: its curves are drawn, nothing goes wrong, nothing leaves the machine."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from maxtext_posttrain.report.page import write_page
from maxtext_posttrain.report.run_folder import RunFolder
from tests.support.browser import CHROMIUM, open_page
from tests.support.report_runs import HOSTILE, make_run, train_metrics

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here"), pytest.mark.slow]

_PROBE = """\
<script>
addEventListener("load", async () => {
  const root = document.documentElement;
  while (!root.dataset.drawn) await new Promise((done) => setTimeout(done, 50));
  const tooWide = (plot) => plot.querySelector(".main-svg").getBoundingClientRect().width > plot.clientWidth;
  root.dataset.cut = [...document.querySelectorAll(".plot")].filter(tooWide).length;
  root.dataset.overflow = root.scrollWidth - root.clientWidth;
  const box = document.querySelector("[data-log]");
  box.click();
  await new Promise((done) => setTimeout(done, 500));
  root.dataset.axis = document.getElementById("plot-0").layout.yaxis.type;
  const plot = document.getElementById("plot-0");
  Plotly.Fx.hover(plot, [{curveNumber: 0, pointNumber: 2}]);
  root.dataset.hover = [...plot.querySelectorAll(".hoverlayer text")].map((text) => text.textContent).join(" ");
});
</script>
"""


def _page(path: Path, *folders: Path) -> Path:
  write_page([RunFolder.read(folder) for folder in folders], path, ("sft",))
  return path


def _vertices(dom: str) -> list[list[int]]:
  """For each plot, the points of each of its lines; a legend's lines are drawn by another command, h."""
  figures = re.findall(r'<div class="plot[^>]*id="plot-\d+".*?</figure>', dom, re.DOTALL)
  lines = [re.findall(r'<path class="js-line"[^>]* d="([^h"]*)"', figure) for figure in figures]
  return [[len(re.findall(r"[ML]", line)) for line in figure] for figure in lines]


def test_curves_are_drawn_and_hostile_text_stays_text(tmp_path: Path):
  folder = make_run(tmp_path / "run", name=HOSTILE, metrics=train_metrics(57), config={HOSTILE: HOSTILE}, text=HOSTILE)
  opened = open_page(_page(tmp_path / "page.html", folder))
  assert opened.console == []
  assert opened.requests == []
  assert 'data-drawn="5"' in opened.dom
  # Loss with its two evaluations; learning rate; gradient norm; throughput; two waits.
  assert _vertices(opened.dom) == [[57, 2], [57], [57], [57], [57, 57]]
  (title,) = re.findall(r"<title>(.*?)</title>", opened.dom)
  assert html.unescape(title) == f"{HOSTILE} · post-training report"
  assert "<img src=" not in opened.dom


def test_what_a_page_fetches_would_be_seen(tmp_path: Path):
  (tmp_path / "page.html").write_text("<!doctype html><img src='http://example.invalid/a.png'><script>oops()</script>")
  opened = open_page(tmp_path / "page.html")
  assert opened.requests == ["http://example.invalid/a.png"]
  assert "oops is not defined" in "".join(opened.console)


def test_two_runs_on_a_narrow_screen(tmp_path: Path):
  metrics = [line for line in train_metrics(30) if line["step"] != 7]
  hostile = make_run(tmp_path / "b", name=HOSTILE, metrics=metrics)
  page = _page(tmp_path / "page.html", make_run(tmp_path / "a", metrics=train_metrics(20)), hostile)
  # The page's own policy lets no other script run: the probe takes its place.
  text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
  page.write_text(text.replace("</body>", f"{_PROBE}</body>"))
  opened = open_page(page, size="400,900")
  assert opened.console == []
  assert _vertices(opened.dom)[0] == [20, 2, 29, 2]
  assert 'data-overflow="0"' in opened.dom
  assert 'data-cut="0"' in opened.dom
  assert 'data-axis="log"' in opened.dom
  (hover,) = re.findall(r'data-hover="([^"]*)"', opened.dom)
  assert re.fullmatch(r"a, training\s*:?\s*1", hover)  # A loss of 3 at the third step is 3 / 3.
  (title,) = re.findall(r"<title>(.*?)</title>", opened.dom)
  assert title == "2 runs compared · post-training report"
  assert "<img src=" not in opened.dom
