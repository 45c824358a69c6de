"""Imported models compute transformers' logits, generate its tokens, and come out again as they went in."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx
from safetensors.numpy import load_file

from maxtext_posttrain import cli, maxtext_api
from maxtext_posttrain.checkpointing import layout
from maxtext_posttrain.data import BATCH_KEYS
from maxtext_posttrain.handback import base_config
from maxtext_posttrain.models.loading import LoadedModel, load_model
from maxtext_posttrain.models.source import find_source
from maxtext_posttrain.rollout.native import NativeEngine
from maxtext_posttrain.rollout.options import SamplingOptions
from tests.support import families, runs
from tests.support.cli import run_cli

pytestmark = pytest.mark.slow

HERE: dict[str, Any] = {
  "hardware": "cpu",
  "attention": "dot_product",
  "matmul_precision": "highest",
  "remat_policy": "minimal",
  "max_target_length": max(families.LENGTHS),
  "per_device_batch_size": len(families.LENGTHS),
  "skip_jax_distributed_system": True,
  "enable_goodput_recording": False,
}
UNSCANNED = ("gemma2", "llama3_1")
CASES = [(name, True) for name in families.NAMES] + [(name, False) for name in UNSCANNED]


def forward(loaded: LoadedModel, rows: list[np.ndarray]) -> list[np.ndarray]:
  """Logits [length, vocab] of each row, computed in one batch padded on the right."""
  size = loaded.maxtext.max_target_length
  tokens = np.zeros((len(rows), size), np.int32)
  segments = np.zeros_like(tokens)
  for index, row in enumerate(rows):
    tokens[index, : len(row)], segments[index, : len(row)] = row, 1
  positions = np.broadcast_to(np.arange(size, dtype=np.int32), tokens.shape)
  arrays = {"inputs": tokens, "targets": tokens, "inputs_position": positions}
  arrays |= {"inputs_segmentation": segments, "targets_segmentation": segments}
  batch = {key: jnp.asarray(arrays.get(key, positions)) for key in BATCH_KEYS}
  graphdef, state = nnx.split(loaded.model)

  @jax.jit
  def compute(state: nnx.State) -> jax.Array:
    return maxtext_api.forward(loaded.maxtext, nnx.merge(graphdef, state), batch, is_train=False)

  with maxtext_api.mesh_context(loaded.maxtext, loaded.mesh):
    logits = np.asarray(compute(state))
  return [logits[index, : len(row)] for index, row in enumerate(rows)]


@dataclasses.dataclass(frozen=True)
class Imported:
  """A family's model, imported into `folder` and loaded from there."""

  name: str
  folder: Path
  loaded: LoadedModel


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case[0] if case[1] else f"{case[0]}, unscanned")
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Imported:
  name, scan_layers = request.param
  folder = tmp_path_factory.mktemp(name) / "imported"
  options = [] if scan_layers else ["--unscanned"]
  assert cli.main(["import", str(families.FOLDER / name), str(folder), *options]) == 0
  return Imported(name, folder, load_model(find_source(str(folder)), fixed=HERE))


