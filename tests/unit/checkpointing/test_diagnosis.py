"""What `inspect` makes of whole and broken checkpoints; that pre-training does so is in `tests/integration`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxtext_posttrain.checkpointing import diagnosis, optimizer_kind
from maxtext_posttrain.checkpointing.diagnosis import FULL_STATE, PARAMETERS, RUN_NAME, Place, diagnose_items
from maxtext_posttrain.checkpointing.inspection import inspect_step
from maxtext_posttrain.checkpointing.metadata import StoredArray, describe_checkpoint
from tests.support import broken


def described(items: Any) -> Any:
  """A tree of arrays as `describe_checkpoint` would give it."""
  return jax.tree.map(lambda leaf: StoredArray(leaf.shape, leaf.dtype), items)


def test_every_edit_has_an_answer():
  assert set(broken.ANSWERS) == set(broken.EDITS)


@pytest.mark.parametrize("name", broken.EDITS)
def test_each_fault_on_disk_is_told(tmp_path: Path, name: str):
  step = tmp_path / "run" / "checkpoints" / str(broken.STEP)
  broken.write_step(step, broken.EDITS[name](broken.adamw_items()), {"scan_layers": True})
  inspection = inspect_step(tmp_path / "run")
  whole, weights, code = broken.ANSWERS[name]
  found = inspection.diagnosis
  assert found is not None
  assert found.verdict(RUN_NAME).answer == whole
  assert found.verdict(FULL_STATE).answer == whole
  assert found.verdict(PARAMETERS).answer == weights
  assert found.resumable == (whole == "yes")
  codes = [finding.code for finding in found.findings]
  assert code in codes if code else not codes
  assert all("\n" not in finding.message for finding in found.findings)
  assert bool(found.verdict(FULL_STATE).reasons) == (whole != "yes")


def test_a_described_tree_alone_gives_the_same_as_the_one_on_disk(tmp_path: Path):
  for name in ("intact", "flat clip", "no nu", "inject_hyperparams"):
    items = broken.EDITS[name](broken.adamw_items())
    stored = describe_checkpoint(broken.write_step(tmp_path / name, items))
    pure = diagnose_items(described(items), Place())
    assert pure == diagnose_items(stored.trees["items"], Place())


def _moments(weights: Any) -> dict[str, Any]:
  return {"mu": weights, "nu": weights}


def optimizers() -> dict[str, tuple[Any, str, tuple[str, ...], str]]:
  """On-disk optimizer states as MaxText's converter makes them: state, name, wrappers, whether pre-training resumes."""
  weights = {"layer": {"kernel": StoredArray((2, 3), np.dtype(np.float32))}}
  count = StoredArray((), np.dtype(np.int32))
  adam = {"count": count, **_moments({"params": weights})}
  bare = {"count": count, **_moments(weights)}
  losses = StoredArray((8,), np.dtype(np.float32))
  skip = {"count": count, "losses": losses, "grad_norms": losses, "is_skipped": count}
  muon = {"count": count, "mu": weights, "ns_coeffs": losses}
  partition = {
    "muon": {"inner_state": {"0": muon, "2": {"count": count}}},
    "adam": {"inner_state": {"0": bare, "2": {"count": count}}},
  }
  trainable = {"trainable": {"inner_state": {"0": bare, "2": {"count": count}}}}
  hyperparameters = {"learning_rate": StoredArray((), np.dtype(np.float32))}
  inject = {"count": count, "hyperparams": hyperparameters, "inner_state": {"0": bare}}
  multi = {"mini_step": count, "gradient_step": count, "acc_grads": weights}
  return {
    "adamw": ([adam, None, {"count": count}], "adamw", (), "yes"),
    "adam_pax": (adam, "adam_pax", (), "yes"),
    "sgd": ([None, {"count": count}], "sgd", (), "yes"),
    "muon": ({"inner_states": partition}, "muon", (), "yes"),
    "adamw, steps skipped": ({**skip, "inner_state": {"0": bare, "2": {"count": count}}}, "adamw", ("skip",), "yes"),
    "adamw, steps skipped, constant rate": ({**skip, "inner_state": {"0": bare}}, "adamw", ("skip",), "partly"),
    "some weights trained": ({"inner_states": trainable}, "adamw", ("trainable",), "yes"),
    "clipped sgd": ([None, {"1": {"count": count}}], "sgd", ("link",), "no"),
    "clipped adam_pax": ([None, bare], "adamw", ("link",), "no"),
    "injected": (inject, "adamw", ("inject",), "no"),
    "accumulated": ({**multi, "inner_opt_state": {"0": bare, "2": {"count": count}}}, "adamw", ("Multi",), "no"),
    "accumulated, clipped": (
      {**multi, "inner_opt_state": {"1": {"0": bare, "2": {"count": count}}}},
      "adamw",
      ("Multi", "link"),
      "no",
    ),
    "accumulated, injected": ({**multi, "inner_opt_state": inject}, "adamw", ("Multi", "inject"), "no"),
    "momentum": ([{"trace": weights}, {"count": count}], "unknown", (), "no"),
    "something else": ({"preconditioner": weights}, "unknown", (), "no"),
  }


