"""Taking layers from a model: scanned and not, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from maxtext_posttrain.errors import ModelError
from maxtext_posttrain.models.layer_selection import check_same_shapes, select_layers

LAYERS = 5
KERNELS = np.random.default_rng(0).normal(size=(LAYERS, 3, 4)).astype(np.float32)
SCALES = np.random.default_rng(1).normal(size=(LAYERS, 3)).astype(np.float32)
OUTSIDE = {
  ("token_embedder", "embedding"): np.ones((7, 3), np.float32),
  ("decoder", "decoder_norm", "scale"): np.full(3, 2.0, np.float32),
}


def scanned(layers: list[int] | range, axis: int = 1) -> dict[tuple, np.ndarray]:
  """Stacked along `axis`, as MaxText has it with scan_layers=true."""
  return {
    ("decoder", "layers", "mlp", "wo", "kernel"): np.stack([KERNELS[layer] for layer in layers], axis=axis),
    ("decoder", "layers", "norm", "scale"): np.stack([SCALES[layer] for layer in layers], axis=axis),
    **OUTSIDE,
  }


def unscanned(layers: list[int] | range) -> dict[tuple, np.ndarray]:
  """As MaxText has it with scan_layers=false."""
  tree = dict(OUTSIDE)
  for place, layer in enumerate(layers):
    tree["decoder", f"layers_{place}", "mlp", "wo", "kernel"] = KERNELS[layer]
    tree["decoder", f"layers_{place}", "norm", "scale"] = SCALES[layer]
  return tree


@pytest.mark.parametrize("layers", [[0, 2, 4], [3], [4, 0], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("kind", ["scanned", "scanned along the first axis", "unscanned"])
def test_layers_are_taken_in_the_order_asked_for(kind: str, layers: list[int]):
  axis = 0 if "first" in kind else 1
  teacher, expected = (
    (unscanned(range(LAYERS)), unscanned(layers))
    if kind == "unscanned"
    else (scanned(range(LAYERS), axis), scanned(layers, axis))
  )
  selected = select_layers(teacher, layers, scan_axis=axis)
  assert sorted(selected) == sorted(expected)
  for path, array in expected.items():
    np.testing.assert_array_equal(selected[path], array, err_msg=str(path))
  check_same_shapes(selected, expected)


@pytest.mark.parametrize("tree", [scanned(range(LAYERS)), unscanned(range(LAYERS))])
def test_a_layer_that_does_not_exist(tree: dict[tuple, np.ndarray]):
  with pytest.raises(ModelError, match="layer 5 does not exist: the model has 5 layers"):
    select_layers(tree, [0, 5], scan_axis=1)


@pytest.mark.parametrize(
  "path",
  [
    ("decoder", "layers", "layers_0", "mlp", "kernel"),
    ("decoder", "layers_remainder", "layers_0", "mlp", "kernel"),
    ("decoder", "dense_layers", "mlp", "kernel"),
    ("decoder", "moe_layers", "mlp", "kernel"),
  ],
)
def test_layers_of_several_kinds_are_refused(path: tuple):
  with pytest.raises(ModelError, match="several kinds"):
    select_layers({path: np.zeros((2, 3, 4))}, [0], scan_axis=1)


def test_what_does_not_fit_is_named():
  whole, half = scanned(range(LAYERS)), scanned([0, 1])
  with pytest.raises(ModelError, match=r"decoder/layers/mlp/wo/kernel: .* \(3, 5, 4\), .* \(3, 2, 4\)"):
    check_same_shapes(whole, half)
  with pytest.raises(ModelError, match="the student has bias and the teacher has not"):
    check_same_shapes(half, {**half, ("bias",): np.zeros(1)})
  with pytest.raises(ModelError, match="the teacher has bias and the student has not"):
    check_same_shapes({**half, ("bias",): np.zeros(1)}, half)