def test_tensors_come_out_as_they_went_in(
  imported: Imported, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
  exported = tmp_path / "exported"
  outcome = run_cli(["export", str(imported.folder), str(exported)], capfd)
  assert outcome.code == 0, outcome.err
  have, want = load_file(exported / "model.safetensors"), families.tensors(imported.name)
  assert sorted(have) == sorted(want)
  for tensor, array in want.items():
    np.testing.assert_array_equal(have[tensor].view(np.uint32), array.view(np.uint32), err_msg=tensor)
  config = json.loads((exported / "config.json").read_text())
  assert config["architectures"] == families.config(imported.name)["architectures"]


def test_items_are_the_models_weights(imported: Imported) -> None:
  items = runs.items(imported.folder / "0")
  assert items.pop(("step",)) == 0
  assert {path: (leaf.shape, leaf.dtype) for path, leaf in items.items()} == {
    ("params", "params", *path): (leaf.shape, leaf.dtype)
    for path, leaf in layout.flatten_state(nnx.state(imported.loaded.model, nnx.Param)).items()
  }


def test_logits_are_transformers(imported: Imported) -> None:
  references = families.logits(imported.name)
  computed = forward(imported.loaded, [tokens[0] for tokens, _ in references.values()])
  for logits, (_, reference) in zip(computed, references.values(), strict=True):
    np.testing.assert_allclose(logits, reference[0], atol=1e-4, rtol=0)


def test_greedy_tokens_are_transformers(imported: Imported) -> None:
  """One batch of prompts of several lengths, the longer of them beyond a window's size."""
  prompts, wanted = families.greedy(imported.name)
  options = SamplingOptions(max_new_tokens=len(wanted[0]), temperature=0.0)
  engine = NativeEngine(imported.loaded.maxtext, imported.loaded.mesh, imported.loaded.model)
  assert [one.token_ids for one in engine.generate(prompts, options)] == wanted


def test_fifty_prompts_are_completed_as_transformers_completes_each(
  tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
  """Prompts of 1 to 40 tokens together, in waves of 16: made by scripts/make_greedy_reference.py."""
  assert run_cli(["import", str(families.FOLDER / "llama3_1"), str(tmp_path / "imported")], capfd).code == 0
  loaded = load_model(find_source(str(tmp_path / "imported")), fixed=HERE)
  rows = json.loads((families.FOLDER.parent / "greedy_prompts.json").read_text(encoding="utf-8"))
  assert len(rows) == 50
  options = SamplingOptions(max_new_tokens=len(rows[0]["tokens"]), temperature=0.0)
  engine = NativeEngine(loaded.maxtext, loaded.mesh, loaded.model, max_context=64, max_batch=16)
  completions = engine.generate([row["prompt"] for row in rows], options)
  assert [one.token_ids for one in completions] == [row["tokens"] for row in rows]


def test_real_pre_training_loads_the_weights(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
  """`load_parameters_path`, twice with a learning rate of 0: imported weights give one loss, fresh ones another."""
  folder = tmp_path / "imported"
  assert run_cli(["import", str(families.FOLDER / "llama2"), str(folder)], capfd).code == 0
  keys = yaml.safe_load((folder / "model.yml").read_text()) | HERE
  keys |= {"base_output_directory": str(tmp_path), "steps": 1, "dataset_type": "synthetic", "learning_rate": 0.0}
  keys |= {"enable_checkpointing": False}
  fresh = {**keys, "load_parameters_path": ""}
  imported, untrained = runs.pretraining(
    [arguments(keys | {"run_name": "imported"}), arguments(fresh | {"run_name": "fresh"})], tmp_path
  )
  assert imported["error"] is None, imported["log"][-2000:]
  assert untrained["error"] is None, untrained["log"][-2000:]
  assert imported["losses"][0] != untrained["losses"][0]


def arguments(keys: dict[str, Any]) -> list[str]:
  """MaxText's command line."""
  values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in keys.items()}
  return [str(base_config()), *(f"{key}={value}" for key, value in values.items() if value != "")]


def test_an_untied_import_is_exported_tied_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
  folder, exported = tmp_path / "imported", tmp_path / "exported"
  assert run_cli(["import", str(families.FOLDER / "smollm2"), str(folder), "--untie"], capfd).code == 0
  assert ("params", "params", "decoder", "logits_dense", "kernel") in runs.items(folder / "0")
  assert run_cli(["export", str(folder), str(exported), "--dtype", "bfloat16"], capfd).code == 0
  assert json.loads((exported / "config.json").read_text())["tie_word_embeddings"] is True
  assert "lm_head.weight" not in load_file(exported / "model.safetensors")


def test_items_of_another_model_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
  for name in ("llama2", "qwen3"):
    assert run_cli(["import", str(families.FOLDER / name), str(tmp_path / name)], capfd).code == 0
  argv = ["export", str(tmp_path / "llama2"), str(tmp_path / "out"), "--config", str(tmp_path / "qwen3" / "model.yml")]
  outcome = run_cli(argv, capfd)
  assert outcome.code == 1
  assert len(outcome.errors) == 1
  assert "self_attention/query_norm/scale is missing" in outcome.errors[0]
  assert not (tmp_path / "out").exists()
