"""Errors a user can cause and mend.

Each carries one line that says what is wrong, where, and what to change. The command line prints that line and
leaves with `exit_code`; a traceback is shown only with `--debug`.
"""

from __future__ import annotations

from collections.abc import Sequence


class PostTrainError(Exception):
  """Base of the errors that end a run with one line instead of a traceback."""

  exit_code = 1


class ConfigError(PostTrainError):
  """One or more problems in the configuration; found before anything heavy is imported.

  Attributes:
    problems: every problem found, one line each.
  """

  exit_code = 2

  def __init__(self, problems: str | Sequence[str]):
    self.problems = [problems] if isinstance(problems, str) else list(problems)
    super().__init__("\n".join(self.problems))


class TokenizerError(PostTrainError):
  """A tokenizer could not be loaded or asked for something it cannot do."""


class ChatTemplateError(TokenizerError):
  """A chat template is missing, broken, unsafe, or refused a conversation."""


class DataError(PostTrainError):
  """Training or evaluation data could not be read or used."""


class CheckpointError(PostTrainError):
  """A checkpoint could not be read, written or matched to the model."""


class TrainingError(PostTrainError):
  """Training itself failed, for example on a gradient that is not finite."""


class ReportError(PostTrainError):
  """A report's page can't be made of what a run left, or can't be written."""


class ModelError(PostTrainError):
  """A model's files could not be read, recognised, converted or written."""


class EvaluationError(PostTrainError):
  """A model could not be evaluated, or the figures could not be written."""


class GenerationError(PostTrainError):
  """Text could not be generated: a prompt, an option or the model does not allow it."""


class RewardError(PostTrainError):
  """A reward function can't be had, or its processes can't be kept alive."""


def first_line(error: BaseException) -> str:
  """What another package's error says, on one line: its type, and the first line that says something."""
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
