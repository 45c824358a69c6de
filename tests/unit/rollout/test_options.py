"""Options out of range are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from maxtext_posttrain.errors import GenerationError
from maxtext_posttrain.rollout.options import SamplingOptions


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("max_new_tokens", 0),
    ("max_new_tokens", -3),
    ("max_new_tokens", 2.0),
    ("max_new_tokens", 2**31),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("top_k", -1),
    ("top_k", True),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", float("nan")),
    ("seed", -1),
    ("seed", 2**64),
    ("n", 0),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", ("</s>",)),
  ],
)
def test_refused(name: str, value: Any):
  spoken = "a stop token" if name == "stop_token_ids" else name
  with pytest.raises(GenerationError, match=spoken):
    SamplingOptions(**{name: value})


def test_the_ends_of_the_ranges_are_allowed():
  SamplingOptions(max_new_tokens=1, temperature=0.0, top_k=0, top_p=1.0, seed=2**64 - 1, n=1, stop_token_ids=(0,))
