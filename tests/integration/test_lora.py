"""SFT with an adapter, from a base to full weights again: exactness, a frozen base, merging, QLoRA, refusals."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from flax import nnx
from safetensors.numpy import load_file

from maxtext_posttrain import maxtext_lora
from maxtext_posttrain.checkpointing.metadata import load_step_metadata
from maxtext_posttrain.models.loading import load_model
from maxtext_posttrain.models.source import find_source
from tests.support import families, lora, runs
from tests.support.bad_input import rewrite
from tests.support.cli import run_cli

pytestmark = pytest.mark.slow

HERE: dict[str, Any] = {"hardware": "cpu", "attention": "dot_product", "remat_policy": "minimal"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
  """A Llama 3.1 with grouped heads and rotary pairs of its own, scanned."""
  return lora.import_base("llama3_1", folder / "base")


ACCUMULATED = ("gradient_accumulation_steps=2", "per_device_batch_size=1", "dropout_rate=0.1", "enable_dropout=true")


@pytest.fixture(scope="module")
def trained(folder: Path, base: Path) -> Any:
  """An SFT of four updates, whose session is still in memory."""
  return runs.sft_session(lora.arguments(base, folder, "trained", *ACCUMULATED))


def test_a_kill_in_the_middle_gives_the_same_bits(folder: Path, base: Path, trained: Any) -> None:
  argv = lora.arguments(base, folder, "killed", *ACCUMULATED)
  process = runs.SftProcess(argv, folder / "killed.log")
  assert process.wait_for(folder / "killed", 3), process.output()
  process.kill()
  shutil.rmtree(folder / "killed" / "checkpoints" / "4", ignore_errors=True)
  resumed = runs.SftProcess(argv, folder / "resumed.log")
  assert resumed.wait() == 0, resumed.output()
  assert "step 2 of 4, ready" in resumed.output()
  have, want = (runs.items(folder / name / "checkpoints" / "4") for name in ("killed", "trained"))
  runs.assert_same_items(have, want)
  assert runs.metrics(folder / "killed") == runs.metrics(folder / "trained")


def test_what_is_written_is_the_adapter_its_optimizer_and_the_bases_name(
  folder: Path, base: Path, trained: Any
) -> None:
  step = folder / "trained" / "checkpoints" / "4"
  items = runs.items(step)
  names = {path[-1] for path in items if path[0] == "params"}
  assert names == {"kernel_lora_a", "kernel_lora_b"}
  dimensions = families.architecture("llama3_1").dimensions
  emb, mlp, width, kv = dimensions.emb, dimensions.mlp, dimensions.heads * dimensions.head, dimensions.kv_heads
  sizes = [(emb, width), (emb, kv * dimensions.head), (emb, kv * dimensions.head), (width, emb)]
  sizes += [(emb, mlp), (emb, mlp), (mlp, emb)]
  wanted = dimensions.layers * sum(lora.RANK * (inputs + outputs) for inputs, outputs in sizes)
  for prefix in (("params", "params"), ("opt_state", 0, "mu", "params"), ("opt_state", 0, "nu", "params")):
    assert sum(leaf.size for path, leaf in items.items() if path[: len(prefix)] == prefix) == wanted
  assert items[("step",)] == 4
  assert all(np.abs(leaf).max() > 0 for path, leaf in items.items() if path[-1] == "kernel_lora_b")
  metadata = load_step_metadata(step)
  assert metadata["scan_layers"] is True
  assert (metadata["lora"]["lora_rank"], metadata["lora"]["lora_alpha"]) == (lora.RANK, lora.ALPHA)
  assert metadata["lora"]["base"] == str(base)
  record = json.loads((folder / "trained" / "run.json").read_text())
  assert record["facts"]["Trained parameters"] == f"{wanted:,}"


def test_the_base_stays_as_it_was_to_the_bit(base: Path, trained: Any) -> None:
  items = runs.items(base.parent)
  frozen = nnx.state(trained.trainer.model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
  leaves = nnx.to_flat_state(frozen)
  assert len(leaves) == sum(path[0] == "params" for path in items)
  for path, leaf in leaves:
    np.testing.assert_array_equal(items["params", "params", *path], leaf.get_value())


@pytest.fixture(scope="module")
def merged(folder: Path, trained: Any) -> Path:
  from maxtext_posttrain import cli

  out = folder / "merged"
  assert cli.main(["merge", str(folder / "trained"), str(out)]) == 0
  return out


def test_merged_weights_compute_what_base_and_adapter_do(folder: Path, base: Path, trained: Any, merged: Path) -> None:
  want = lora.logits(trained.maxtext, trained.mesh, trained.trainer.model)
  for path in (merged, folder / "trained"):
    loaded = load_model(find_source(str(path)), fixed=HERE)
    np.testing.assert_allclose(lora.logits(loaded.maxtext, loaded.mesh, loaded.model), want, rtol=0, atol=1e-5)
  before, after = runs.items(base.parent), runs.items(merged / "0")
  assert sorted(before) == sorted(after)
  for path, leaf in after.items():
    assert (leaf.shape, leaf.dtype) == (before[path].shape, before[path].dtype)
    assert np.array_equal(leaf, before[path]) == (path[-1] != "kernel" or "logits_dense" in path), path
  keys = yaml.safe_load((merged / "model.yml").read_text())
  assert "lora" not in keys
  assert keys["load_parameters_path"] == str(merged / "0" / "items")


def test_the_exports_agree(
  folder: Path, base: Path, trained: Any, merged: Path, capfd: pytest.CaptureFixture[str]
) -> None:
  """The merged HuggingFace folder is the base plus PEFT's formula over the exported adapter."""
  for source, out, *options in (("trained", "hf"), ("merged", "hf-of-merged"), ("trained", "peft", "--adapter")):
    outcome = run_cli(["export", str(folder / source), str(folder / out), *options], capfd)
    assert outcome.code == 0, outcome.err
  have = load_file(folder / "hf" / "model.safetensors")
  for name, tensor in load_file(folder / "hf-of-merged" / "model.safetensors").items():
    np.testing.assert_array_equal(have[name], tensor)
  adapter = load_file(folder / "peft" / "adapter_model.safetensors")
  config = json.loads((folder / "peft" / "adapter_config.json").read_text())
  for name, tensor in families.tensors("llama3_1").items():
    module = f"base_model.model.{name.removesuffix('.weight')}"
    if f"{module}.lora_A.weight" in adapter:
      a, b = (adapter[f"{module}.{part}.weight"] for part in ("lora_A", "lora_B"))
      tensor = tensor + config["lora_alpha"] / config["r"] * (b @ a)
    np.testing.assert_allclose(have[name], tensor, rtol=0, atol=1e-5, err_msg=name)


