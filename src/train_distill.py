"""Distillation: `python -m train_distill config.yml [key=value ...]`, the same as `posttrain distill`."""

import sys

from maxtext_posttrain.cli import main

if __name__ == "__main__":
  sys.exit(main(["distill", *sys.argv[1:]]))
