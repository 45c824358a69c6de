"""Real pre-training resumes what SFT wrote, and SFT what pre-training wrote: to the bit.

Scanned and unscanned, clip on and off, accumulation 1 and 4, AdamW and Muon: eight runs in which each pair of settings
meets. Pre-training runs unmodified, in a process of its own.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.checkpointing.metadata import load_step_metadata
from tests.support import runs

pytestmark = pytest.mark.slow

STEPS = 3
WAYS = ("run_name", "load_full_state_path", "load_parameters_path")

# Half of the sixteen combinations: the fourth setting is the parity of the other three.
CASES = {
  f"{'scanned' if scanned else 'unscanned'}-{'clip' if clip else 'noclip'}-accumulation{4 if accumulated else 1}-"
  f"{'muon' if scanned ^ clip ^ accumulated else 'adamw'}": {
    "scan_layers": scanned,
    "gradient_clipping_threshold": 0.5 if clip else 0.0,
    "gradient_accumulation_steps": 4 if accumulated else 1,
    "opt_type": "muon" if scanned ^ clip ^ accumulated else "adamw",
  }
  for scanned, clip, accumulated in itertools.product((True, False), repeat=3)
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return tmp_path_factory.mktemp("hand_back")


@pytest.fixture(scope="module")
def handed_back(folder: Path) -> dict[str, Any]:
  """Every case trained here, what pre-training's first step should be, and what real pre-training did with it."""
  results: dict[str, Any] = {}
  jobs, expected = [], []
  for case, keys in CASES.items():
    sft_argv = runs.arguments(
      folder, case, f"steps={STEPS}", "checkpoint_period=100", *(f"{k}={v}" for k, v in keys.items())
    )
    session = runs.sft_session(sft_argv)
    results[case] = {"session": session, "step_folder": folder / case / "checkpoints" / str(STEPS)}
    for way in WAYS:
      name = f"{case}-{way}"
      first = 0 if way == "load_parameters_path" else STEPS
      argv = runs.pretraining_argv(
        sft_argv, way=way, run_name=case, new_run_name=name, step=STEPS, steps=first + 2, checkpoint_period=1
      )
      jobs.append(argv)
      expected.append((case, way, first))
    results[case]["in_memory"] = runs.first_pretraining_step(session, jobs[-2])
  for (case, way, first), result in zip(expected, runs.pretraining(jobs, folder), strict=True):
    results[case][way] = {**result, "first": first}
  return results


@pytest.mark.parametrize("case", CASES)
def test_disk_equals_memory(handed_back: dict[str, Any], case: str):
  trainer = handed_back[case]["session"].trainer
  # A dict's integer keys come back from disk as text.
  items = {tuple(map(str, path)): leaf for path, leaf in runs.items(handed_back[case]["step_folder"]).items()}
  assert items[("step",)] == STEPS
  counts = [leaf for path, leaf in items.items() if path[0] == "opt_state" and path[-1] == "count"]
  assert counts
  assert all(count == STEPS for count in counts)
  for path, variable in nnx.to_flat_state(nnx.state(trainer.model, nnx.Param)):
    np.testing.assert_array_equal(items[("params", "params", *path)], variable.get_value())
  assert int(trainer.optimizer.step.get_value()) == STEPS
  if CASES[case]["opt_type"] == "adamw":
    adam = trainer.optimizer.opt_state[0]
    for name in ("mu", "nu"):
      for path, variable in nnx.to_flat_state(getattr(adam, name)):
        np.testing.assert_array_equal(items[("opt_state", "0", name, "params", *map(str, path))], variable.get_value())
  else:
    muon = trainer.optimizer.opt_state.inner_states["muon"].inner_state[0]
    moments = {
      tuple(path): np.asarray(leaf.get_value())
      for path, leaf in nnx.to_flat_state(muon.mu)
      if not isinstance(leaf.get_value(), optax.MaskedNode)
    }
    for path, leaf in moments.items():
      np.testing.assert_array_equal(
        items[("opt_state", "inner_states", "muon", "inner_state", "0", "mu", *map(str, path))], leaf
      )
    assert moments
  assert load_step_metadata(handed_back[case]["step_folder"]) == {"scan_layers": CASES[case]["scan_layers"]}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_pretraining_goes_on_where_sft_ended(handed_back: dict[str, Any], case: str, way: str):
  result = handed_back[case][way]
  assert result["error"] is None
  assert min(result["losses"]) == result["first"]
  assert result["losses"][result["first"]] == handed_back[case]["in_memory"][0]


@pytest.mark.parametrize("case", CASES)
def test_pretrainings_first_step_equals_the_one_in_memory(handed_back: dict[str, Any], folder: Path, case: str):
  written = runs.items(folder / f"{case}-load_full_state_path" / "checkpoints" / str(STEPS))
  runs.assert_same_items(written, handed_back[case]["in_memory"][1])


@pytest.mark.parametrize("case", CASES)
def test_pretraining_in_the_same_folder_leaves_sfts_checkpoint_and_adds_its_own(
  handed_back: dict[str, Any], folder: Path, case: str
):
  """Pre-training names its folders one less than the step inside: its first would be SFT's last, and is passed over."""
  checkpoints = folder / case / "checkpoints"
  assert sorted(int(path.name) for path in checkpoints.iterdir()) == [STEPS, STEPS + 1]
  assert runs.items(checkpoints / str(STEPS))[("step",)] == STEPS
  assert runs.items(checkpoints / str(STEPS + 1))[("step",)] == STEPS + 2


@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unscanned"])
def test_sft_starts_from_what_pretraining_wrote(folder: Path, scanned: bool):
  name = f"pretrained-{scanned}"
  settings = [f"scan_layers={scanned}", "checkpoint_period=100"]
  sft_argv = runs.arguments(folder, name, "steps=2", *settings)
  argv = runs.pretraining_argv(sft_argv, way="run_name", run_name=name, step=0, steps=2, checkpoint_period=100)
  assert runs.pretraining([argv], folder)[0]["error"] is None
  written_folder = folder / name / "checkpoints" / "1"
  written = runs.items(written_folder)
  assert written[("step",)] == 2

  # Already at its last step: everything restored, no step made, nothing written.
  session = runs.sft_session(sft_argv)
  live = nnx.state(
    maxtext_api.TrainStateNNX(session.trainer.model, session.trainer.optimizer), nnx.Not(nnx.Intermediate)
  )
  runs.assert_same_items(runs.checkpoint_arrays(live), written)
  assert sorted(path.name for path in (folder / name / "checkpoints").iterdir()) == ["0", "1"]

  session = runs.sft_session(runs.arguments(folder, name, "steps=4", *settings))
  assert session.trainer.train_steps == 4
  assert sorted(path.name for path in (folder / name / "checkpoints").iterdir()) == ["0", "1", "4"]

  full = runs.sft_session(
    runs.arguments(folder, f"{name}-full", "steps=4", f"load_full_state_path={written_folder}/items", *settings)
  )
  runs.assert_same_items(
    runs.items(folder / f"{name}-full" / "checkpoints" / "4"), runs.items(folder / name / "checkpoints" / "4")
  )
  del full
  weights = runs.sft_session(
    runs.arguments(
      folder,
      f"{name}-weights",
      "steps=1",
      f"load_parameters_path={written_folder}/items",
      "learning_rate=0.0",
      *settings,
    )
  )
  assert weights.trainer.train_steps == 1
  for path, variable in nnx.to_flat_state(nnx.state(weights.trainer.model, nnx.Param)):
    np.testing.assert_array_equal(written[("params", "params", *path)], variable.get_value())
