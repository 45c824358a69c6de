"""`inspect`, `diff` and `convert` at the command line: what they print, and what is wrong with what they are given."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from maxtext_posttrain.checkpointing import streaming, tree_view
from maxtext_posttrain.checkpointing.comparison import compare_arrays
from maxtext_posttrain.checkpointing.metadata import StoredArray, describe_checkpoint
from tests.support import broken
from tests.support.cli import Outcome, run_cli

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A run with two steps, and things that are no runs."""
  folder = tmp_path_factory.mktemp("shelf")
  for step in (3, 5):
    items = broken.adamw_items(step)
    broken.write_step(folder / "run" / "checkpoints" / str(step), items, {"scan_layers": True})
  (folder / "run" / "checkpoints" / "7.orbax-checkpoint-tmp").mkdir()
  (folder / "empty").mkdir()
  (folder / "file").write_text("not a folder")
  (folder / "started" / "checkpoints" / "1.orbax-checkpoint-tmp").mkdir(parents=True)
  (folder / "hollow" / "checkpoints" / "4").mkdir(parents=True)
  broken.write_step(folder / "other" / "checkpoints" / "1", {"something": np.zeros(3)})
  broken.ocp.save_checkpointables(folder / "foreign" / "checkpoints" / "1", {"state": {"w": np.zeros(3)}})
  for name, victim in (("no-tree", "items/_METADATA"), ("no-data", "items/d"), ("no-manifest", "items/manifest.ocdbt")):
    step = folder / name / "checkpoints" / "3"
    shutil.copytree(folder / "run" / "checkpoints" / "3", step)
    path = step / victim
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(step / "items" / "ocdbt.process_0", ignore_errors=True)
  return folder


