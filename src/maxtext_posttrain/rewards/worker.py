"""The process that calls reward functions: one JSON object a line in, one out.

It is started by `rewards.pool` and dies when its input ends. What a function prints goes to standard error. It neither
imports JAX nor inherits anything of the trainer but its environment.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from maxtext_posttrain.rewards.functions import FUNCTIONS
from maxtext_posttrain.rewards.sample import BatchFunction, RewardSample, RewardSettings


class RewardLoadError(Exception):
  """A reward function can't be had: no such name, file or function, or its file can't be imported."""


def load_function(name: str, settings: RewardSettings) -> Any:
  """A function of a list of samples, from a built-in's name or `file.py:function`.

  A user's function is called with three lists, `(prompts, completions, answers)`, and returns a number for each.

  Raises:
    RewardLoadError: there is no such function.
  """
  if name in FUNCTIONS:
    function = FUNCTIONS[name]
    return lambda samples: [function(sample, settings) for sample in samples]
  file, _, attribute = name.rpartition(":")
  user = _load_from_file(file, attribute)

  def call(samples: Sequence[RewardSample]) -> Any:
    prompts, completions, answers = zip(*((each.prompt, each.completion, each.answer) for each in samples), strict=True)
    return user(list(prompts), list(completions), list(answers))

  return call


def _load_from_file(file: str, attribute: str) -> BatchFunction:
  path = Path(file)
  if not path.is_file():
    raise RewardLoadError(f"{file}: no such file")
  spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
  if spec is None or spec.loader is None:
    raise RewardLoadError(f"{file}: is not a Python file")
  module = importlib.util.module_from_spec(spec)
  # Its imports find its neighbours, and dataclasses find its module.
  sys.path.insert(0, str(path.parent.resolve()))
  sys.modules[spec.name] = module
  try:
    spec.loader.exec_module(module)
  except BaseException as error:
    raise RewardLoadError(f"{file}: {_one_line(error)}") from error
  function: Any = getattr(module, attribute, None)
  if not callable(function):
    raise RewardLoadError(f"{file}: has no function {attribute}")
  return cast("BatchFunction", function)


def checked_scores(scores: Any, count: int) -> list[float]:
  """The scores of a call as floats.

  Raises:
    ValueError: they are not `count` finite numbers.
  """
  values = scores.tolist() if hasattr(scores, "tolist") else scores
  if isinstance(values, str | bytes) or not isinstance(values, Sequence):
    raise ValueError(f"it returned {type(scores).__name__}, not a list of numbers")
  if len(values) != count:
    raise ValueError(f"it returned {len(values)} numbers for {count} completions")
  numbers = []
  for value in values:
    if hasattr(value, "item"):
      value = value.item()
    if not isinstance(value, int | float) or not math.isfinite(value):
      raise ValueError(f"it returned {value!r}, not a finite number")
    numbers.append(float(value))
  return numbers


def _one_line(error: BaseException) -> str:
  text = " ".join(str(error).split())
  return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__


def main() -> None:
  """Answers until the input ends: first to the settings and names, then to calls."""
  # Signals often go to the whole group: the trainer still wants this rollout's scores, and ends this process itself.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  # The answers' channel is a descriptor of its own, so that nothing a function prints gets into it.
  answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
  os.dup2(2, 1)

  def answer(message: Mapping[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()

  start = json.loads(sys.stdin.readline())
  given: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in start["settings"].items()}
  settings = RewardSettings(**given)
  try:
    functions = {name: load_function(name, settings) for name in start["names"]}
  except RewardLoadError as error:
    answer({"error": str(error)})
    return
  answer({"ready": True})
  for line in sys.stdin:
    call = json.loads(line)
    samples = [RewardSample(**sample) for sample in call["samples"]]
    try:
      answer({"scores": checked_scores(functions[call["name"]](samples), len(samples))})
    except Exception as error:
      answer({"error": _one_line(error)})


def settings_message(names: Sequence[str], settings: RewardSettings) -> str:
  """The first line a worker is sent."""
  return json.dumps({"names": list(names), "settings": dataclasses.asdict(settings)}) + "\n"


def call_message(name: str, samples: Sequence[RewardSample]) -> str:
  """The line of one call."""
  return json.dumps({"name": name, "samples": [dataclasses.asdict(sample) for sample in samples]}) + "\n"


if __name__ == "__main__":
  main()
