"""W + scale · A B, by hand and against float64; shapes that don't belong together."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_posttrain.lora.kernels import adapted_kernels, merged_kernel, misfit, number_of_inputs, stacked_axis


def test_a_kernel_by_hand() -> None:
  kernel = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
  a, b = np.array([[1], [10]], np.float32), np.array([[1, 0, 2]], np.float32)
  np.testing.assert_array_equal(merged_kernel(kernel, a, b, scale=0.5, axis=None), [[1.5, 2, 4], [9, 5, 16]])


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("inputs", [1, 2])
def test_stacked_layers_are_merged_one_by_one(inputs: int, xp: object) -> None:
  generator = np.random.default_rng(0)
  layers, sizes, rank = 3, (4, 5, 6), 2
  shape = (sizes[0], layers, *sizes[1:])
  rows = int(np.prod(sizes[:inputs]))
  columns = int(np.prod(sizes[inputs:]))
  kernel = generator.normal(size=shape).astype(np.float32)
  a = generator.normal(size=(rows, layers, rank)).astype(np.float32)
  b = generator.normal(size=(rank, layers, columns)).astype(np.float32)
  merged = np.asarray(merged_kernel(*(xp.asarray(array) for array in (kernel, a, b)), scale=2.0, axis=1))  # type: ignore[attr-defined]
  assert merged.shape == shape
  for layer in range(layers):
    delta = (a[:, layer].astype(np.float64) @ b[:, layer].astype(np.float64)).reshape(sizes)
    np.testing.assert_allclose(merged[:, layer], kernel[:, layer] + 2.0 * delta, rtol=1e-5, atol=1e-5)


def test_the_kernels_dtype_is_kept_and_rounded_to_once() -> None:
  kernel = np.ones((2, 2), jnp.bfloat16)
  a, b = np.full((2, 1), 2**-9, np.float32), np.full((1, 2), 1.0, np.float32)
  # bfloat16 is 2^-7 apart above 1: half of that rounds to the even neighbour, more than half up.
  merged = merged_kernel(kernel, a, b, scale=2.0, axis=None)
  assert merged.dtype == jnp.bfloat16
  assert float(merged[0, 0]) == 1.0
  assert float(merged_kernel(kernel, a, b, scale=2.125, axis=None)[0, 0]) == 1 + 2**-7


@pytest.mark.parametrize(
  ("kernel", "a", "b", "axis"),
  [
    ((4, 6), (4, 2), (2, 5), None),
    ((4, 6), (5, 2), (2, 6), None),
    ((4, 6), (4, 2), (3, 6), None),
    ((4, 6), (4, 3, 2), (2, 3, 6), None),
    ((4, 3, 6), (4, 2, 2), (2, 3, 6), 1),
    ((4, 3, 6), (4, 3), (3, 6), 1),
    ((4,), (4, 2), (2, 4), None),
  ],
)
def test_what_does_not_fit_is_told(
  kernel: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...], axis: int | None
) -> None:
  assert str(kernel) in (misfit(kernel, a, b, axis) or "")


def test_what_fits() -> None:
  assert misfit((4, 2, 3), (4, 8), (8, 6), None) is None
  assert misfit((4, 2, 3), (8, 5), (5, 3), None) is None
  assert misfit((4, 7, 2, 3), (4, 7, 8), (8, 7, 6), 1) is None
  assert number_of_inputs((4, 2, 3), 8) == 2
  assert number_of_inputs((4, 2, 3), 24) is None


def test_pairs_and_stacks_are_told_by_their_path() -> None:
  path = ("decoder", "layers", "mlp", "wo")
  adapter = {(*path, "kernel_lora_a"): 1, (*path, "kernel_lora_b"): 2}
  assert list(adapted_kernels(adapter)) == [((*path, "kernel"), 1, 2)]
  assert stacked_axis((*path, "kernel"), 1) == 1
  assert stacked_axis(("decoder", "layers_0", "mlp"), 1) is None
  assert stacked_axis(("decoder", "layers_remainder", "layers_0", "mlp"), 1) is None
