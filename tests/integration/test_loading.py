"""A model is built again from what its run left: configuration, weights, tokenizer."""

from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from maxtext_posttrain.models.loading import load_model
from maxtext_posttrain.models.source import find_source
from tests.support import runs

pytestmark = pytest.mark.slow


def test_a_run_is_loaded_by_its_folder(tmp_path: Path):
  session = runs.sft_session(runs.arguments(tmp_path, "made", "steps=2"))
  run = tmp_path / "made"
  loaded = load_model(find_source(str(run)))
  assert loaded.source.step == 2
  assert loaded.tokenizer is None
  want = jax.tree.leaves_with_path(nnx.state(session.trainer.model, nnx.Param))
  have = dict(jax.tree.leaves_with_path(nnx.state(loaded.model, nnx.Param)))
  assert len(have) == len(want)
  # What is no weight is a fresh model's.
  assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(loaded.model)))
  for path, leaf in want:
    np.testing.assert_array_equal(have[path], leaf)
