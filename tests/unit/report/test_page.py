"""The page: what it tells, and that what a run brought is text in it."""

from __future__ import annotations

import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from maxtext_posttrain.commands import TRAINERS
from maxtext_posttrain.report.charts import plots, thin
from maxtext_posttrain.report.figures import duration, figure_table, readable_bytes
from maxtext_posttrain.report.next_commands import next_commands
from maxtext_posttrain.report.page import render
from maxtext_posttrain.report.run_file import RunRecord
from maxtext_posttrain.report.run_folder import Curve, RunFolder
from tests.support.report_runs import HOSTILE, make_run, train_metrics

AVAILABLE = ("sft", "eval", "export", "generate")


class Page(HTMLParser):
  """Tags with their attributes, all text outside scripts and styles, and each script's text."""

  def __init__(self, text: str):
    super().__init__()
    self.tags: list[tuple[str, dict[str, str | None]]] = []
    self.text = ""
    self.scripts: list[str] = []
    self.cells: list[list[str]] = []
    self._inside: list[str] = []
    self.feed(text)

  def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
    self.tags.append((tag, dict(attrs)))
    self._inside.append(tag)
    if tag == "script":
      self.scripts.append("")
    if tag == "tr":
      self.cells.append([])
    if tag in ("td", "th"):
      self.cells[-1].append("")

  def handle_endtag(self, tag: str) -> None:
    while self._inside and self._inside.pop() != tag:
      pass

  def handle_data(self, data: str) -> None:
    if "script" in self._inside:
      self.scripts[-1] += data
    elif "style" not in self._inside:
      self.text += data
      if self.cells and {"td", "th"} & set(self._inside):
        self.cells[-1][-1] += data

  def of(self, tag: str) -> list[dict[str, str | None]]:
    return [attributes for name, attributes in self.tags if name == tag]


def page(*folders: Path) -> Page:
  return Page(render([RunFolder.read(folder) for folder in folders], AVAILABLE))


@pytest.mark.parametrize("compared", [False, True])
def test_what_a_run_brings_is_text(tmp_path: Path, compared: bool):
  metrics = [{**line, HOSTILE: 1.0} for line in train_metrics(3)]
  hostile = make_run(tmp_path / "a", name=HOSTILE, metrics=metrics, config={HOSTILE: HOSTILE}, text=HOSTILE)
  folders = [hostile, make_run(tmp_path / "b", config={HOSTILE: "other"})] if compared else [hostile]
  shown = page(*folders)
  assert len(shown.scripts) == 3
  assert not shown.of("img")
  assert not [name for _, attributes in shown.tags for name in attributes if name.startswith("on")]
  # Heading, and where one run is shown: facts, data source, reason, two rows, sample, configuration key and value.
  assert shown.text.count(HOSTILE) >= (3 if compared else 9)
  (policy,) = (meta["content"] for meta in shown.of("meta") if meta.get("http-equiv"))
  assert policy is not None
  assert policy.startswith("default-src 'none'; script-src 'sha256-")
  assert "49" not in re.findall(r"onerror[^{]*(\S+)&", shown.text)
  panels = json.loads(shown.scripts[0])
  assert panels[-1]["title"] == HOSTILE  # A metric of this name, which has a panel of its own.
  assert all("<" not in trace["name"] for panel in panels for trace in panel["traces"])


def test_nothing_is_fetched(tmp_path: Path):
  shown = page(make_run(tmp_path / "a"))
  addresses = [
    (tag, name, value)
    for tag, attributes in shown.tags
    for name, value in attributes.items()
    if name in ("src", "href", "action", "data", "poster", "srcset")
  ]
  assert addresses == [("link", "href", "data:,")]
  (style,) = re.findall(r"<style>(.*?)</style>", render([RunFolder.read(tmp_path / "a")], AVAILABLE), re.DOTALL)
  assert "url(" not in style
  assert "@import" not in style


