"""The commands in the documents' `sh` blocks: what each one runs, and with which words."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from maxtext_posttrain.commands import TOOLS, TRAINERS

PRETRAINING = "maxtext.trainers.pre_train.train"
MODULES = {"train_sft": "sft", "train_dpo": "dpo", "train_distill": "distill", "train_grpo": "grpo", "train_rl": "grpo"}

Kind = Literal["trainer", "tool", "maxtext", "ellipsis", "make", "script"]


@dataclass(frozen=True)
class Command:
  """One command of a document.

  Attributes:
    kind: what runs it; `ellipsis` is the command above it, with other keys at its end.
    name: the trainer, the tool, MaxText's module, the script's path; empty for the others.
    arguments: what follows the name.
    variables: of the environment, `NAME=value`, before it.
  """

  kind: Kind
  name: str
  arguments: tuple[str, ...]
  variables: tuple[str, ...] = ()

  @classmethod
  def of(cls, words: Sequence[str]) -> Command:
    """Understands the words of a command.

    Raises:
      AssertionError: nothing here knows what runs it.
    """
    variables = tuple(itertools.takewhile(re.compile(r"[A-Z][A-Z0-9_]*=").match, words))
    match words[len(variables) :]:
      case ["posttrain", trainer, *rest] if trainer in TRAINERS:
        return cls("trainer", trainer, tuple(rest), variables)
      case ["posttrain", tool, *rest]:
        assert tool in TOOLS, f"no such command: {tool}"
        return cls("tool", tool, tuple(rest), variables)
      case ["python", "-m", module, *rest] if module in MODULES:
        return cls("trainer", MODULES[module], tuple(rest), variables)
      case ["python", "-m", module, *rest] if module.startswith("maxtext."):
        return cls("maxtext", module, tuple(rest), variables)
      case ["make", *rest]:
        return cls("make", "", tuple(rest), variables)
      case [script, *rest] if script.endswith(".sh"):
        return cls("script", script, tuple(rest), variables)
      case ["…", *rest]:
        return cls("ellipsis", "", tuple(rest), variables)
      case _:
        raise AssertionError(f"nothing here knows {' '.join(words)}: say it in prose, or teach this module")
