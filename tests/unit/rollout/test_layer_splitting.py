"""Stacked layers are taken apart at their places, and a model that is another is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from maxtext_posttrain.errors import GenerationError
from maxtext_posttrain.rollout.weights import LayerSplitter, by_path


def state(arrays: dict[str, np.ndarray]) -> nnx.State:
  return nnx.from_flat_state([(tuple(path.split("/")), nnx.Param(array)) for path, array in arrays.items()])


def numbered(*shape: int) -> np.ndarray:
  return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def split(given: dict[str, np.ndarray], wanted: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
  shapes = state({path: np.zeros(shape, np.float32) for path, shape in wanted.items()})
  splitter = LayerSplitter(state(given), shapes, scan_axis=1)
  return {"/".join(path): np.asarray(leaf) for path, leaf in jax.jit(splitter)(by_path(state(given))).items()}


def test_a_scan_over_layers():
  kernel, scale, table = numbered(4, 3, 5), numbered(3), numbered(7, 4)
  given = {"decoder/layers/mlp/kernel": kernel, "decoder/layers/gate": scale, "embedding": table}
  wanted = {
    f"decoder/layers_{i}/{name}": shape for i in range(3) for name, shape in (("mlp/kernel", (4, 5)), ("gate", ()))
  }
  apart = split(given, {**wanted, "embedding": (7, 4)})
  for layer in range(3):
    np.testing.assert_array_equal(apart[f"decoder/layers_{layer}/mlp/kernel"], kernel[:, layer])
    assert apart[f"decoder/layers_{layer}/gate"] == scale[layer]
  np.testing.assert_array_equal(apart["embedding"], table)


def test_a_scan_over_blocks_with_a_shorter_last_one():
  given = {f"decoder/layers/layers_{j}/w": numbered(2, 2) + 10 * j for j in range(3)}
  given |= {f"decoder/layers_remainder/layers_{j}/w": numbered(2) + 100 + j for j in range(2)}
  apart = split(given, {f"decoder/layers_{i}/w": (2,) for i in range(8)})
  for layer in range(6):
    block, place = divmod(layer, 3)
    np.testing.assert_array_equal(
      apart[f"decoder/layers_{layer}/w"], given[f"decoder/layers/layers_{place}/w"][:, block]
    )
  np.testing.assert_array_equal(apart["decoder/layers_7/w"], given["decoder/layers_remainder/layers_1/w"])


@pytest.mark.parametrize(
  ("wanted", "message"),
  [
    ({"decoder/layers_0/w": (4,)}, "has also decoder/layers_1/w"),
    ({f"decoder/layers_{i}/w": (4,) for i in range(3)}, "lacks decoder/layers_2/w"),
    ({f"decoder/layers_{i}/w": (5,) for i in range(2)}, r"decoder/layers_0/w: its shape is \(4,\)"),
  ],
)
def test_another_model(wanted: dict[str, tuple[int, ...]], message: str):
  with pytest.raises(GenerationError, match=message):
    split({"decoder/layers/w": numbered(4, 2)}, wanted)
