"""What a generation engine is measured against: the trainer's forward pass over the whole sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.config import load_config
from maxtext_posttrain.maxtext_api import MaxTextConfig
from tests.support import runs

CONTEXT = 64
"""Tokens of the sequences that are measured."""


@dataclasses.dataclass
class TinyModel:
  """A MaxText model with random weights."""

  config: MaxTextConfig
  mesh: Mesh
  model: nnx.Module

  @classmethod
  def build(cls, folder: Path, *extra: str) -> TinyModel:
    """A tiny model; `extra` are configuration arguments."""
    argv = runs.arguments(folder, "tiny", "steps=10", "matmul_precision=highest", *extra)
    maxtext_api.use_pretraining_prng()
    config = maxtext_api.build_config(load_config(argv).maxtext_overrides())
    mesh = maxtext_api.build_mesh(config)
    model = maxtext_api.init_model(config, maxtext_api.pretraining_state(config, mesh), mesh)
    return cls(config, mesh, model)

  def __post_init__(self) -> None:
    config = self.config

    @nnx.jit
    def forward(model: nnx.Module, tokens: jnp.ndarray) -> jnp.ndarray:
      ones = jnp.ones_like(tokens)
      positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
      batch = {"inputs": tokens, "inputs_position": positions, "inputs_segmentation": ones}
      return maxtext_api.forward(
        config, model, {**batch, "targets": tokens, "targets_segmentation": ones}, is_train=False
      )

    self._forward = forward

  def log_probs(self, prompt: Sequence[int], completion: Sequence[int]) -> np.ndarray:
    """Log-probabilities [len(completion), vocab] of each next token by the trainer's forward, in float64."""
    ids = np.zeros((1, CONTEXT), np.int32)
    ids[0, : len(prompt) + len(completion)] = [*prompt, *completion]
    with maxtext_api.mesh_context(self.config, self.mesh):
      logits = np.asarray(self._forward(self.model, jnp.asarray(ids)))[0].astype(np.float64)
    logits = logits[len(prompt) - 1 :][: len(completion)]
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
