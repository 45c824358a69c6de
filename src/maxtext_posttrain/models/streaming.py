"""A live model's weights under HuggingFace's names, for engines that take them one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from maxtext_posttrain.models.maxtext_config import from_maxtext
from maxtext_posttrain.models.weights import huggingface_tensors


def huggingface_weights(
  parameters: Mapping[tuple[str, ...], Any], config: Any, *, dtype: np.dtype | None = None
) -> Iterator[tuple[str, np.ndarray]]:
  """A model's weights as HuggingFace names and shapes them, one at a time.

  Args:
    parameters: arrays by path below the model, for example `("decoder", "layers", "mlp", "wo", "kernel")`; JAX's are
      fetched a layer at a time.
    config: MaxText's, or anything with its keys as attributes.
    dtype: of what is yielded; each parameter's own if left out.

  Raises:
    ModelError: the configuration is of no known family.
    KeyError: a parameter is missing.
  """
  architecture = from_maxtext(config)
  yield from huggingface_tensors(
    parameters,
    architecture.family,
    architecture.dimensions,
    scan_layers=config.scan_layers,
    scan_axis=config.param_scan_axis,
    dtype=dtype,
  )
