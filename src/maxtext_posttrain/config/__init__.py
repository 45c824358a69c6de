"""One validated view of a run: MaxText's keys and ours, from YAML files, the environment and `key=value`.

  from maxtext_posttrain.config import load_config
  config = load_config(["configs/quickstart/sft.yml", "steps=5"])
  config.steps, config.sources["steps"]      # 5, 'command line'

Nothing here imports MaxText or JAX: the keys come from a schema generated once (`scripts/generate_schema.py`), so a bad
configuration is refused in well under two seconds, with every problem listed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from maxtext_posttrain.config.checks import Checks
from maxtext_posttrain.config.distillation import TRAINER as DISTILLATION
from maxtext_posttrain.config.distillation import DistillationChecks, resolve_teacher
from maxtext_posttrain.config.layers import resolve
from maxtext_posttrain.config.lookup import Folders
from maxtext_posttrain.config.schema import OUR_KEYS, OwnKey, Schema
from maxtext_posttrain.config.view import Config, Group, describe_config, shown_values
from maxtext_posttrain.errors import ConfigError

__all__ = [
  "OUR_KEYS",
  "Config",
  "Group",
  "OwnKey",
  "describe_config",
  "load_config",
  "load_model_config",
  "shown_values",
]


def load_config(argv: Sequence[str], *, trainer: str = "sft", environ: Mapping[str, str] | None = None) -> Config:
  """Loads and checks the configuration of one run.

  Later ones win: MaxText's base.yml, the files `base_config:` names, the YAML itself, `M_<KEY>` in the environment,
  `key=value`. MaxText's file for `model_name` comes before all that a user set.

  Args:
    argv: `[config.yml, key=value, ...]`.
    trainer: whose keys and rules apply.
    environ: the environment; the process's own if left out.

  Raises:
    ConfigError: with every problem found, one line each.
  """
  return _load(argv, trainer, environ, Checks.problems)


def load_model_config(argv: Sequence[str], *, environ: Mapping[str, str] | None = None) -> Config:
  """Loads a configuration for the model and tokenizer it describes: any trainer's, and data may be gone.

  Arguments and errors are those of `load_config`.
  """
  return _load(argv, None, environ, Checks.model_problems)


def _load(
  argv: Sequence[str],
  trainer: str | None,
  environ: Mapping[str, str] | None,
  check: Callable[[Checks], Iterator[str]],
) -> Config:
  environment = os.environ if environ is None else environ
  schema = Schema.load()
  folders = Folders.find(environment)
  resolved = resolve(argv, trainer, schema, folders, environment)
  problems = [*resolved.problems, *check(Checks(resolved, trainer, folders))]
  teacher = None
  if trainer == DISTILLATION:
    teacher = resolve_teacher(resolved, schema, folders, environment)
    problems += DistillationChecks(resolved, teacher).problems()
  if teacher is not None:
    # What is wrong with both is told once.
    known = {*problems}
    for problem in Checks(teacher, None, folders).teacher_problems():
      if problem not in known:
        problems.append(problem if problem.startswith("teacher_overrides") else f"the teacher: {problem}")
  if problems:
    raise ConfigError(problems)
  return Config(resolved, schema, trainer, None if teacher is None else Config(teacher, schema, None))
