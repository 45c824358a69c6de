"""What the page plots: panels of curves, as data for the browser's plotting library."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from maxtext_posttrain.report.run_folder import Curve, RunFolder

MOST_POINTS = 4000
"""Points of a curve in a page; of a longer one the least and the greatest value of each stretch are kept."""


@dataclass(frozen=True)
class Series:
  """One metric of a panel; `marked` draws its points, for one that has few."""

  kind: str
  key: str
  label: str
  marked: bool = False


@dataclass(frozen=True)
class Panel:
  """One plot: its title, what its axis says, its metrics, and whether a logarithmic axis makes sense."""

  title: str
  unit: str
  series: tuple[Series, ...]
  can_be_log: bool = False


PANELS = (
  Panel(
    "Loss",
    "",  # by trainer
    (Series("train", "loss", "training"), Series("eval", "loss", "held out", marked=True)),
    can_be_log=True,
  ),
  Panel(
    "Reward",
    "mean over completions",
    (Series("train", "reward", "training"), Series("eval", "reward", "held out, most probable", marked=True)),
  ),
  Panel(
    "Groups",
    "share",
    (
      Series("train", "zero_spread_groups", "groups of equal rewards"),
      Series("train", "truncated_completions", "completions cut at their limit"),
    ),
  ),
  Panel(
    "Completions",
    "tokens",
    (
      Series("train", "completion_tokens_mean", "mean"),
      Series("train", "completion_tokens_min", "shortest"),
      Series("train", "completion_tokens_max", "longest"),
    ),
  ),
  Panel("KL to the reference", "nats per token", (Series("train", "kl", "k3"),)),
  Panel("Entropy", "nats per token", (Series("train", "entropy", "entropy"),)),
  Panel(
    "Clipped",
    "share of tokens",
    (Series("train", "clipped_low", "by the lower bound"), Series("train", "clipped_high", "by the upper bound")),
  ),
  Panel(
    "Phases of a rollout",
    "seconds",
    (
      Series("train", "update_wait_seconds", "the update before"),
      Series("train", "weight_transfer_seconds", "weights"),
      Series("train", "rollout_seconds", "completions"),
      Series("train", "reward_seconds", "rewards"),
      Series("train", "log_prob_seconds", "log-probabilities"),
    ),
  ),
  Panel("Learning rate", "of the schedule", (Series("train", "learning_rate", "learning rate"),), can_be_log=True),
  Panel("Gradient norm", "global norm before clipping", (Series("train", "grad_norm", "norm"),), can_be_log=True),
  Panel("Throughput", "tokens per second", (Series("train", "tokens_per_second", "tokens per second"),)),
  Panel(
    "Waits",
    "seconds per update",
    (Series("train", "data_wait_seconds", "for data"), Series("train", "save_wait_seconds", "for saving")),
  ),
)

_LOSSES = {
  "sft": "nats per trained token",
  "distill": "mean over trained tokens",
  "dpo": "mean over pairs",
  "grpo": "of the objective",
}
_TOLD_ELSEWHERE = frozenset(
  {
    "perplexity",
    "tokens",
    "trained_tokens",
    "step_seconds",
    "tokens_per_second_per_device",
    "tflops_per_device",
    "mfu",
    "skipped_updates",
    "loss_weight",
    "prompts",
  }
)


def plots(runs: Sequence[RunFolder], names: Sequence[str]) -> list[dict[str, Any]]:
  """Every panel that any run has a curve for.

  Args:
    runs: the runs, in the order of their colours.
    names: what to call each.

  Returns:
    For each panel `title`, `unit`, `log` (whether a logarithmic axis makes sense), `summary` (in words) and `traces`,
    each with `name`, `run` (its number), `x`, `y`, `series` (its number in the panel), `marked` and `points` (before
    thinning).
  """
  trainers = {run.record.trainer for run in runs if run.record is not None}
  unit = _LOSSES.get(trainers.pop(), "") if len(trainers) == 1 else ""
  loss, *others = PANELS
  panels = (dataclasses.replace(loss, unit=unit), *others, *_other_panels(runs))
  return [plot for panel in panels if (plot := _plot(panel, runs, names))["traces"]]


def _other_panels(runs: Sequence[RunFolder]) -> Iterator[Panel]:
  """A panel for each metric that only some trainers report."""
  known = {series.key for panel in PANELS for series in panel.series} | _TOLD_ELSEWHERE
  for key in dict.fromkeys(key for run in runs for _, key in run.curves):
    if key not in known:
      # Both, in the order of the other panels, so that a colour means the same in each.
      yield Panel(key, "", (Series("train", key, "training"), Series("eval", key, "held out", marked=True)))


def _plot(panel: Panel, runs: Sequence[RunFolder], names: Sequence[str]) -> dict[str, Any]:
  traces: list[dict[str, Any]] = []
  told: list[str] = []
  for number, (run, name) in enumerate(zip(runs, names, strict=True)):
    for place, series in enumerate(panel.series):
      curve = run.curve(series.kind, series.key)
      if not curve.finite:
        continue
      label = series.label if len(runs) == 1 else f"{name}, {series.label}" if len(panel.series) > 1 else name
      steps, values = thin(curve)
      traces.append(
        {
          # The plotting library reads a few tags in names; a name is text.
          "name": html.escape(label, quote=False),
          "run": number,
          "series": place,
          "marked": series.marked,
          "points": len(curve.steps),
          "x": steps,
          "y": values,
        }
      )
      told.append(f"{label}: {curve.finite[0]:.4g} at first, {curve.finite[-1]:.4g} at last, step {curve.steps[-1]:,}")
  return {
    "title": panel.title,
    "unit": panel.unit,
    "log": panel.can_be_log,
    "summary": "; ".join(told),
    "traces": traces,
  }


def thin(curve: Curve, most: int = MOST_POINTS) -> tuple[list[int], list[float | None]]:
  """A curve with at most `most` points: of each stretch its least and its greatest value, so that no spike is lost."""
  count = len(curve.steps)
  if count <= most:
    return curve.steps, curve.values
  stretches = most // 2
  kept: list[int] = []
  for stretch in range(stretches):
    indices = range(stretch * count // stretches, (stretch + 1) * count // stretches)
    numbers = [(value, index) for index in indices if (value := curve.values[index]) is not None]
    kept.extend(sorted({min(numbers)[1], max(numbers)[1]}) if numbers else indices[:1])
  return [curve.steps[index] for index in kept], [curve.values[index] for index in kept]
