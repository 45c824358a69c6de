"""`posttrain export`: MaxText's items as a HuggingFace folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from maxtext_posttrain.commands.arguments import ArgumentParser
from maxtext_posttrain.errors import ConfigError


def run(arguments: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  parser = ArgumentParser(
    "export",
    "Write a HuggingFace folder (config.json, safetensors, tokenizer, chat template, generation_config.json) that"
    " transformers and vLLM load, from a run, one of its checkpoints, or imported weights.",
  )
  parser.add_argument("source", metavar="RUN_OR_ITEMS", help="a run's folder, a step's folder or its items")
  parser.add_argument("out", metavar="OUT", help="the folder to write; it must not exist")
  parser.add_argument("--config", metavar="FILE", help="the model's YAML, where it does not lie beside the weights")
  parser.add_argument(
    "--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (default: as they are stored)"
  )
  parser.add_argument(
    "--max-shard-size", metavar="SIZE", default="5GB", help="size from which weights are split (default: 5GB)"
  )
  parser.add_argument("--base", metavar="ITEMS", help="where a LoRA run's base lies now, if not where it was")
  parser.add_argument("--adapter", action="store_true", help="write a LoRA run's adapter alone, as PEFT reads it")
  parser.add_argument(
    "--base-model", metavar="NAME", help="with --adapter: the HuggingFace model or folder that PEFT puts it on"
  )
  options = parser.parse_args(arguments)
  if options.base_model is not None and not options.adapter:
    parser.error("--base-model belongs to --adapter")
  if options.adapter:
    return _export_adapter(options)

  from maxtext_posttrain.logs import quiet_imports

  with quiet_imports(show=False):
    from maxtext_posttrain.models.exporting import export_model, parse_size

  exported = export_model(
    options.source,
    options.out,
    config=options.config,
    dtype=options.dtype,
    max_shard_size=parse_size(options.max_shard_size),
    base=options.base,
  )
  for note in exported.notes:
    print(f"note: {note}")
  print(
    f"{exported.architecture.family.architecture}: {exported.tensors} tensors, {exported.size:,} bytes in"
    f" {exported.shards} file{'s' if exported.shards > 1 else ''}: {exported.folder}"
  )
  return 0


def _export_adapter(options: argparse.Namespace) -> int:
  from maxtext_posttrain.lora.peft import export_adapter

  if options.base is not None:
    raise ConfigError("posttrain export: --adapter writes no base: leave --base out")
  exported = export_adapter(
    options.source, options.out, config=options.config, dtype=options.dtype, base_model=options.base_model
  )
  for note in exported.notes:
    print(f"note: {note}")
  print(
    f"PEFT adapter of rank {exported.rank}: {exported.tensors} tensors on {exported.modules} modules: {exported.folder}"
  )
  return 0
