"""Safetensors against the safetensors package, both ways."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from maxtext_posttrain.errors import ConfigError
from maxtext_posttrain.models.exporting import parse_size
from maxtext_posttrain.models.safetensors_files import (
  INDEX_NAME,
  SINGLE_NAME,
  PlannedTensor,
  SafetensorsFolder,
  plan_shards,
  write_shards,
)

RNG = np.random.default_rng(0)
TENSORS = {f"layer.{index}": RNG.normal(size=(4, 3)).astype(np.float32) for index in range(5)}


def write(folder: Path, dtype: np.dtype, limit: int) -> list[str]:
  planned = [PlannedTensor(name, array.shape) for name, array in TENSORS.items()]
  shards = plan_shards(planned, dtype, limit)
  write_shards(folder, shards, dtype, iter((name, array.astype(dtype)) for name, array in TENSORS.items()))
  return [name for name, _ in shards]


def test_what_is_written_the_package_reads(tmp_path: Path) -> None:
  assert write(tmp_path, np.dtype(np.float32), 10**9) == [SINGLE_NAME]
  for name, array in load_file(tmp_path / SINGLE_NAME).items():
    np.testing.assert_array_equal(array, TENSORS[name])
  with safe_open(tmp_path / SINGLE_NAME, framework="np") as file:
    assert file.metadata() == {"format": "pt"}


def test_shards_and_their_index(tmp_path: Path) -> None:
  names = write(tmp_path, np.dtype(np.float32), 2 * 48)
  assert names == [f"model-0000{index}-of-00003.safetensors" for index in (1, 2, 3)]
  index = json.loads((tmp_path / INDEX_NAME).read_text())
  assert index["metadata"]["total_size"] == 5 * 48
  found = {}
  for name in names:
    tensors = load_file(tmp_path / name)
    assert all(index["weight_map"][tensor] == name for tensor in tensors)
    found |= tensors
  assert found.keys() == TENSORS.keys() == index["weight_map"].keys()
  folder = SafetensorsFolder(tmp_path)
  for name, array in TENSORS.items():
    np.testing.assert_array_equal(folder.read(name), array)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
def test_what_the_package_writes_is_read(tmp_path: Path, dtype: np.dtype) -> None:
  tensors = {name: array.astype(dtype) for name, array in TENSORS.items()}
  save_file(tensors, tmp_path / SINGLE_NAME)
  folder = SafetensorsFolder(tmp_path)
  assert folder.shapes() == dict.fromkeys(TENSORS, (4, 3))
  for name, array in tensors.items():
    have = folder.read(name)
    assert have.dtype == dtype
    np.testing.assert_array_equal(have, array)


def test_bfloat16_is_written_as_such(tmp_path: Path) -> None:
  write(tmp_path, np.dtype(ml_dtypes.bfloat16), 10**9)
  with safe_open(tmp_path / SINGLE_NAME, framework="np") as file:
    assert file.get_slice("layer.0").get_dtype() == "BF16"


def test_a_tensor_larger_than_a_shard_has_one_alone() -> None:
  planned = [PlannedTensor("a", (1,)), PlannedTensor("b", (100,)), PlannedTensor("c", (1,))]
  shards = plan_shards(planned, np.dtype(np.float32), 8)
  assert [[tensor.name for tensor in shard] for _, shard in shards] == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize(
  ("text", "size"), [("200MB", 200 * 10**6), ("2GiB", 2**31), ("1.5 KB", 1500), ("77", 77), ("5gb", 5 * 10**9)]
)
def test_sizes(text: str, size: int) -> None:
  assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "5 parsecs", "0", "1e3"])
def test_what_is_no_size(text: str) -> None:
  with pytest.raises(ConfigError, match="--max-shard-size"):
    parse_size(text)
