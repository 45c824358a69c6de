"""`samples.jsonl` for a run's page: completions that the model wrote while it was trained, with their rewards."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from pydantic import BaseModel, ValidationError

from maxtext_posttrain.report.metrics_file import read_metrics

SAMPLES = "samples.jsonl"

_FIRST = 2
_LAST = 4


class WrittenCompletion(BaseModel):
  """One line of `samples.jsonl`.

  Attributes:
    step: the first update that was trained on it.
    prompt: what was asked.
    answer: the row's own answer.
    completion: what the model wrote.
    reward: the weighted sum.
    rewards: of each function.
    tokens: of the completion.
    truncated: it was cut at its limit.
  """

  step: int
  prompt: str
  answer: str
  completion: str
  reward: float
  rewards: dict[str, float]
  tokens: int
  truncated: bool


def read_completions(folder: Path) -> list[WrittenCompletion]:
  """The first and the last few completions in a run's folder; none where there are none.

  Raises:
    TrainingError: the file holds something else.
  """
  path = folder / SAMPLES
  if not path.is_file():
    return []
  first: list[WrittenCompletion] = []
  last: deque[WrittenCompletion] = deque(maxlen=_LAST)
  for record in read_metrics(path):
    try:
      written = WrittenCompletion.model_validate(record)
    except ValidationError:
      continue
    if len(first) < _FIRST:
      first.append(written)
    else:
      last.append(written)
  return [*first, *last]
