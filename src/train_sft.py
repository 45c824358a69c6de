"""Supervised fine-tuning: `python -m train_sft config.yml [key=value ...]`, the same as `posttrain sft`."""

import sys

from maxtext_posttrain.cli import main

if __name__ == "__main__":
  sys.exit(main(["sft", *sys.argv[1:]]))
