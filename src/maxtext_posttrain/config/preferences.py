"""What a configuration says of preference optimisation, and what of it can't be: `dpo: {algo, loss_type, ...}`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

TRAINER = "dpo"

LossName = Literal["sigmoid", "sigmoid_norm", "hinge", "ipo", "simpo", "orpo"]
ReferenceKind = Literal["frozen", "precomputed", "adapter_off"]

LOSS_TYPES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "simpo")
"""Values of `dpo.loss_type`."""

REFERENCE_KINDS = ("frozen", "precomputed", "adapter_off")
"""Values of `dpo.reference`."""

REFERENCE_FREE: frozenset[str] = frozenset({"simpo", "orpo"})
"""Losses that compare with no reference."""

SMOOTHED: frozenset[str] = frozenset({"sigmoid", "sigmoid_norm", "simpo", "orpo"})
"""Losses that take label smoothing."""


def loss_name(config: Any) -> LossName:
  """`orpo` with `dpo.algo=orpo`, else `dpo.loss_type`."""
  return "orpo" if config.dpo.algo == "orpo" else config.dpo.loss_type


def reference_kind(config: Any) -> ReferenceKind | None:
  """Where the reference's log-probabilities come from; None where the loss compares with none.

  Where `dpo.reference` does not say: from the base under an adapter, or else from a frozen model.
  """
  if loss_name(config) in REFERENCE_FREE:
    return None
  return config.dpo.reference or ("adapter_off" if config.lora.enable_lora else "frozen")


def problems(value: Callable[[str], Any], is_set: Callable[[str], bool], at: Callable[[str], str]) -> Iterator[str]:
  """What is wrong with the keys of preference optimisation, one line each.

  Args:
    value: a key's value.
    is_set: whether someone set the key.
    at: `where: key=value`, for the start of a line.
  """
  orpo = value("dpo.algo") == "orpo"
  loss = "orpo" if orpo else value("dpo.loss_type")
  of_loss = "dpo.algo=orpo" if orpo else f"dpo.loss_type={loss}"
  if orpo and value("dpo.loss_type") != LOSS_TYPES[0]:
    yield f"{at('dpo.loss_type')}: ORPO has a loss of its own; leave this key out, or set dpo.algo=dpo"
  if value("dpo.dpo_beta") <= 0:
    yield f"{at('dpo.dpo_beta')}: must be above 0"
  if value("dpo.orpo_lambda") < 0:
    yield f"{at('dpo.orpo_lambda')}: must be at least 0"
  if value("dpo.dpo_label_smoothing") >= 0.5:
    yield f"{at('dpo.dpo_label_smoothing')}: must be below 0.5, where labels say nothing any more"
  elif value("dpo.dpo_label_smoothing") > 0 and loss not in SMOOTHED:
    yield f"{at('dpo.dpo_label_smoothing')}: {of_loss} takes no label smoothing; set it to 0"
  if is_set("dpo.simpo_gamma") and loss != "simpo":
    yield f"{at('dpo.simpo_gamma')}: only dpo.loss_type=simpo has a target margin; leave this key out"
  yield from _reference_problems(loss, of_loss, value, at)
  prompt, length = value("dpo.max_prompt_length"), value("max_target_length")
  if prompt is not None and prompt >= length:
    yield f"{at('dpo.max_prompt_length')}: leaves no room for a completion; must be below max_target_length={length}"
  if value("dataset_type") == "synthetic":
    yield f"{at('dataset_type')}: preference pairs can't be made up; use hf or grain"
  if is_set("sft_train_on_completion_only") and not value("sft_train_on_completion_only"):
    yield f"{at('sft_train_on_completion_only')}: a prompt's tokens never count in a preference; leave this key out"


def _reference_problems(
  loss: str, of_loss: str, value: Callable[[str], Any], at: Callable[[str], str]
) -> Iterator[str]:
  reference, lora = value("dpo.reference"), value("lora.enable_lora")
  if reference is not None and loss in REFERENCE_FREE:
    yield f"{at('dpo.reference')}: {of_loss} compares with no reference; leave this key out"
  elif reference == "adapter_off" and not lora:
    yield f"{at('dpo.reference')}: there is no adapter to turn off; set lora.enable_lora=true, or dpo.reference=frozen"
