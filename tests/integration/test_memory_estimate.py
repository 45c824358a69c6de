"""The estimate of memory against what a tiny run really holds, and against XLA's own count of its step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx

from maxtext_posttrain.config import load_config
from maxtext_posttrain.errors import ConfigError
from maxtext_posttrain.trainers.base import Session
from maxtext_posttrain.trainers.sft import SFT
from tests.support import runs

pytestmark = pytest.mark.slow


def array_bytes(node: nnx.Module) -> int:
  """Of all arrays of a live module on this process's one device."""
  total = 0
  for leaf in jax.tree.leaves(nnx.state(node, nnx.Not(nnx.Intermediate))):
    value: Any = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    total += value.nbytes
  return total


def test_a_tiny_run(tmp_path: Path):
  session = runs.sft_session(runs.arguments(tmp_path, "tiny", "steps=1", "base_emb_dim=128", "max_target_length=256"))
  estimate, compiled = session.fit.estimate, session.steps.memory
  assert estimate.held["weights"] == array_bytes(session.trainer.model)
  assert estimate.held["optimizer"] == array_bytes(session.trainer.optimizer)
  # A step's arguments are what is held, and the batch: seven arrays of 2 x 256 int32 at most.
  held = sum(estimate.held.values())
  assert 0 <= compiled.argument_size_in_bytes - held <= 8 * 2 * 256 * 4
  assert 0.6 < sum(estimate.update.values()) / compiled.temp_size_in_bytes < 1.7


def test_a_run_that_can_not_fit_ends_before_it_compiles(tmp_path: Path):
  argv = runs.arguments(tmp_path, "large", "steps=1", "device_memory_gib=0.0001")
  with pytest.raises(ConfigError, match=r"memory: the run needs about .* which has 0\.1 MiB"):
    Session(SFT(), load_config(argv))
  assert not (tmp_path / "large").exists()