@pytest.mark.parametrize("name", optimizers())
def test_optimizers_are_recognised(name: str):
  state, opt_type, wrappers, answer = optimizers()[name]
  found = optimizer_kind.recognise(state)
  assert found.name == opt_type
  assert len(found.wrappers) == len(wrappers)
  assert all(part in wrapper for part, wrapper in zip(wrappers, found.wrappers, strict=True))
  weights = {"layer": {"kernel": StoredArray((2, 3), np.dtype(np.float32))}}
  step = StoredArray((), np.dtype(np.int32))
  items = {"params": {"params": weights}, "opt_state": state, "step": step}
  assert diagnose_items(items, Place()).verdict(FULL_STATE).answer == answer


@pytest.mark.parametrize(
  ("place", "code", "ways"),
  [
    (Place(in_run=False), "not_in_run", {RUN_NAME: "no", FULL_STATE: "yes", PARAMETERS: "yes"}),
    (Place(newest=False, newest_step=9), "not_newest", {RUN_NAME: "no", FULL_STATE: "yes", PARAMETERS: "yes"}),
    (Place(in_run=False, actor=True), "in_actor", {RUN_NAME: "no", FULL_STATE: "yes", PARAMETERS: "yes"}),
    (Place(custom_metadata={"scan_layers": False}), "scan_layers", dict.fromkeys(diagnosis.WAYS, "yes")),
    (Place(folder_step=7), "folder_step", dict.fromkeys(diagnosis.WAYS, "yes")),
  ],
)
def test_where_it_lies_matters_to_the_ways_of_finding_it(place: Place, code: str, ways: dict[Any, str]):
  found = diagnose_items(described(broken.adamw_items()), place, {("step",): broken.STEP})
  assert [finding.code for finding in found.findings] == [code]
  assert {way: found.verdict(way).answer for way in diagnosis.WAYS} == ways


@pytest.mark.parametrize("folder", [broken.STEP, broken.STEP - 1])
def test_both_ways_of_naming_a_folder_are_in_order(folder: int):
  """Post-training names it by the step inside, pre-training by one less."""
  found = diagnose_items(described(broken.adamw_items()), Place(folder_step=folder), {("step",): broken.STEP})
  assert not found.findings


def test_counts_that_disagree_with_the_step_are_named():
  counts = {("step",): 3, ("opt_state", 0, "count"): 3, ("opt_state", 2, "count"): 12}
  found = diagnose_items(described(broken.adamw_items()), Place(), counts)
  assert [finding.code for finding in found.findings] == ["counts_disagree"]
  assert "step is 3, but opt_state/2/count is 12" in found.notes[0]
