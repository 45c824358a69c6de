"""An adapter folded into the kernels it lies on: pure functions of arrays, numpy's or JAX's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KERNEL = "kernel"
LORA_A = "kernel_lora_a"
LORA_B = "kernel_lora_b"

Path = tuple[Any, ...]


def stacked_axis(path: Path, scan_axis: int) -> int | None:
  """Along which axis scanned layers stack the parameter at `path`; None where it is one layer's."""
  return scan_axis if "layers" in path else None


def adapted_kernels(adapter: Mapping[Path, Any]) -> Iterator[tuple[Path, Any, Any]]:
  """The path of each kernel with an adapter, and its A and B."""
  for path, a in adapter.items():
    if path[-1] == LORA_A:
      yield (*path[:-1], KERNEL), a, adapter[(*path[:-1], LORA_B)]


def misfit(kernel: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...], axis: int | None) -> str | None:
  """Why A and B don't make a kernel of this shape; None where they do.

  The kernel's leading axes are A's inputs, the others B's outputs: [*inputs, *outputs], [inputs, rank], [rank,
  outputs]; all three stacked along `axis`, unless that is None.
  """
  shown = f"A {a} and B {b} do not make a kernel of shape {kernel}"
  if axis is not None:
    if not min(map(len, (kernel, a, b))) > axis or len({kernel[axis], a[axis], b[axis]}) != 1:
      return shown
    kernel, a, b = (shape[:axis] + shape[axis + 1 :] for shape in (kernel, a, b))
  if len(a) != 2 or len(b) != 2 or a[1] != b[0] or number_of_inputs(kernel, a[0]) is None:
    return shown
  return None if _size(kernel) == a[0] * b[1] else shown


def number_of_inputs(kernel: tuple[int, ...], inputs: int) -> int | None:
  """How many leading axes of one layer's kernel are its inputs; None where no number of them is."""
  return next((count for count in range(1, len(kernel)) if _size(kernel[:count]) == inputs), None)


def _size(shape: tuple[int, ...]) -> int:
  return int(np.prod(shape, dtype=np.int64))


def merged_kernel(kernel: Any, a: Any, b: Any, *, scale: float, axis: int | None) -> Any:
  """W + scale · A B, computed in float32 and rounded once to W's dtype.

  Args:
    kernel: W, [*inputs, *outputs]; stacked along `axis` like A and B.
    a: [inputs, rank].
    b: [rank, outputs].
    scale: alpha / rank.
    axis: along which layers are stacked; None where they are not.
  """
  xp: Any = jnp if isinstance(kernel, jax.Array) else np
  stacked = [xp.asarray(array) if axis is None else xp.moveaxis(array, axis, 0) for array in (kernel, a, b)]
  w, a, b = stacked
  delta = xp.matmul(a.astype(np.float32), b.astype(np.float32)).reshape(w.shape)
  merged = (w.astype(np.float32) + delta * np.float32(scale)).astype(kernel.dtype)
  return merged if axis is None else xp.moveaxis(merged, 0, axis)