BAD: dict[str, tuple[list[str], int, str]] = {
  "no path": (["inspect"], 2, "PATH"),
  "two paths": (["inspect", "a", "b"], 2, "unrecognized arguments: b"),
  "empty path": (["inspect", ""], 1, "empty path"),
  "nowhere": (["inspect", "{shelf}/nowhere"], 1, "no such path"),
  "a file": (["inspect", "{shelf}/file"], 1, "is a file"),
  "an empty folder": (["inspect", "{shelf}/empty"], 1, "holds no checkpoint"),
  "a save that did not end": (["inspect", "{shelf}/started"], 1, "no finished checkpoint, only 1.orbax-checkpoint-tmp"),
  "an empty step": (["inspect", "{shelf}/hollow"], 1, "holds nothing: expected MaxText's items"),
  "another layout": (["inspect", "{shelf}/foreign"], 1, "holds state: expected MaxText's items"),
  "no tree": (["inspect", "{shelf}/no-tree"], 1, "is damaged"),
  "no data": (["inspect", "{shelf}/no-data"], 1, "is damaged"),
  "no manifest": (["inspect", "{shelf}/no-manifest"], 1, "is damaged"),
  "a step that is not there": (["inspect", "{shelf}/run", "--step", "4"], 1, "has no step 4; it has 3, 5"),
  "another step of a step": (["inspect", "{shelf}/run/checkpoints/3", "--step", "5"], 1, "one step's folder"),
  "a step that is no number": (["inspect", "{shelf}/run", "--step", "x"], 2, "--step: invalid int value: 'x'"),
  "a requirement without a value": (["inspect", "{shelf}/run", "--require", "step"], 2, "KEY=VALUE"),
  "a requirement of nothing": (["inspect", "{shelf}/run", "--require", "step="], 2, "KEY=VALUE"),
  "an unknown requirement": (["inspect", "{shelf}/run", "--require", "stage=3"], 2, "no such key; there are layout"),
  "an unknown option": (["inspect", "{shelf}/run", "--leafs"], 2, "--leafs"),
  "diff of one": (["diff", "{shelf}/run"], 2, "B"),
  "diff with itself": (["diff", "{shelf}/run", "{shelf}/run/checkpoints/5"], 1, "nothing to compare"),
  "diff with nothing": (["diff", "{shelf}/run", "{shelf}/nowhere"], 1, "nowhere: no such path"),
  "diff with what is damaged": (["diff", "{shelf}/run", "{shelf}/no-data"], 1, "is damaged"),
  "a tolerance below zero": (["diff", "{shelf}/run", "{shelf}/other", "--tolerance", "-1"], 2, "--tolerance -1.0"),
  "a tolerance that is none": (["diff", "{shelf}/run", "{shelf}/other", "--tolerance", "nan"], 2, "--tolerance nan"),
  "convert without a configuration": (["convert", "{shelf}/run", "{shelf}/new"], 2, "--config"),
  "convert onto a run": (["convert", "{shelf}/run", "{shelf}/empty", "--config", "sft.yml"], 1, "exists"),
  "convert with no such file": (["convert", "{shelf}/run", "{shelf}/new", "--config", "{shelf}/x.yml"], 2, "x.yml"),
  "convert of nothing": (["convert", "{shelf}/empty", "{shelf}/new", "--config", "{config}"], 1, "holds no checkpoint"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(shelf: Path, capfd: Capture, name: str):
  arguments, code, message = BAD[name]
  config = shelf / "sft.yml"
  config.write_text("base_config: [sft.yml, models/tiny.yml]\nrun_name: x\ndataset_type: synthetic\n")
  outcome = run_cli([each.format(shelf=shelf, config=config) for each in arguments], capfd)
  assert outcome.code == code, outcome.err
  assert len(outcome.errors) == 1, outcome.err
  assert message in outcome.errors[0]
  assert outcome.err.count("\n") == 1
  assert not (shelf / "new").exists()


@pytest.mark.parametrize("path", ["run", "run/checkpoints", "run/checkpoints/5", "run/checkpoints/5/items", "run/"])
def test_every_way_of_naming_a_step_means_the_same(shelf: Path, capfd: Capture, path: str):
  outcome = run_cli(["inspect", f"{shelf}/{path}", "--json"], capfd)
  assert (outcome.code, outcome.errors) == (0, [])
  document = json.loads(outcome.out)
  assert document["path"] == str((shelf / "run/checkpoints/5").resolve())
  assert (document["step"], document["folder"], document["steps"]) == (5, 5, [3, 5])
  assert document["unfinished"] == ["7.orbax-checkpoint-tmp"]
  # 8 * 4 + 4 + 4 * 2 * 6 weights, mu and nu likewise, three counts; a key of 4 words and a count for 1 + 2 modules.
  assert document["parameters"] == 84
  assert document["bytes_of_state"] == 4 * (3 * 84 + 3 + 5 * 3)
  assert document["bytes_on_disk"] == sum(
    file.stat().st_size for file in (shelf / "run/checkpoints/5/items").rglob("*") if file.is_file()
  )
  assert document["resumable"]


def test_requirements_that_are_not_met_get_a_line_each(shelf: Path, capfd: Capture):
  met = ["layout=maxtext", "step=5", "folder=5", "resumable=true", "run_name=yes", "optimizer=adamw", "parameters=84"]
  assert run_cli(["inspect", f"{shelf}/run", "--require", *met, "--require", "data_position=false"], capfd).code == 0
  outcome = run_cli(["inspect", f"{shelf}/run", "--require", "step=4", "layout=maxtext", "resumable=false"], capfd)
  assert outcome.code == 1
  assert [error.split(": ", 1)[1] for error in outcome.errors] == [
    "step is 5, 4 is required",
    "resumable is true, false is required",
  ]
  damaged = run_cli(["inspect", f"{shelf}/no-data", "--require", "layout=damaged", "resumable=false"], capfd)
  assert (damaged.code, damaged.errors) == (0, [])


def test_an_older_step_is_not_resumed_by_name(shelf: Path, capfd: Capture):
  outcome = run_cli(["inspect", f"{shelf}/run", "--step", "3", "--json"], capfd)
  ways = json.loads(outcome.out)["ways"]
  assert ways["run_name"]["answer"] == "no"
  assert "newest step, 5" in ways["run_name"]["reasons"][0]
  assert ways["load_full_state_path"]["answer"] == "yes"


def test_the_report_lists_groups_or_every_leaf(shelf: Path, capfd: Capture):
  short = run_cli(["inspect", f"{shelf}/run"], capfd).out
  assert "opt_state/0/mu" in short
  assert "opt_state/0/mu/params/decoder" not in short
  assert "params/params/decoder/layers/mlp/wi_0/kernel" in short
  every = run_cli(["inspect", f"{shelf}/run", "--leaves"], capfd).out
  for path in ("opt_state/0/mu/params/decoder/decoder_norm/scale", "nnx_aux/model/decoder/rngs/params/key"):
    assert path in every


def test_numbered_layers_are_listed_together():
  kernel = StoredArray((4, 6), np.dtype(np.float32))
  layers = {f"layers_{index}": {"kernel": kernel} for index in (0, 1, 2, 10)}
  odd = {"layers_3": {"kernel": StoredArray((4, 7), np.dtype(np.float32))}}
  rows = tree_view.grouped_rows({"params": {"params": {**layers, **odd, "norm": {"scale": kernel}}}})
  assert [(row.name, row.arrays, row.shape) for row in rows] == [
    ("params/params/layers_{0,1,2,10}/kernel", 4, (4, 6)),
    ("params/params/layers_3/kernel", 1, (4, 7)),
    ("params/params/norm/scale", 1, (4, 6)),
  ]
  assert len(tree_view.leaf_rows({"params": {"params": {**layers, **odd}}})) == 5


def test_names_that_would_move_the_cursor_are_escaped():
  rows = tree_view.leaf_rows({"\x1b[2J": StoredArray((), np.dtype(np.int32))})
  assert [row.name for row in rows] == [r"\x1b[2J"]


def diff(tmp_path: Path, capfd: Capture, change: Callable[[dict[str, Any]], Any], *options: str) -> tuple[Outcome, Any]:
  items = broken.adamw_items()
  broken.write_step(tmp_path / "a", items)
  other = copy.deepcopy(items)
  change(other)
  broken.write_step(tmp_path / "b", other)
  outcome = run_cli(["diff", f"{tmp_path}/a", f"{tmp_path}/b", "--json", *options], capfd)
  return outcome, json.loads(outcome.out)


def embedding(items: dict[str, Any]) -> dict[str, Any]:
  return items["params"]["params"]["token_embedder"]


def test_equal_checkpoints_have_no_difference(tmp_path: Path, capfd: Capture):
  outcome, document = diff(tmp_path, capfd, lambda items: None)
  assert (outcome.code, document["equal"], document["differences"]) == (0, True, [])
  assert document["leaves"] == 16


def test_values_are_sorted_by_how_far_apart_they_are(tmp_path: Path, capfd: Capture):
  def change(items: dict[str, Any]) -> None:
    weights = embedding(items)["embedding"]
    weights[0, 0], weights[1, 1] = 1.0, np.nan
    scale = items["params"]["params"]["decoder"]["decoder_norm"]["scale"]
    scale[:] = scale + np.float32(0.5)
    items["opt_state"][2]["count"] = np.asarray(4, np.int32)

  outcome, document = diff(tmp_path, capfd, change)
  assert (outcome.code, document["equal"]) == (1, False)
  found = {each["path"]: (each["kind"], each["count"], each["max_abs"]) for each in document["differences"]}
  assert list(found) == [
    "items/params/params/token_embedder/embedding",
    "items/opt_state/2/count",
    "items/params/params/decoder/decoder_norm/scale",
  ]
  assert found["items/params/params/token_embedder/embedding"] == ("values", 2, "inf")
  assert found["items/opt_state/2/count"] == ("values", 1, 1.0)
  assert found["items/params/params/decoder/decoder_norm/scale"][2] == pytest.approx(0.5, abs=1e-6)


def test_a_tolerance_leaves_small_differences_out(tmp_path: Path, capfd: Capture):
  def change(items: dict[str, Any]) -> None:
    embedding(items)["embedding"] += np.float32(1e-3)

  outcome, _ = diff(tmp_path, capfd, change, "--tolerance", "0.01")
  assert outcome.code == 0


def test_structure_comes_first(tmp_path: Path, capfd: Capture):
  def change(items: dict[str, Any]) -> None:
    embedding(items)["embedding"] = embedding(items)["embedding"].astype(ml_dtypes.bfloat16)
    items["params"]["params"]["decoder"]["decoder_norm"]["scale"] = np.zeros(5, np.float32)
    items["step"] = np.asarray(9, np.int32)
    items["extra"] = np.zeros(2, np.float32)
    items["opt_state"] = {"0": items["opt_state"][0], "2": items["opt_state"][2]}
    del items["nnx_aux"]["model"]["decoder"]["rngs"]

  outcome, document = diff(tmp_path, capfd, change)
  assert outcome.code == 1
  kinds = [each["kind"] for each in document["differences"]]
  assert kinds == ["container", "only in B", "only in A", "only in A", "shape", "values", "dtype"]
  cast = document["differences"][-1]
  assert cast["detail"] == "float32 in A, bfloat16 in B"
  assert 0 < cast["max_rel"] < 2**-8


def test_layouts_that_have_nothing_in_common_are_not_compared(tmp_path: Path, capfd: Capture):
  broken.write_step(tmp_path / "a", broken.adamw_items())
  broken.ocp.save_checkpointables(tmp_path / "b", {"model_params": {"w": {"value": np.zeros(3, np.float32)}}})
  outcome = run_cli(["diff", f"{tmp_path}/a", f"{tmp_path}/b"], capfd)
  assert outcome.code == 1
  assert "posttrain convert" in outcome.errors[0]


@pytest.mark.parametrize(
  ("a", "b", "expected"),
  [
    ([1.0, 2.0], [1.0, 2.0], (0, 0.0, 0.0)),
    ([np.nan, np.inf], [np.nan, np.inf], (0, 0.0, 0.0)),
    ([1.0, 4.0], [1.0, 3.0], (1, 1.0, 0.25)),
    ([np.inf], [-np.inf], (1, np.inf, np.inf)),
    ([0.0], [-0.0], (0, 0.0, 0.0)),
    ([], [], (0, 0.0, 0.0)),
  ],
)
def test_differences_worked_by_hand(a: list[float], b: list[float], expected: tuple[int, float, float]):
  found = compare_arrays(np.asarray(a, np.float32), np.asarray(b, np.float32))
  assert (found.count, found.max_abs, found.max_rel) == expected


def test_large_arrays_are_compared_whole():
  a = np.zeros((3, 1 << 20), np.float32)
  b = a.copy()
  b[0, 0], b[2, -1] = 1.0, 2.0
  found = compare_arrays(a, b)
  assert (found.count, found.max_abs) == (2, 2.0)


def test_arrays_are_read_in_groups_that_fit():
  arrays = {(str(index),): StoredArray((size,), np.dtype(np.int8)) for index, size in enumerate((3, 3, 3, 9, 1))}
  assert [[path[0] for path in group] for group in streaming.groups(arrays, 6)] == [["0", "1"], ["2"], ["3"], ["4"]]


def test_any_group_of_arrays_reads_the_same_bits(tmp_path: Path):
  items = broken.adamw_items()
  stored = describe_checkpoint(broken.write_step(tmp_path / "1", items))
  want = dict(_flat(items))
  for limit in (1, 1 << 20):
    have: dict[Any, np.ndarray] = {}
    for group in streaming.groups(stored.arrays("items"), limit):
      have |= streaming.read_arrays(stored, "items", group)
    assert have.keys() == want.keys()
    for path, leaf in want.items():
      assert isinstance(have[path], np.ndarray)
      np.testing.assert_array_equal(have[path], leaf)


def _flat(items: Any) -> list[tuple[tuple[Any, ...], np.ndarray]]:
  leaves, _ = jax.tree_util.tree_flatten_with_path(items)
  return [(tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path), leaf) for path, leaf in leaves]


def test_inspecting_imports_no_model_code(shelf: Path):
  script = (
    "import sys\n"
    "from maxtext_posttrain.cli import main\n"
    f"assert main(['inspect', {str(shelf / 'run')!r}]) == 0\n"
    "print(sorted({name.split('.')[0] for name in sys.modules} & {'maxtext', 'tunix', 'flax', 'torch'}))\n"
  )
  result = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, check=False)
  assert result.returncode == 0, result.stderr
  assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("tool", ["inspect", "convert", "diff"])
def test_help_says_what_the_exit_code_means(tool: str, capfd: Capture):
  with pytest.raises(SystemExit) as exit_:
    run_cli([tool, "--help"], capfd)
  assert exit_.value.code == 0
