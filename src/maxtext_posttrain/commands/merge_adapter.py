"""`posttrain merge`: a LoRA adapter folded into its base, as weights that pre-training and every trainer load."""

from __future__ import annotations

from collections.abc import Sequence

from maxtext_posttrain.commands.arguments import ArgumentParser


def run(arguments: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  parser = ArgumentParser(
    "merge",
    "Fold a LoRA run's adapter into the base it was trained over: OUT/0/items with full weights in the base's own"
    " dtype, which pre-training and the trainers load with load_parameters_path, and OUT/model.yml with the model's"
    " keys. The base must be the one of the training, unchanged.",
  )
  parser.add_argument("source", metavar="RUN_OR_ITEMS", help="a LoRA run's folder, a step's folder or its items")
  parser.add_argument("out", metavar="OUT", help="the folder to write; it must not exist")
  parser.add_argument("--base", metavar="ITEMS", help="where the base lies now, if not where it was")
  parser.add_argument("--config", metavar="FILE", help="the run's YAML, where it does not lie above the weights")
  options = parser.parse_args(arguments)

  from maxtext_posttrain.logs import quiet_imports

  with quiet_imports(show=options.debug):
    from maxtext_posttrain.lora.merge import merge_adapter
  merged = merge_adapter(options.source, options.out, base=options.base, config=options.config)
  for note in merged.notes:
    print(f"note: {note}")
  print(f"merged {merged.kernels} kernels of {merged.parameters:,} parameters, read back and compared: {merged.items}")
  print(f"pre-training starts from them with load_parameters_path={merged.items} and a run_name of its own")
  return 0
