"""The data of a distillation: chats, and beside them what a teacher that is not at hand said of them."""

from __future__ import annotations

import dataclasses

from maxtext_posttrain.config import Config
from maxtext_posttrain.data.pipeline import PreparedData, PreparedRows, prepare_chats
from maxtext_posttrain.data.teacher_logits import TeacherRows, read_metadata
from maxtext_posttrain.errors import ConfigError, DataError
from maxtext_posttrain.tokenizers import configured_tokenizer


def prepare_distillation(config: Config) -> PreparedData:
  """Loads the tokenizers and prepares both data sets. Imports neither JAX nor MaxText.

  Raises:
    ConfigError: for options that no data set can be built with, or a teacher with another vocabulary.
    TokenizerError: a tokenizer can't be loaded.
    DataError: the data can't be read, or the saved logits are of other data.
  """
  check_same_vocabulary(config)
  data = prepare_chats(config)
  folder = config.offline_data_dir
  if not folder:
    return data
  saved, own = read_metadata(folder).tokenizer, vocabulary_of(config)
  if saved != own:
    raise DataError(
      f"{folder}: its teacher's tokenizer is not that of the run ({config.tokenizer_path}): they must have the same"
      " vocabulary"
    )

  def with_teacher(rows: PreparedRows, part: str) -> PreparedRows:
    return dataclasses.replace(rows, source=TeacherRows(rows.source, folder, part, vocab_size=config.vocab_size))

  evaluated = data.evaluation is not None and config.eval_interval > 0
  return PreparedData(
    with_teacher(data.train, "train"),
    with_teacher(data.evaluation, "eval") if evaluated and data.evaluation is not None else None,
  )


def vocabulary_of(config: Config) -> str | None:
  """A digest of the vocabulary of a configuration's tokenizer; None where it names none."""
  tokenizer = configured_tokenizer(config)
  return None if tokenizer is None else tokenizer.vocabulary_fingerprint


def check_same_vocabulary(config: Config) -> None:
  """Refuses a teacher whose tokenizer is another one than the student's.

  Raises:
    ConfigError: it is.
    TokenizerError: a tokenizer can't be loaded.
  """
  teacher = config.teacher
  if teacher is None or not teacher.tokenizer_path:
    return
  names = [(each.tokenizer_type, each.tokenizer_path) for each in (config, teacher)]
  if names[0] != names[1] and vocabulary_of(config) != vocabulary_of(teacher):
    raise ConfigError(
      f"tokenizer_path: the student has {config.tokenizer_path}, the teacher {teacher.tokenizer_path}, and their"
      " vocabularies differ; distillation needs the same one"
    )
