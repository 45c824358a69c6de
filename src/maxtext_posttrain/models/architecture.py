"""What a model is, apart from its weights."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from maxtext_posttrain.errors import ModelError
from maxtext_posttrain.models.families import Family
from maxtext_posttrain.models.weights import Dimensions

MAXTEXT_ROPE_FACTOR = 8
"""The factor of Llama 3's rope scaling that MaxText 0.2.5 has built in; this package's models take another."""
UNSET_ROPE_FACTOR = 40
UNSET_POSITIONS = 163840
"""MaxText's defaults of keys that it reads for YaRN alone."""
GEMMA_EPSILON = 1e-6
"""What MaxText's Gemma blocks have built in."""


@dataclasses.dataclass(frozen=True)
class Rope:
  """Rotary position embedding.

  Attributes:
    theta: its base (of global layers, where local ones have their own).
    local_theta: of Gemma 3's local layers.
    scaling: `llama3` (longer waves slowed by `factor`), `linear` (all of them) or none.
    factor: of the scaling.
  """

  theta: int
  local_theta: int | None = None
  scaling: Literal["none", "llama3", "linear"] = "none"
  factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Architecture:
  """A model without its weights.

  Attributes:
    family: whose table applies.
    dimensions: its sizes.
    rope: its position embedding.
    norm_epsilon: of its RMS norms.
    sliding_window: of Gemma's local layers.
    attention_softcap: of attention scores.
    final_softcap: of logits.
    max_positions: the context it was made for, where that is known.
    notes: where MaxText computes it differently, one line each.
  """

  family: Family
  dimensions: Dimensions
  rope: Rope
  norm_epsilon: float
  sliding_window: int | None = None
  attention_softcap: float | None = None
  final_softcap: float | None = None
  max_positions: int | None = None
  notes: tuple[str, ...] = ()


def gemma3_name(architecture: Architecture, where: str) -> str:
  """MaxText tells Gemma 3's attention scale by the model's name.

  Raises:
    ModelError: it has no name for this scale.
  """
  dimensions = architecture.dimensions
  if math.isclose(dimensions.query_scale, dimensions.head**-0.5, rel_tol=1e-6):
    return "gemma3-4b"
  if math.isclose(dimensions.query_scale, (dimensions.emb // dimensions.heads) ** -0.5, rel_tol=1e-6):
    return "gemma3-27b"
  scalar = dimensions.query_scale**-2
  raise ModelError(
    f"{where}: query_pre_attn_scalar {scalar:g}: MaxText's Gemma 3 knows head_dim ({dimensions.head}) and"
    f" hidden_size / heads ({dimensions.emb // dimensions.heads})"
  )
