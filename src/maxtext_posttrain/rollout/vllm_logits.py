"""Makes vLLM give the log-probabilities of what was sampled from: at the temperature, before top-k and top-p.

vLLM gives raw log-probabilities (temperature 1) or those of what top-k and top-p left. Taking the logarithm of the sum
of their exponentials off all logits changes neither what is sampled nor what is filtered, and makes the logits
themselves log-probabilities: `logprobs_mode="processed_logits"` then gives them of the token that was chosen, whatever
was filtered around it.

vLLM loads this module; it needs torch.
"""

from __future__ import annotations

from typing import Any

import torch  # pyright: ignore[reportMissingImports]  # with vLLM
from vllm.v1.sample.logits_processor import LogitsProcessor  # pyright: ignore[reportMissingImports]

MODE = "processed_logits"


class _Normalised(LogitsProcessor):
  """Logits less the logarithm of the sum of their exponentials, [batch, vocab]."""

  def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool):
    del vllm_config, device, is_pin_memory

  def apply(self, logits: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(dim=-1)

  def update_state(self, batch_update: Any) -> None:
    """Holds nothing of the batch."""


class BeforeTemperature(_Normalised):
  """For greedy requests, which vLLM hands to no other kind of processor."""

  def is_argmax_invariant(self) -> bool:
    """False asks to be called for greedy requests too."""
    return False


class AfterTemperature(_Normalised):
  """For sampled ones, whose logits are over the temperature by then and not filtered yet."""

  def is_argmax_invariant(self) -> bool:
    """True asks to be called after the temperature."""
    return True


PROCESSORS = (BeforeTemperature, AfterTemperature)
