"""GRPO: `python -m train_grpo config.yml [key=value ...]`, the same as `posttrain grpo`."""

import sys

from maxtext_posttrain.cli import main

if __name__ == "__main__":
  sys.exit(main(["grpo", *sys.argv[1:]]))
