"""The trainers and a trained model from Python, as short as the command line.

  from maxtext_posttrain import SFT, Model
  run = SFT("configs/quickstart/sft.yml", steps=40, run_name="mine").train()
  run.curve("train", "loss").values
  Model(run.path).generate(["What is 2 + 2?"])
  print(inspect_checkpoint(run.path))
  DPO("configs/quickstart/dpo.yml", load_parameters_path=run.newest.items).train()

Everything is the command line's: keys, checks, folders, checkpoints. `load_config` and `SFT(config)` part the two steps
where the configuration is to be looked at first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from maxtext_posttrain.cli import EXIT_INTERRUPTED
from maxtext_posttrain.commands import TRAINERS
from maxtext_posttrain.config import Config, load_config
from maxtext_posttrain.errors import ConfigError
from maxtext_posttrain.logs import quiet_imports

if TYPE_CHECKING:
  from maxtext_posttrain.report.run_folder import RunFolder


class _Trainer:
  """A trainer with its configuration.

  Attributes:
    config: the validated configuration.
  """

  name: ClassVar[str]

  def __init__(self, config: str | Path | Config, **keys: Any):
    """Loads and checks the configuration; nothing heavy is imported.

    Args:
      config: a YAML file, by its path or by its name in configs/; or what `load_config` gave for this trainer.
      keys: MaxText's keys and ours, over the file's; those of a group as a mapping, `lora={"lora_rank": 8}`.

    Raises:
      ConfigError: with every problem found, one line each.
    """
    if isinstance(config, Config):
      if keys or config.trainer != self.name:
        given = f"keys ({', '.join(keys)})" if keys else f"a configuration of {config.trainer}"
        raise ConfigError(
          f"{type(self).__name__}: a loaded configuration is complete, and {given} was given; load it anew"
        )
      self.config = config
    else:
      self.config = load_config([str(config), *key_arguments(keys)], trainer=self.name)

  def __repr__(self) -> str:
    return f"{type(self).__name__}(run_name={self.config.run_name!r}, steps={self.config.get('steps')!r})"

  def plan(self) -> None:
    """Builds everything, prints what `train` would do, trains nothing and writes nothing."""
    self._run(dry_run=True)

  def train(self) -> RunFolder:
    """Trains to the configured end, going on from the run's newest checkpoint; returns the run's folder as read.

    Raises:
      PostTrainError: one line on what ended the run.
      KeyboardInterrupt: it was interrupted; what was trained is saved, and `train` goes on from there.
      SystemExit: it was terminated, after saving.
    """
    from maxtext_posttrain.report.run_folder import RunFolder, run_directory

    code = self._run(dry_run=False)
    if code == EXIT_INTERRUPTED:
      raise KeyboardInterrupt
    if code:
      raise SystemExit(code)
    return RunFolder.read(run_directory(self.config.base_output_directory, self.config.run_name))

  def _run(self, *, dry_run: bool) -> int:
    from maxtext_posttrain.commands.train import run_configured

    return run_configured(TRAINERS[self.name], self.config, dry_run=dry_run)


class SFT(_Trainer):
  """Supervised fine-tuning: `posttrain sft`."""

  name = "sft"


class DPO(_Trainer):
  """Preference optimisation on pairs: `posttrain dpo`."""

  name = "dpo"


class Distillation(_Trainer):
  """A student learns a teacher's distributions: `posttrain distill`."""

  name = "distill"


class GRPO(_Trainer):
  """Reinforcement learning by groups of completions: `posttrain grpo`."""

  name = "grpo"


class Model:
  """A model on disk that answers: `posttrain generate`."""

  def __init__(self, path: str | Path, *, config: str | Path | None = None, **keys: Any):
    """Loads weights and tokenizer.

    Args:
      path: a run, its checkpoints, a step's folder or its items; or what `posttrain import` wrote.
      config: the configuration's file; without it the one beside the weights.
      keys: laid over that configuration.

    Raises:
      PostTrainError: there are none, they do not fit, or no tokenizer is named.
    """
    with quiet_imports(show=False):
      from maxtext_posttrain.models.loading import load_model
      from maxtext_posttrain.models.source import find_source
      from maxtext_posttrain.rollout.chat import ChatModel

    source = find_source(str(path), None if config is None else str(config))
    self._chat = ChatModel(load_model(source, key_arguments(keys)))

  def generate(self, prompts: Sequence[str], *, system: str | None = None, **sampling: Any) -> list[str]:
    """Answers each prompt by itself, greedily unless `temperature` says otherwise.

    Args:
      prompts: the user's turns.
      system: the system's message, before each.
      sampling: `max_new_tokens`, `temperature`, `top_k`, `top_p`, `seed`, `n` of `rollout.options.SamplingOptions`.

    Returns:
      The answers, `n` of the first prompt, then of the second.

    Raises:
      GenerationError: an option is out of its range, or a prompt is longer than the model's context.
    """
    from maxtext_posttrain.rollout.options import SamplingOptions

    options = SamplingOptions(**{"temperature": 0.0, **sampling})
    return [answer.text for answer in self._chat.answer(prompts, options, system=system)]


def inspect_checkpoint(path: str | Path, *, step: int | None = None, leaves: bool = False) -> str:
  """What `posttrain inspect` says of a checkpoint, in lines: its layout, step, tree, and how pre-training goes on.

  Args:
    path: a run's folder, its checkpoints, a step's folder, or its items.
    step: which of several steps; the newest by default.
    leaves: list every array instead of groups.

  Raises:
    CheckpointError: the path means no step.
  """
  from maxtext_posttrain.commands.inspect_checkpoint import describe, inspect

  return "\n".join(describe(inspect(str(path), step), leaves=leaves))


def key_arguments(keys: Mapping[str, Any]) -> list[str]:
  """Keys as the command line spells them: `{"lora": {"lora_rank": 8}}` is `['lora={"lora_rank": 8}']`."""
  return [f"{name}={value if isinstance(value, str | Path) else _as_json(value)}" for name, value in keys.items()]


def _as_json(value: Any) -> str:
  """JSON, which is YAML; a path inside is text."""

  def text(inside: Any) -> str:
    if isinstance(inside, Path):
      return str(inside)
    raise TypeError(f"a key can't hold {type(inside).__name__}: {inside!r}")

  return json.dumps(value, default=text)
