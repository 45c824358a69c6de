"""Prints the TFLOP/s of the best square float32 matrix product in JAX on this machine, by size and XLA options."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp

from maxtext_posttrain.performance import compiler_options

_SIZES = (1024, 2048, 4096)
_SECONDS = 1.5


def measure(size: int, options: dict[str, str]) -> float:
  """TFLOP/s of the fastest of repeated products of two [size, size] matrices."""
  left, right = jax.random.normal(jax.random.key(0), (2, size, size), jnp.float32)
  multiply = jax.jit(jnp.matmul).lower(left, right).compile(options)
  multiply(left, right).block_until_ready()
  best, end = float("inf"), time.perf_counter() + _SECONDS
  while (started := time.perf_counter()) < end:
    multiply(left, right).block_until_ready()
    best = min(best, time.perf_counter() - started)
  return 2 * size**3 / best / 1e12


def main() -> None:
  tuned = compiler_options(jax.default_backend())
  print(max(measure(size, options) for size in _SIZES for options in ({}, tuned)))


if __name__ == "__main__":
  main()
