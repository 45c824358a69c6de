"""GRPO: `python -m train_grpo config.yml [key=value ...]`, the same as `posttrain grpo`."""

import sys

from maxtext_posttrain.cli import main_of
from maxtext_posttrain.commands import TRAINERS

if __name__ == "__main__":
  sys.exit(main_of(TRAINERS["grpo"]))