def loss_on_trained_rows(session: Any, *, without_adapter: bool = False) -> float:
  """The mean negative log-likelihood of the rows a session of four updates was trained on."""
  change = partial(maxtext_lora.without_adapter, session.maxtext) if without_adapter else lambda model: model
  losses = []
  for batch in itertools.islice(session.datasets.train.iterator(), 4):
    logits = lora.logits(session.maxtext, session.mesh, session.trainer.model, change, batch=batch)
    log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    losses.append(-np.take_along_axis(log_probs, batch["targets"][..., None], axis=-1).mean())
  return float(np.mean(losses))


@pytest.mark.parametrize(("qtype", "scan_layers"), [("nf4", True), ("int8", False)])
def test_qlora_trains_resumes_and_merges(
  qtype: str, scan_layers: bool, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
  name = f"qlora-{qtype}"
  base = lora.import_base("llama2", folder / f"base-{qtype}", *([] if scan_layers else ["--unscanned"]))
  argv = lora.arguments(base, folder, name, f"lora.lora_weight_qtype={qtype}", "lora.lora_tile_size=16")
  session = runs.sft_session(argv)
  assert loss_on_trained_rows(session) < loss_on_trained_rows(session, without_adapter=True)
  weights = nnx.to_flat_state(nnx.state(session.trainer.model, nnx.Param))
  assert {"nf4": "uint4", "int8": "int8"}[qtype] in {str(leaf.get_value().dtype) for _, leaf in weights}
  if scan_layers:
    want = runs.items(folder / name / "checkpoints" / "4")
    shutil.rmtree(folder / name / "checkpoints" / "4")
    runs.sft_session(argv)
    runs.assert_same_items(runs.items(folder / name / "checkpoints" / "4"), want)
  outcome = run_cli(["merge", str(folder / name), str(folder / f"{name}-merged")], capfd)
  assert outcome.code == 0, outcome.err
  assert f"those of the {qtype} base, dequantised" in outcome.out
  loaded = load_model(find_source(str(folder / f"{name}-merged")), fixed=HERE)
  computed = lora.logits(loaded.maxtext, loaded.mesh, loaded.model)
  trained = lora.logits(session.maxtext, session.mesh, session.trainer.model)
  np.testing.assert_allclose(computed, trained, rtol=0, atol=1e-4)


def test_an_adapter_to_begin_with(folder: Path, base: Path, trained: Any) -> None:
  """`lora.lora_restore_path`: the adapter's weights with a fresh optimizer; a learning rate of 0 leaves them."""
  path = folder / "trained" / "checkpoints" / "4"
  runs.sft_session(
    lora.arguments(base, folder, "begun", "steps=1", "learning_rate=0.0", f"lora.lora_restore_path={path}")
  )
  have, want = runs.items(folder / "begun" / "checkpoints" / "1"), runs.items(path)
  for name, leaf in want.items():
    if name[0] == "params":
      np.testing.assert_array_equal(have[name], leaf)
  assert have[("step",)] == 1


def test_a_fresh_base_is_drawn_again(folder: Path, base: Path, capfd: pytest.CaptureFixture[str]) -> None:
  argv = lora.arguments(base, folder, "fresh", "load_parameters_path=", "lora_fresh_base=true", "steps=1")
  session = runs.sft_session(argv)
  outcome = run_cli(["merge", str(folder / "fresh"), str(folder / "fresh-merged")], capfd)
  assert outcome.code == 0, outcome.err
  loaded = load_model(find_source(str(folder / "fresh-merged")), fixed=HERE)
  np.testing.assert_allclose(
    lora.logits(loaded.maxtext, loaded.mesh, loaded.model),
    lora.logits(session.maxtext, session.mesh, session.trainer.model),
    rtol=0,
    atol=1e-5,
  )


Prepare = Callable[[Path, Path], list[str]]


def copied(folder: Path, name: str) -> Path:
  """A run's folder of its own to break."""
  return Path(shutil.copytree(folder / "trained", folder / name))


def nudged(path: tuple, leaf: Any) -> Any:
  """The weights, with one of them moved by one unit in the last place."""
  if path[-3:] != ("mlp", "wo", "kernel"):
    return leaf
  array = np.array(leaf)
  array.flat[0] = np.nextafter(array.flat[0], np.float32(np.inf))
  return array


def changed_base(folder: Path, base: Path) -> Path:
  place = folder / "changed"
  if not place.exists():
    shutil.copytree(base.parent.parent, place)
    rewrite(nudged)(place / "0")
  return place / "0" / "items"


def over_changed_base(folder: Path, base: Path) -> list[str]:
  copied(folder, "over-changed")
  argv = lora.arguments(base, folder, "over-changed", "steps=6")
  return ["sft", *argv, f"load_parameters_path={changed_base(folder, base)}"]


def lora_off(folder: Path, base: Path) -> list[str]:
  copied(folder, "lora-off")
  argv = [argument for argument in lora.arguments(base, folder, "lora-off", "steps=6") if "lora." not in argument]
  return ["sft", *argv]


def full_weights_in_the_folder(folder: Path, base: Path) -> list[str]:
  shutil.copytree(base.parent.parent, folder / "full" / "checkpoints")
  return ["sft", *lora.arguments(base, folder, "full")]


def adapter_as_weights(folder: Path, base: Path) -> list[str]:
  argv = [argument for argument in lora.arguments(base, folder, "as-weights") if "lora." not in argument]
  return ["sft", *argv, f"load_parameters_path={folder / 'trained' / 'checkpoints' / '4' / 'items'}"]


def cut_base(folder: Path, base: Path) -> list[str]:
  place = Path(shutil.copytree(base.parent.parent, folder / "cut"))
  for file in place.rglob("d/*"):
    file.write_bytes(file.read_bytes()[:100])
  return ["merge", str(folder / "trained"), str(folder / "out"), "--base", str(place / "0" / "items")]


TRAINING: dict[str, tuple[Prepare, str]] = {
  "a base that changed by one bit": (over_changed_base, "was trained over another base"),
  "LoRA turned off in the run's folder": (lora_off, "holds a LoRA adapter, no full weights: posttrain merge"),
  "full weights in the run's folder": (full_weights_in_the_folder, "holds full weights, and lora.enable_lora=true"),
  "an adapter as load_parameters_path": (adapter_as_weights, "holds a LoRA adapter, no full weights"),
  "a pattern that matches nothing": (
    lambda folder, base: ["sft", *lora.arguments(base, folder, "no-match", "lora.lora_module_path=decoder/no.*")],
    "matches no module with a kernel; there are decoder/layers/mlp/wi_0",
  ),
  "merge over a base that changed": (
    lambda folder, base: [
      "merge",
      str(folder / "trained"),
      str(folder / "out"),
      "--base",
      str(changed_base(folder, base)),
    ],
    "is not the one adapter",
  ),
  "merge over a base that is gone": (
    lambda folder, base: ["merge", str(folder / "trained"), str(folder / "out"), "--base", str(folder / "gone")],
    "can't be read: no checkpoint at",
  ),
  "merge over a damaged base": (cut_base, "is damaged"),
  "merge of full weights": (
    lambda folder, base: ["merge", str(base.parent.parent), str(folder / "out")],
    "no LoRA adapter: there is nothing to merge",
  ),
  "merge into a folder that exists": (
    lambda folder, base: ["merge", str(folder / "trained"), str(folder)],
    "exists; name a folder that does not",
  ),
  "--adapter of full weights": (
    lambda folder, base: ["export", str(base.parent.parent), str(folder / "out"), "--adapter"],
    "no LoRA adapter; leave --adapter out",
  ),
  "--base of full weights": (
    lambda folder, base: ["export", str(base.parent.parent), str(folder / "out"), "--base", str(base)],
    "it has no base to be named",
  ),
}


@pytest.mark.parametrize("name", TRAINING)
def test_it_is_refused_in_one_line(
  name: str, folder: Path, base: Path, trained: Any, capfd: pytest.CaptureFixture[str]
) -> None:
  prepare, says = TRAINING[name]
  outcome = run_cli(prepare(folder, base), capfd)
  assert outcome.code in (1, 2)
  assert len(outcome.errors) == 1, outcome.err
  assert says in outcome.errors[0]
  assert not (folder / "out").exists()
  assert "Traceback" not in outcome.err


def test_inspect_says_what_it_is(folder: Path, trained: Any, capfd: pytest.CaptureFixture[str]) -> None:
  outcome = run_cli(["inspect", str(folder / "trained"), "--require", "layout=adapter", "resumable=false"], capfd)
  assert outcome.code == 0, outcome.err
  assert "posttrain merge" in outcome.out