def test_a_page_for_readers_of_every_kind(tmp_path: Path):
  shown = page(make_run(tmp_path / "a", checkpoints={4: 10}))
  assert shown.of("html")[0]["lang"] == "en"
  assert len(shown.of("title")) == len(shown.of("h1")) == len(shown.of("main")) == 1
  drawn = [tag for tag in shown.of("div") if tag.get("role") == "img"]
  assert drawn[0]["aria-label"] == (
    "Loss. training: 3 at first, 0.75 at last, step 4; held out: 3 at first, 1.5 at last, step 4"
  )
  ids = [attributes["id"] for _, attributes in shown.tags if "id" in attributes]
  assert len(ids) == len(set(ids))
  labels = [attributes["aria-labelledby"] for _, attributes in shown.tags if "aria-labelledby" in attributes]
  assert set(labels) <= set(ids)


def test_one_run_is_told_whole(tmp_path: Path):
  shown = page(make_run(tmp_path / "a", checkpoints={2: 1536, 4: 2048}))
  assert ["2", "1.5 KiB"] in shown.cells
  assert ["4", "2.0 KiB"] in shown.cells
  assert ["steps", "4", "command line"] in shown.cells
  assert ["logical_axis_rules", "[]", "base.yml"] in shown.cells
  assert ["text", "2", "texttext"] in shown.cells
  assert shown.text.index("steps") < shown.text.index("Defaults, 1 keys") < shown.text.index("logical_axis_rules")
  assert len(shown.of("mark")) == 2  # The hint's and the sample's.
  panels = json.loads(shown.scripts[0])
  assert [panel["title"] for panel in panels] == ["Loss", "Learning rate", "Gradient norm", "Throughput", "Waits"]
  training, held_out = panels[0]["traces"]
  assert (training["x"], training["y"]) == ([1, 2, 3, 4], [3.0, 1.5, 1.0, 0.75])
  assert (held_out["x"], held_out["y"]) == ([0, 4], [3.0, 1.5])


def test_runs_are_compared_by_what_differs(tmp_path: Path):
  one = make_run(tmp_path / "one", config={"learning_rate": "1e-3", "seed": "1"})
  two = make_run(tmp_path / "two", config={"learning_rate": "2e-3", "seed": "1"}, metrics=train_metrics(2, loss=5.0))
  shown = page(one, two)
  assert ["learning_rate", "1e-3", "2e-3"] in shown.cells
  assert ["run_name", "one", "two"] in shown.cells
  assert not [row for row in shown.cells if row[0] in ("seed", "steps")]
  assert ["Training loss at last", "0.7500", "2.5000"] in shown.cells
  loss = json.loads(shown.scripts[0])[0]
  assert [trace["name"] for trace in loss["traces"]] == [
    "one, training",
    "one, held out",
    "two, training",
    "two, held out",
  ]


