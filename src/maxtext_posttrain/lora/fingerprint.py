"""A digest of a model's weights, by which an adapter knows the base it was trained over."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SEEDS = (0x9E3779B9, 0x85EBCA6B)
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def fingerprint(weights: Mapping[tuple[Any, ...], Any]) -> str:
  """32 hexadecimal digits over every bit of the weights, their paths, shapes and dtypes.

  The arrays are digested where they lie, in one pass each: the sum, modulo 2^32, of a mix (MurmurHash3's finaliser) of
  each word with its position, twice with different seeds. A sum of integers is the same in any order, so neither the
  number of devices nor how the weights are sharded changes it. It tells a base that changed, down to one bit; it does
  not withstand someone who constructs a collision.

  Args:
    weights: arrays (JAX's or numpy's) by path.
  """
  digest = hashlib.blake2b(digest_size=16)
  sums = jax.device_get({path: _sums(array) for path, array in weights.items()})
  for path in sorted(weights, key=lambda path: "/".join(map(str, path))):
    array = weights[path]
    digest.update(f"{'/'.join(map(str, path))} {tuple(array.shape)} {np.dtype(array.dtype).name}\n".encode())
    digest.update(np.asarray(sums[path], "<u4").tobytes())
  return digest.hexdigest()


@jax.jit
def _sums(array: jax.Array) -> jax.Array:
  """Two sums of mixed words, [2] uint32."""
  words = jax.lax.bitcast_convert_type(array, _WORDS[array.dtype.itemsize]).astype(jnp.uint32)
  position = jnp.zeros(words.shape, jnp.uint32)
  stride = 1
  for axis in reversed(range(words.ndim)):
    position += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride % 2**32)
    stride *= words.shape[axis]
  return jnp.stack([jnp.sum(_mixed(words ^ _mixed(position + jnp.uint32(seed)))) for seed in _SEEDS])


def _mixed(word: jax.Array) -> jax.Array:
  word ^= word >> 16
  word *= jnp.uint32(0x85EBCA6B)
  word ^= word >> 13
  word *= jnp.uint32(0xC2B2AE35)
  return word ^ (word >> 16)
