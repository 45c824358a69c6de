"""A live MaxText model's weights as vLLM reloads them: HuggingFace's names, torch tensors, one at a time, no file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]  # with vLLM
from flax import nnx

from maxtext_posttrain.maxtext_api import MaxTextConfig
from maxtext_posttrain.models.families import EMBEDDING, HEAD
from maxtext_posttrain.models.streaming import huggingface_weights
from maxtext_posttrain.rollout.weights import by_path


def torch_weights(
  weights: nnx.State, config: MaxTextConfig, *, copy_head: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
  """The weights by HuggingFace's names, in the type they have.

  Args:
    weights: of a model of `config`.
    config: MaxText's.
    copy_head: give the embedding table as the head too, rounded to bfloat16 as MaxText rounds it there, for a tied
      model that vLLM holds untied.

  Raises:
    ModelError: the architecture has no HuggingFace form.
    KeyError: a weight is missing.
  """
  parameters = {
    tuple(map(str, path)): _on_host(leaf) for path, leaf in by_path(nnx.filter_state(weights, nnx.Param)).items()
  }
  for name, array in huggingface_weights(parameters, config):
    tensor = as_tensor(array)
    yield name, tensor
    if copy_head and name == EMBEDDING:
      yield HEAD, tensor.to(torch.bfloat16).to(tensor.dtype)


def as_tensor(array: np.ndarray) -> torch.Tensor:
  """An array as a tensor over the same memory; over a copy where it may not be written."""
  if not array.flags.writeable:
    array = array.copy()
  if array.dtype.name == "bfloat16":
    return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
  return torch.from_numpy(array)


def _on_host(leaf: Any) -> Any:
  """The array where the host can see it, if that takes no copy; else as it is, to be fetched a layer at a time."""
  on_cpu = isinstance(leaf, jax.Array) and all(device.platform == "cpu" for device in leaf.devices())
  return np.asarray(leaf) if on_cpu else leaf
