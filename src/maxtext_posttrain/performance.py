"""Throughput of an update, and the share of the hardware's peak where that is known."""

from __future__ import annotations

from collections.abc import Callable

_PEAK_BF16_TFLOPS = {
  "TPU v4": 275.0,
  "TPU v5 lite": 197.0,
  "TPU v5e": 197.0,
  "TPU v5": 459.0,
  "TPU v5p": 459.0,
  "TPU v6 lite": 918.0,
  "TPU v6e": 918.0,
  "NVIDIA A100": 312.0,
  "NVIDIA H100": 989.0,
  "NVIDIA H200": 989.0,
}
"""Dense bfloat16 peaks from the makers' data sheets, by the start of JAX's `device_kind`."""


def peak_tflops(device_kind: str) -> float | None:
  """The device's dense bfloat16 peak in TFLOP/s, or None where it is not known."""
  matches = [name for name in _PEAK_BF16_TFLOPS if device_kind.startswith(name)]
  return _PEAK_BF16_TFLOPS[max(matches, key=len)] if matches else None


def throughput_metrics(
  tflops_per_update: float, peak: float | None, devices: int
) -> Callable[[float, float], dict[str, float]]:
  """A function of (tokens, seconds) of one update.

  Args:
    tflops_per_update: model TFLOPs of one update on one device.
    peak: the device's TFLOP/s, None where unknown.
    devices: over how many devices the tokens are spread.

  Returns:
    `tokens_per_second`, `tokens_per_second_per_device`, `tflops_per_device` and, with a peak, `mfu`.
  """

  def metrics(tokens: float, seconds: float) -> dict[str, float]:
    values = {
      "tokens_per_second": tokens / seconds,
      "tokens_per_second_per_device": tokens / seconds / devices,
      "tflops_per_device": tflops_per_update / seconds,
    }
    if peak:
      values["mfu"] = values["tflops_per_device"] / peak
    return values

  return metrics


def compiler_options(platform: str) -> dict[str, str]:
  """XLA options under which a training step is fastest on `platform`, for `jax.stages.Lowered.compile`.

  On the CPU, XLA's YNNPACK library also takes reductions and elementwise chains out of the fusions around them; with
  matrix products alone a step of a small transformer takes 0.84 of the time (measured with jax 0.11.2, 2 cores).
  """
  if platform == "cpu":
    return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"}
  return {}


def head_chunk(platform: str) -> int:
  """How many positions the output head takes at a time on one device.

  Few enough that their logits are small beside the rest of a step, and many enough that the product is as fast as with
  all: a wide vocabulary makes it so early.
  """
  return 128 if platform == "cpu" else 2048
