"""`posttrain export`: MaxText's items as a HuggingFace folder."""

from __future__ import annotations

from collections.abc import Sequence

from maxtext_posttrain.commands.arguments import ArgumentParser


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
  options = parser.parse_args(arguments)

  from maxtext_posttrain.logs import quiet_imports

  with quiet_imports(show=False):
    from maxtext_posttrain.models.exporting import export_model, parse_size

  exported = export_model(
    options.source,
    options.out,
    config=options.config,
    dtype=options.dtype,
    max_shard_size=parse_size(options.max_shard_size),
  )
  for note in exported.notes:
    print(f"note: {note}")
  print(
    f"{exported.architecture.family.architecture}: {exported.tensors} tensors, {exported.size:,} bytes in"
    f" {exported.shards} file{'s' if exported.shards > 1 else ''}: {exported.folder}"
  )
  return 0
