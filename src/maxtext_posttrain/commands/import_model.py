"""`posttrain import`: a HuggingFace folder or a GGUF file into MaxText's items and a configuration overlay."""

from __future__ import annotations

from collections.abc import Sequence

from maxtext_posttrain.commands.arguments import ArgumentParser


def run(arguments: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  parser = ArgumentParser(
    "import",
    "Turn a model from HuggingFace (a local folder with safetensors) or a GGUF file into MaxText weights: OUT/0/items,"
    " OUT/model.yml to lay over a trainer's configuration, and OUT/tokenizer. Families: Llama 2 to 3.2, SmolLM2,"
    " Mistral, Qwen2.5, Qwen3, Gemma 2 and Gemma 3 (text). Nothing is downloaded.",
  )
  parser.add_argument("source", metavar="SOURCE", help="a HuggingFace folder or a .gguf file")
  parser.add_argument("out", metavar="OUT", help="the folder to write; it must not exist")
  parser.add_argument("--unscanned", action="store_true", help="one module a layer (scan_layers=false)")
  parser.add_argument(
    "--dtype",
    choices=("float32", "bfloat16"),
    default="float32",
    help="of the weights and of computation (default: float32)",
  )
  parser.add_argument(
    "--untie",
    action="store_true",
    help="give a model with tied embeddings a head of its own, which MaxText computes in full precision; it rounds a"
    " tied one to bfloat16",
  )
  options = parser.parse_args(arguments)

  from maxtext_posttrain.logs import quiet_imports

  with quiet_imports(show=False):
    from maxtext_posttrain.models.importing import import_model

  imported = import_model(
    options.source, options.out, scan_layers=not options.unscanned, dtype=options.dtype, untie=options.untie
  )
  for note in imported.notes:
    print(f"note: {note}")
  print(f"{imported.architecture.family.name}: {imported.parameters:,} weights in {imported.folder / '0' / 'items'}")
  print(f"configuration: base_config: [sft.yml, {imported.folder / 'model.yml'}]")
  return 0
