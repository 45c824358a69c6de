"""An adapter's record: there and back, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from maxtext_posttrain.errors import CheckpointError
from maxtext_posttrain.lora.record import AdapterRecord, refuse_adapter

RECORD = AdapterRecord(
  rank=4,
  alpha=8.0,
  module_path="decoder/.*",
  weight_qtype=None,
  tile_size=None,
  scan_axis=1,
  weight_dtype="float32",
  base="/base/0/items",
  fingerprint="00ff",
)


def test_there_and_back() -> None:
  metadata = RECORD.metadata()
  assert metadata["lora_rank"] == 4
  assert AdapterRecord.of({"lora": metadata, "scan_layers": True}, "x") == RECORD
  assert AdapterRecord.of({"scan_layers": True}, "x") is None
  assert RECORD.scale == 2.0


def without(name: str) -> dict[str, Any]:
  return {key: value for key, value in RECORD.metadata().items() if key != name}


@pytest.mark.parametrize(
  ("stored", "says"),
  [
    ("yes", "no mapping"),
    ({"lora_rank": 4, "lora_alpha": 8.0}, "base_fingerprint"),
    (without("base"), "lack base"),
    ({**RECORD.metadata(), "lora_rank": 0}, "lora_rank=0"),
    ({**RECORD.metadata(), "lora_rank": "4"}, "lora_rank='4'"),
    ({**RECORD.metadata(), "lora_alpha": None}, "lora_alpha=None"),
    ({**RECORD.metadata(), "base_fingerprint": 7}, "base_fingerprint"),
    ({**RECORD.metadata(), "param_scan_axis": 9}, "param_scan_axis=9"),
  ],
)
def test_metadata_that_say_too_little(stored: Any, says: str) -> None:
  with pytest.raises(CheckpointError, match="checkpoint x"):
    AdapterRecord.of({"lora": stored}, "x")
  with pytest.raises(CheckpointError, match=says):
    AdapterRecord.of({"lora": stored}, "x")


@pytest.mark.parametrize(
  ("change", "says"),
  [
    ({"rank": 8}, "lora_rank 4 there, 8 here"),
    ({"alpha": 16.0}, "lora_alpha 8.0 there, 16.0 here"),
    ({"module_path": ".*"}, "lora_module_path"),
    ({"weight_qtype": "nf4"}, "lora_weight_qtype None there, nf4 here"),
    ({"weight_dtype": "bfloat16"}, "weight_dtype"),
    ({"fingerprint": "1234", "base": "/other"}, "another base: /base/0/items with fingerprint 00ff, while /other has"),
  ],
)
def test_another_adapter_is_no_continuation(change: dict[str, Any], says: str) -> None:
  with pytest.raises(CheckpointError, match=says):
    RECORD.check_same(dataclasses.replace(RECORD, **change), "x")


def test_a_base_that_moved_is_the_same() -> None:
  RECORD.check_same(dataclasses.replace(RECORD, base="/moved"), "x")


def test_an_adapter_is_no_full_weights() -> None:
  with pytest.raises(CheckpointError, match="posttrain merge"):
    refuse_adapter({"lora": RECORD.metadata()}, "x")
  refuse_adapter({"scan_layers": True}, "x")
