"""What `posttrain` can do: each module is one command, and its `run(arguments)` returns the exit code.

A command imports what is heavy inside its functions, so that help and mistakes in arguments answer at once.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Run = Callable[[Sequence[str]], int]


@dataclass(frozen=True)
class Command:
  """A command of `posttrain`.

  Attributes:
    summary: one line for the help.
    module: its module in this package.
  """

  summary: str
  module: str

  def load(self) -> Run:
    """Imports the command; returns its `run`."""
    return importlib.import_module(f"{__name__}.{self.module}").run


@dataclass(frozen=True)
class Trainer:
  """A trainer: `posttrain <name> CONFIG [key=value ...]`.

  Attributes:
    name: of its command.
    summary: one line for the help.
    objective: `module:class` of its `Objective`.
    prepare_data: `module:function` of (config) that reads and tokenises its data. It needs neither JAX nor MaxText, and
      starts while they are imported.
  """

  name: str
  summary: str
  objective: str
  prepare_data: str

  def load(self) -> Run:
    """Imports the command; returns its `run`."""
    from maxtext_posttrain.commands.train import run_trainer

    return functools.partial(run_trainer, self)


TRAINERS = {
  trainer.name: trainer
  for trainer in (
    Trainer(
      "sft",
      "supervised fine-tuning on chat data",
      objective="maxtext_posttrain.trainers.sft:SFT",
      prepare_data="maxtext_posttrain.data:prepare_chats",
    ),
    Trainer(
      "distill",
      "a student learns a teacher's distributions",
      objective="maxtext_posttrain.trainers.distillation:Distillation",
      prepare_data="maxtext_posttrain.data.distillation:prepare_distillation",
    ),
    Trainer(
      "dpo",
      "preference optimisation on pairs: DPO and its variants, SimPO, ORPO",
      objective="maxtext_posttrain.trainers.dpo:DPO",
      prepare_data="maxtext_posttrain.data:prepare_preferences",
    ),
    Trainer(
      "grpo",
      "reinforcement learning on prompts with answers, by groups of completions",
      objective="maxtext_posttrain.trainers.grpo:GRPO",
      prepare_data="maxtext_posttrain.data.prompts:prepare_prompts",
    ),
  )
}
TOOLS: dict[str, Command] = {
  "import": Command("HuggingFace or GGUF weights into MaxText's items", "import_model"),
  "export": Command("MaxText's items as a HuggingFace folder", "export_model"),
  "merge": Command("a LoRA adapter and its base into full weights", "merge_adapter"),
  "teacher-logits": Command("a teacher's likeliest tokens on data, for distilling without it", "teacher_logits"),
  "generate": Command("completions of prompts by a model, or a chat with it", "generate"),
  "eval": Command("loss and generated answers of a model on data", "evaluate"),
  "inspect": Command("what a checkpoint is, and whether pre-training can go on from it", "inspect_checkpoint"),
  "convert": Command("a checkpoint in Tunix's layout into one that pre-training resumes from", "convert_checkpoint"),
  "diff": Command("in which leaves two checkpoints differ, and by how much", "diff_checkpoints"),
  "report": Command("the page of a run, or of several compared", "report"),
  "doctor": Command("what is installed, on which devices, and what each engine would do here", "doctor"),
}
