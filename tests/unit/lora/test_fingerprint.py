"""The base's fingerprint: every bit counts, and nothing else does."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_posttrain.lora.fingerprint import fingerprint

WEIGHTS = {
  ("a", "kernel"): np.arange(24, dtype=np.float32).reshape(2, 3, 4) / 7,
  ("b", "kernel"): np.linspace(-1, 1, 10).astype(jnp.bfloat16),
}


def changed(path: tuple[str, ...], array: Any) -> dict[tuple[str, ...], Any]:
  return {**WEIGHTS, path: array}


def one_bit(array: np.ndarray, index: int) -> np.ndarray:
  copy = array.copy()
  words = copy.reshape(-1).view(np.uint8)
  words[index] ^= 1
  return copy


def test_where_the_arrays_lie_and_in_which_order_does_not_matter() -> None:
  assert fingerprint(WEIGHTS) == fingerprint({path: jnp.asarray(WEIGHTS[path]) for path in reversed(list(WEIGHTS))})
  assert len(fingerprint(WEIGHTS)) == 32


@pytest.mark.parametrize("index", range(0, 96, 5))
def test_each_bit_matters(index: int) -> None:
  assert fingerprint(changed(("a", "kernel"), one_bit(WEIGHTS["a", "kernel"], index))) != fingerprint(WEIGHTS)


def test_the_sign_of_zero_matters() -> None:
  zeros = np.zeros(4, np.float32)
  assert fingerprint({("a",): zeros}) != fingerprint({("a",): -zeros})


@pytest.mark.parametrize(
  "other",
  [
    changed(("a", "kernel"), WEIGHTS["a", "kernel"][:, ::-1]),
    changed(("a", "kernel"), WEIGHTS["a", "kernel"].reshape(3, 2, 4)),
    changed(("b", "kernel"), WEIGHTS["b", "kernel"].astype(np.float32)),
    {("a", "kernel"): WEIGHTS["a", "kernel"]},
    {("c", "kernel"): WEIGHTS["a", "kernel"], ("b", "kernel"): WEIGHTS["b", "kernel"]},
  ],
  ids=["order", "shape", "dtype", "missing", "path"],
)
def test_order_shape_dtype_and_path_matter(other: dict[tuple[str, ...], Any]) -> None:
  assert fingerprint(other) != fingerprint(WEIGHTS)