def test_runs_of_one_name_are_told_apart(tmp_path: Path):
  shown = page(make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run"))
  assert f"run ({tmp_path}/a/run)" in shown.text
  assert f"run ({tmp_path}/b/run)" in shown.text


def test_metrics_alone_make_a_page(tmp_path: Path):
  folder = make_run(tmp_path / "older")
  (folder / "run.json").unlink()
  shown = page(folder)
  assert "holds no run.json" in shown.text
  assert json.loads(shown.scripts[0])


def test_a_run_without_an_update_makes_a_page(tmp_path: Path):
  shown = page(make_run(tmp_path / "new", metrics=[]))
  assert "No update has been reported yet" in shown.text
  assert json.loads(shown.scripts[0]) == []


def test_values_that_are_no_numbers_leave_gaps(tmp_path: Path):
  odd: list[Any] = [1.0, None, float("nan"), 10**400, 2]
  metrics = [{"kind": "train", "step": step, "loss": value} for step, value in enumerate(odd, start=1)]
  metrics.append({"kind": "train", "step": 6, "loss": "low", "note": "text", "flag": True})
  run = RunFolder.read(make_run(tmp_path / "a", metrics=metrics))
  assert run.curve("train", "loss") == Curve([1, 2, 5], [1.0, None, 2.0])
  (panel,) = plots([run], ["a"])
  json.dumps(panel, allow_nan=False)


def test_a_colour_means_the_same_in_each_panel(tmp_path: Path):
  held_out = [{"kind": "eval", "step": 0, "margin": 0.0, "accuracy": 0.5}]
  trained = [{"kind": "train", "step": 1, "margin": 1.0, "loss": 2.0}]
  panels = plots([RunFolder.read(make_run(tmp_path / "a", metrics=held_out + trained))], ["a"])
  shown = {panel["title"]: {trace["name"]: trace["series"] for trace in panel["traces"]} for panel in panels}
  assert shown == {"Loss": {"training": 0}, "margin": {"training": 0, "held out": 1}, "accuracy": {"held out": 1}}


def test_a_loss_is_said_to_be_the_mean_that_its_trainer_takes(tmp_path: Path):
  def unit(*trainers: str) -> str:
    runs = [RunFolder.read(make_run(tmp_path / trainer)) for trainer in trainers]
    for run, trainer in zip(runs, trainers, strict=True):
      assert run.record is not None
      run.record.trainer = trainer
    return plots(runs, trainers)[0]["unit"]

  assert {trainer: unit(trainer) for trainer in TRAINERS} == {
    "sft": "nats per trained token",
    "dpo": "mean over pairs",
    "distill": "mean over trained tokens",
    "grpo": "of the objective",
  }
  assert unit("sft", "dpo") == ""


def test_prompts_have_no_trained_tokens_and_no_padding(tmp_path: Path):
  run = RunFolder.read(make_run(tmp_path / "a"))
  assert "of them trained" in Page(render([run], AVAILABLE)).text
  assert run.record is not None
  run.record.data["training"].trained_tokens = 0
  text = Page(render([run], AVAILABLE)).text
  assert "Rows read" in text
  assert "of them trained" not in text
  assert "Padding" not in text


def test_a_long_curve_keeps_its_spikes():
  values: list[float | None] = [1.0] * 100_000
  values[77_777], values[12_345] = 99.0, -5.0
  steps, kept = thin(Curve(list(range(100_000)), values), most=1000)
  assert len(steps) == len(kept) <= 1000
  assert steps == sorted(steps)
  assert kept[steps.index(77_777)] == 99.0
  assert kept[steps.index(12_345)] == -5.0


def test_figures_by_hand(tmp_path: Path):
  rows = dict(figure_table([RunFolder.read(make_run(tmp_path / "a"))]))
  assert rows["Updates made"] == ["4 of 4"]
  assert rows["Held-out loss at best"] == ["1.5000 at step 4"]
  assert rows["Tokens per second, median"] == ["18"]  # Of 17, 18, 19, 20: the mean of the middle two, rounded to even.
  assert rows["Tokens trained on"] == ["20"]
  assert rows["Time in updates"] == ["2.0 s"]
  assert rows["of it waiting for data"] == ["2.00%"]
  assert rows["of it waiting for saving"] == ["8.00%"]
  assert [duration(seconds) for seconds in (59.94, 60, 3599.6, 90061)] == [
    "59.9 s",
    "1 min 0 s",
    "1 h 0 min",
    "25 h 1 min",
  ]
  assert [readable_bytes(size) for size in (1023, 1024, 3 << 40)] == ["1023 B", "1.0 KiB", "3.0 TiB"]


def test_a_loss_near_zero_is_told(tmp_path: Path):
  metrics = [{"kind": "train", "step": 1, "loss": 3.494665725156665e-05}, {"kind": "eval", "step": 1, "loss": 0.0}]
  rows = dict(figure_table([RunFolder.read(make_run(tmp_path / "a", metrics=metrics))]))
  assert rows["Training loss at last"] == ["3.495e-05"]
  assert rows["Held-out loss at last"] == ["0.0000 at step 1"]


def test_commands_to_go_on(tmp_path: Path):
  folder = make_run(
    tmp_path / "my run", config={"learning_rate": "1e-3", "hf_access_token": '"***"'}, checkpoints={4: 1}
  )
  commands = next_commands(RunFolder.read(folder), AVAILABLE)
  assert "Give hf_access_token again" in commands[0].note
  found = {command.title: shlex.split(command.text) for command in commands}
  assert found["Resume it"] == [
    "posttrain",
    "sft",
    f"{folder}/c.yml",
    "run_name=my run",
    "learning_rate=1e-3",
    "steps=1004",
  ]
  assert found["Evaluate it"] == ["posttrain", "eval", str(folder), "--data", "held-out.jsonl"]
  assert not any("inspect" in words for words in found.values())  # Not among the available commands.
  back = found["Hand it back to pre-training"]
  assert back[:3] == ["python", "-m", "maxtext.trainers.pre_train.train"]
  assert {"run_name=my run", "base_emb_dim=16", "steps=1004", f"base_output_directory={tmp_path}"} <= set(back)
  assert not [word for word in back if word.startswith("hf_")]


def test_an_actor_is_handed_back_by_its_path(tmp_path: Path):
  """Pre-training looks for `checkpoints/<step>` by a run's name, not below `actor`."""
  folder = make_run(tmp_path / "a", checkpoints={4: 1})
  (folder / "checkpoints").rename(folder / "actor")
  (folder / "checkpoints").mkdir()
  (folder / "actor").rename(folder / "checkpoints" / "actor")
  found = {command.title: command.text for command in next_commands(RunFolder.read(folder), AVAILABLE)}
  back = set(shlex.split(found["Hand it back to pre-training"]))
  assert {"run_name=a-pretraining", f"load_full_state_path={folder}/checkpoints/actor/4/items"} <= back


def test_a_run_with_data_of_its_own_is_evaluated_on_them(tmp_path: Path):
  folder = make_run(tmp_path / "a", checkpoints={4: 1})
  record = RunRecord.read(folder)
  assert record is not None
  record.data["held out"] = record.data["training"]
  record.write(folder)
  found = {command.title: command.text for command in next_commands(RunFolder.read(folder), AVAILABLE)}
  assert shlex.split(found["Evaluate it"]) == ["posttrain", "eval", str(folder)]


def test_the_latest_evaluation_is_among_the_figures(tmp_path: Path):
  folder = make_run(tmp_path / "a")
  for step, accuracy in ((4, 0.5), (12, 0.25)):
    content = {"tokens": {"loss": 1.5, "token_accuracy": None}, "answers": {"greedy": {"accuracy": accuracy}}}
    content["answers"]["greedy"]["questions"] = 1319
    (folder / f"eval-{step}.json").write_text(json.dumps(content))
  for name, text in (("eval-13.json", "[1, "), ("eval-14.json", '{"tokens": [], "answers": "x"}'), ("eval-x.json", "")):
    (folder / name).write_text(text)
  rows = dict(figure_table([RunFolder.read(folder)]))
  assert {name: value for name, value in rows.items() if name.startswith("Evaluated")} == {
    "Evaluated: loss": ["1.5000 at step 12"],
    "Evaluated: exact match, greedy": ["25.00% of 1,319 questions at step 12"],
  }


def test_without_a_checkpoint_a_run_can_only_be_resumed(tmp_path: Path):
  folder = make_run(tmp_path / "a", metrics=train_metrics(2))
  (folder / "config.yml").write_text("steps: 4\n")
  (command,) = next_commands(RunFolder.read(folder), AVAILABLE)
  assert shlex.split(command.text) == ["posttrain", "sft", f"{folder}/config.yml"]
