"""The commands that go on from a run: resume, evaluate, export, try, hand back to pre-training."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from maxtext_posttrain.config.saved import RUN_CONFIG
from maxtext_posttrain.config.schema import SECRET_KEYS
from maxtext_posttrain.handback import PRETRAINING_MODULE, pretraining_arguments
from maxtext_posttrain.report.run_file import RunRecord
from maxtext_posttrain.report.run_folder import RunFolder

_MORE_STEPS = 1000
"""Steps that the hand-back command trains on; it is for the reader to change."""

_HELD_OUT = "held out"
"""A record's name of the evaluation data."""


@dataclass(frozen=True)
class NextCommand:
  """One thing to do with a run.

  Attributes:
    title: what it does.
    text: the command line.
    note: what to know or change, or "".
  """

  title: str
  text: str
  note: str = ""


def next_commands(run: RunFolder, available: Collection[str]) -> list[NextCommand]:
  """What can be done with a run.

  Args:
    run: the run.
    available: the commands that `posttrain` has.
  """
  record = run.record
  if record is None:
    return []
  folder = record.directory
  tools = [
    _evaluate(record),
    NextCommand("Try it", shlex.join(["posttrain", "generate", folder, "--prompt", "Hello"])),
    NextCommand("Export it for transformers and vLLM", shlex.join(["posttrain", "export", folder, f"{folder}-hf"])),
    NextCommand("Look into its newest checkpoint", shlex.join(["posttrain", "inspect", folder])),
  ]
  found = [_resume(run, record)] if record.trainer in available else []
  if run.checkpoints:
    found += [command for command in tools if command.text.split()[1] in available]
    if record.trains_adapter:
      merge = shlex.join(["posttrain", "merge", folder, f"{folder}-merged"])
      note = "Pre-training and other trainers start from the merged weights with load_parameters_path."
      found.append(NextCommand("Merge its adapter into full weights", merge, note))
    else:
      found += _hand_back(run, record)
  return found


def _resume(run: RunFolder, record: RunRecord) -> NextCommand:
  notes = [f"Give {key} again: it is written nowhere." for key in record.config if key in SECRET_KEYS & record.chosen]
  if (run.path / RUN_CONFIG).is_file():
    words = [f"{record.directory}/{RUN_CONFIG}"]
  else:
    given = {key: entry.value for key, entry in record.config.items() if entry.source == "command line"}
    words = [record.config_file, *(f"{key}={value}" for key, value in given.items() if key not in SECRET_KEYS)]
  if run.last_step >= record.total_steps:
    words = [word for word in words if not word.startswith("steps=")]
    words.append(f"steps={record.total_steps + _MORE_STEPS}")
    notes.append(f"It has made the {record.total_steps:,} steps it was asked for: raise steps for it to go on.")
  return NextCommand("Resume it", shlex.join(["posttrain", record.trainer, *words]), " ".join(notes))


def _evaluate(record: RunRecord) -> NextCommand:
  command = ["posttrain", "eval", record.directory]
  if _HELD_OUT in record.data:
    return NextCommand("Evaluate it", shlex.join(command), "On the run's own held-out data; --data FILE names others.")
  note = "Put your data in the place of held-out.jsonl."
  return NextCommand("Evaluate it", shlex.join([*command, "--data", "held-out.jsonl"]), note)


def _hand_back(run: RunFolder, record: RunRecord) -> Iterator[NextCommand]:
  if "base_output_directory" not in record.maxtext_overrides:
    return
  step = run.checkpoints[-1].step
  try:
    arguments = pretraining_arguments(
      record.maxtext_overrides,
      way="load_full_state_path" if run.checkpoint_role else "run_name",
      run_name=record.name,
      step=step,
      steps=step + _MORE_STEPS,
      role=run.checkpoint_role,
    )
  except ModuleNotFoundError:
    return
  yield NextCommand(
    "Hand it back to pre-training",
    shlex.join(["python", "-m", PRETRAINING_MODULE, *arguments, "dataset_type=synthetic"]),
    "Put your pre-training data in the place of dataset_type=synthetic, and set steps to where it is to end.",
  )
