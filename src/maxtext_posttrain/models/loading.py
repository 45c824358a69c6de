"""A live model from a checkpoint: its configuration, its weights and its tokenizer, without an optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.checkpointing.manager import MaxTextLayoutCheckpointManager
from maxtext_posttrain.config import Config, load_model_config
from maxtext_posttrain.maxtext_api import MaxTextConfig
from maxtext_posttrain.models.source import ModelSource
from maxtext_posttrain.tokenizers import Tokenizer, configured_tokenizer

_TRAINING_ONLY = ("load_parameters_path", "load_full_state_path")


@dataclasses.dataclass(frozen=True)
class LoadedModel:
  """A model with its weights.

  Attributes:
    source: where it came from.
    config: our view of its configuration.
    maxtext: MaxText's.
    mesh: the devices it lies on.
    model: the live model, with weights and nothing else of the checkpoint.
    tokenizer: None where the configuration names none (synthetic data).
  """

  source: ModelSource
  config: Config
  maxtext: MaxTextConfig
  mesh: Mesh
  model: nnx.Module
  tokenizer: Tokenizer | None


def load_model(
  source: ModelSource, overrides: Sequence[str] = (), *, fixed: Mapping[str, Any] | None = None
) -> LoadedModel:
  """Builds the model that `source` describes and loads its weights.

  Args:
    source: from `find_source`.
    overrides: `key=value` arguments laid over its configuration.
    fixed: MaxText keys the caller needs as they are, over everything else.

  Raises:
    ConfigError: the configuration is wrong.
    CheckpointError: the weights can't be read or don't fit the model.
    TokenizerError: the tokenizer can't be loaded.
  """
  config = load_model_config([str(source.config), *overrides])
  maxtext_api.quiet_logs(show=config.maxtext_log)
  maxtext_api.use_pretraining_prng()
  chosen = {key: value for key, value in config.maxtext_overrides().items() if key not in _TRAINING_ONLY}
  chosen |= {"run_name": chosen.get("run_name") or "model", "enable_checkpointing": False}
  chosen |= {"dataset_type": "synthetic", **(fixed or {})}  # MaxText asks for the files of any other kind.
  maxtext = maxtext_api.build_config(chosen, hidden_environment=config.environment)
  mesh = maxtext_api.build_mesh(maxtext)
  with maxtext_api.mesh_context(maxtext, mesh):
    pretraining = maxtext_api.pretraining_state(maxtext, mesh)
    model = pretraining.abstract_model
    manager = MaxTextLayoutCheckpointManager(None, None, config)
    manager.load_parameters(str(source.items), model)
    nnx.update(model, maxtext_api.init_all_but_weights(maxtext, pretraining))
  return LoadedModel(source, config, maxtext, mesh, model, configured_tokenizer(config))
