"""What one training process did, and the table over several of two sides."""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from _common import Spread

# Steps 1 and 2 still compile or warm something up on one side or the other.
FIRST_TIMED_STEP = 3


@dataclass(frozen=True)
class Run:
  """What one process did.

  Attributes:
    first_step_seconds: from just before the process was started to the end of its first update.
    step_seconds: median time between the ends of successive updates, from step 3 on.
    first_step_processor_seconds: processor time of all the process's threads up to the end of its first update.
    step_processor_seconds: median processor time between the ends of successive updates, from step 3 on.
    positions: of one step's batch, padding included.
    tokens: per step, padding excluded, a mean.
    trained_tokens: per step, those in the loss, a mean.
    compile_seconds: spent in XLA, all compilations together, on whatever thread.
    peak_bytes: largest resident memory of the training process.
  """

  first_step_seconds: float
  step_seconds: float
  first_step_processor_seconds: float
  step_processor_seconds: float
  positions: int
  tokens: float
  trained_tokens: float
  parameters: int
  losses: tuple[float, ...]
  compile_seconds: float
  compilations: int
  peak_bytes: int

  @classmethod
  def of(cls, result: Mapping[str, Any], started: float) -> Run:
    """From what a probe wrote, and the clock just before the process was started."""
    completed = result["completed"]
    steps = len(completed)
    processor = result["processor_seconds"]
    return cls(
      first_step_seconds=completed[0] - started,
      step_seconds=_median_step(completed),
      first_step_processor_seconds=processor[0],
      step_processor_seconds=_median_step(processor),
      positions=result["positions"][0],
      tokens=statistics.mean(result["tokens"][:steps]),
      trained_tokens=statistics.mean(result["trained_tokens"][:steps]),
      parameters=result["parameters"],
      losses=tuple(result["losses"]),
      compile_seconds=result["compile_seconds"],
      compilations=result["compilations"],
      peak_bytes=result["peak_bytes"],
    )

  @property
  def tokens_per_second(self) -> float:
    """Positions per second, padding included: what the hardware computes."""
    return self.positions / self.step_seconds


def _median_step(readings: Sequence[float]) -> float:
  """The median difference of successive readings, one at the end of each step, over the steps that are timed."""
  # What step n took is the difference of number n - 1 and the one before.
  timed = itertools.pairwise(readings[FIRST_TIMED_STEP - 2 :])
  return statistics.median(after - before for before, after in timed)


@dataclass(frozen=True)
class Measure:
  """A line of the table. A column of zeros, and its ratio, are left empty: that side has no such thing."""

  label: str
  value: Callable[[Run], float]
  decimals: int
  goal: str = ""


@dataclass(frozen=True)
class Hardware:
  """What a step is set against.

  Attributes:
    step_tflops: the model's TFLOPs of one update.
    peak_tflops: TFLOP/s of the best square float32 matrix product in JAX, measured between the runs.
  """

  step_tflops: float
  peak_tflops: float


def measures(rival: str, hardware: Hardware) -> tuple[Measure, ...]:
  """The table's lines; the goal for the start is one against MaxText's trainer."""
  start_goal = "<= 0.7" if rival == "MaxText" else ""
  return (
    Measure("start to first step, s", lambda run: run.first_step_seconds, 2, start_goal),
    Measure("step, ms", lambda run: 1e3 * run.step_seconds, 1, "<= 1.0"),
    Measure("CPU to first step, s", lambda run: run.first_step_processor_seconds, 2),
    Measure("CPU of a step, ms", lambda run: 1e3 * run.step_processor_seconds, 1),
    Measure("tokens per second", lambda run: run.tokens_per_second, 0),
    Measure("trained tokens per second", lambda run: run.trained_tokens / run.step_seconds, 0),
    Measure("model TFLOP/s", lambda run: hardware.step_tflops / run.step_seconds, 4),
    Measure(
      "share of peak", lambda run: hardware.step_tflops / run.step_seconds / hardware.peak_tflops, 2, "ours >= 0.6"
    ),
    Measure("compile (XLA), s", lambda run: run.compile_seconds, 2),
    Measure("compilations", lambda run: run.compilations, 0),
    Measure("peak memory, MiB", lambda run: run.peak_bytes / 2**20, 0),
  )


def report(
  rival: str, pairs: Sequence[tuple[Run, Run]], hardware: Hardware, *, same_positions: bool = True
) -> Iterator[str]:
  """The table over all pairs (ours, the rival's).

  Raises:
    SystemExit: the two sides did not do the same work.
  """
  for ours, theirs in pairs:
    for what in ("parameters", "positions") if same_positions else ("parameters",):
      if getattr(ours, what) != getattr(theirs, what):
        sys.exit(f"not the same work: {what} {getattr(ours, what)} here, {getattr(theirs, what)} in {rival}'s")
  ours, theirs = pairs[0]
  yield ""
  positions = f"{ours.positions:,}" if same_positions else f"{ours.positions:,} here and {theirs.positions:,} there, of"
  yield f"both sides: {ours.parameters:,} parameters, {positions} positions a step, padding included"
  for name, run in (("ours", ours), (rival, theirs)):
    yield (
      f"{name:<8} {run.tokens:,.0f} tokens a step without padding, {run.trained_tokens:,.0f} of them trained;"
      f" loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f} in {len(run.losses)} steps"
    )
  yield ""
  columns = "{:<24} {:>30} {:>30} {:>22}  {}"
  yield columns.format("median [least .. most]", "ours", rival, f"ratio ours/{rival}", "goal").rstrip()
  for measure in measures(rival, hardware):
    one, other = [measure.value(run) for run, _ in pairs], [measure.value(run) for _, run in pairs]
    cells = [Spread.of(values).text(measure.decimals) if any(values) else "" for values in (one, other)]
    ratio = Spread.of([a / b for a, b in zip(one, other, strict=True)]).text(2) if all(other) else ""
    yield columns.format(measure.label, *cells, ratio, measure.goal).rstrip()
