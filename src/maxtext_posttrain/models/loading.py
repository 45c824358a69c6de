"""A live model from a checkpoint: its configuration, its weights and its tokenizer, without an optimizer."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.checkpointing.manager import MaxTextLayoutCheckpointManager
from maxtext_posttrain.checkpointing.paths import raise_problems
from maxtext_posttrain.config import Config, load_model_config
from maxtext_posttrain.config.layers import Kind
from maxtext_posttrain.errors import ConfigError
from maxtext_posttrain.lora.weights import AdapterCheckpoint, Parameters, read_adapter, read_record
from maxtext_posttrain.maxtext_api import MaxTextConfig
from maxtext_posttrain.models.items import read_parameters
from maxtext_posttrain.models.source import ModelSource
from maxtext_posttrain.tokenizers import Tokenizer, configured_tokenizer

# With distill_beta a model gives out what its attention computes, each time it is called.
_TRAINING_ONLY = re.compile(r"load_parameters_path|load_full_state_path|lora|distill_\w+")


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
  maxtext, mesh = _build(config, fixed or {})
  with maxtext_api.mesh_context(maxtext, mesh):
    pretraining = maxtext_api.pretraining_state(maxtext, mesh)
    model = pretraining.abstract_model
    if read_record(str(source.items)) is None:
      MaxTextLayoutCheckpointManager(None, None, config).load_parameters(str(source.items), model)
    else:
      moved = config.load_parameters_path if config.sources["load_parameters_path"] == Kind.COMMAND_LINE.value else None
      parameters, _ = full_parameters(source, config, base=moved)
      _assign(model, parameters)
    nnx.update(model, maxtext_api.init_all_but_weights(maxtext, pretraining))
  return LoadedModel(source, config, maxtext, mesh, model, configured_tokenizer(config))


def full_parameters(source: ModelSource, config: Config, *, base: str | None = None) -> tuple[Parameters, bool]:
  """The full weights of a step by path below `params/params`; an adapter's are merged with its base's.

  Args:
    source: from `find_source`.
    config: the model's.
    base: where an adapter's base lies now, if not where the adapter's checkpoint says.

  Returns:
    The weights, and whether layers are scanned.

  Raises:
    CheckpointError: they can't be read, or the base is not the adapter's.
    ConfigError: `base` is given for full weights.
  """
  items = str(source.items)
  if read_record(items) is None:
    if base is not None:
      raise ConfigError(f"{items} holds full weights: it has no base to be named")
    return read_parameters(items)
  adapter = read_adapter_of(source, config, base=base)
  return adapter.merged(), adapter.scan_layers


def read_adapter_of(source: ModelSource, config: Config, *, base: str | None = None) -> AdapterCheckpoint:
  """A LoRA run's adapter and its base; see `full_parameters` for the arguments and `read_adapter` for errors."""
  return read_adapter(str(source.items), base, functools.partial(_drawn_parameters, config))


def _drawn_parameters(config: Config) -> Parameters:
  """The weights a run over fresh ones began with, drawn from its seed again."""
  maxtext, mesh = _build(config, {})
  model = maxtext_api.init_model(maxtext, maxtext_api.pretraining_state(maxtext, mesh), mesh)
  return {
    tuple(map(str, path)): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
  }


def _build(config: Config, fixed: Mapping[str, Any]) -> tuple[MaxTextConfig, Mesh]:
  """MaxText's configuration of the model alone, and the devices."""
  maxtext_api.quiet_logs(show=config.maxtext_log)
  maxtext_api.use_pretraining_prng()
  chosen = {key: value for key, value in config.maxtext_overrides().items() if not _TRAINING_ONLY.fullmatch(key)}
  chosen |= {"run_name": chosen.get("run_name") or "model", "enable_checkpointing": False}
  chosen |= {"dataset_type": "synthetic", **fixed}  # MaxText asks for the files of any other kind.
  maxtext = maxtext_api.build_config(chosen, hidden_environment=config.environment)
  return maxtext, maxtext_api.build_mesh(maxtext)


def _assign(model: nnx.Module, parameters: Parameters) -> None:
  """Puts weights into a model, cast to its dtypes and placed as its own are.

  Raises:
    CheckpointError: they are not the model's.
  """
  flat = [(path, leaf) for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))]
  wanted = {tuple(map(str, path)): leaf.get_value() for path, leaf in flat}
  problems = [f"{'/'.join(path)}: not there" for path in wanted if path not in parameters]
  problems += [f"{'/'.join(path)}: the model has none" for path in parameters if path not in wanted]
  problems += [
    f"{'/'.join(path)}: shape {parameters[path].shape}, {leaf.shape} wanted"
    for path, leaf in wanted.items()
    if path in parameters and parameters[path].shape != leaf.shape
  ]
  raise_problems("the base does not fit the model", problems)
  placed = [
    (path, leaf.replace(jax.device_put(parameters[key].astype(old.dtype), old.sharding)))
    for (path, leaf), (key, old) in zip(flat, wanted.items(), strict=True)
  ]
  nnx.update(model, nnx.from_flat_state(placed))
