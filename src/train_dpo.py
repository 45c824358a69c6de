"""Preference optimisation: `python -m train_dpo config.yml [key=value ...]`, the same as `posttrain dpo`."""

import sys

from maxtext_posttrain.cli import main

if __name__ == "__main__":
  sys.exit(main(["dpo", *sys.argv[1:]]))
