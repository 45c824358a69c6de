"""`posttrain teacher-logits`: saves a teacher's most probable tokens for the data of a distillation."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from maxtext_posttrain.commands.arguments import ArgumentParser
from maxtext_posttrain.errors import ConfigError

_DESCRIPTION = """\
Runs the teacher of a distillation once over its training data, and over its evaluation data where they are configured,
and keeps the most probable tokens of each trained position, with the probability of all others together. The same
configuration with offline_data_dir=FOLDER then trains from the files, with no teacher in memory.
"""
_TOP_K = 64


def run(arguments: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  from maxtext_posttrain.config import load_config
  from maxtext_posttrain.logs import quiet_imports

  options = _parse(arguments)
  output = Path(options.output)
  if output.exists():
    raise ConfigError(f"{output}: exists already; name a folder that does not")
  config = load_config([options.config, *options.overrides], trainer="distill")
  if config.teacher is None:
    raise ConfigError("offline_data_dir: is set, and the teacher is to be run; leave it out")
  if options.top_k > config.vocab_size:
    raise ConfigError(f"--top-k is {options.top_k}: the vocabulary has {config.vocab_size} tokens (vocab_size)")
  with quiet_imports(show=config.maxtext_log):
    from maxtext_posttrain.data.distillation import prepare_distillation

    data = prepare_distillation(config)
    from maxtext_posttrain.trainers.teacher_logits import save_teacher_logits
  metadata = save_teacher_logits(config, data, options.top_k, output, progress=_progress)
  for name, part in metadata.parts.items():
    rows, positions = (sum(getattr(shard, what) for shard in part.shards) for what in ("rows", "positions"))
    print(f"{name}: {rows} rows, {positions} positions, {metadata.k} tokens of each")
  print(f"teacher's logits: {output}; train from them with offline_data_dir={output}")
  return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
  parser = ArgumentParser("teacher-logits", _DESCRIPTION)
  parser.add_argument("config", metavar="CONFIG", help="the distillation's YAML")
  parser.add_argument("overrides", metavar="key=value", nargs="*", help="laid over it")
  parser.add_argument("--output", metavar="FOLDER", required=True, help="where to; it must not exist")
  parser.add_argument("--top-k", type=int, default=_TOP_K, metavar="K", help=f"tokens kept (default {_TOP_K})")
  options = parser.parse_intermixed_args(arguments)
  for override in options.overrides:
    if "=" not in override:
      parser.error(f"{override}: keys are given as key=value")
  if options.top_k < 1:
    parser.error(f"--top-k is {options.top_k}: it must be at least 1")
  return options


def _progress(part: str, done: int, rows: int) -> None:
  print(f"{part}: {done} of {rows} rows", flush=True)
