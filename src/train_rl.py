"""GRPO by the name of MaxText's command: `python -m train_rl config.yml [key=value ...]`, the same as `train_grpo`."""

import sys

from maxtext_posttrain.cli import main_of
from maxtext_posttrain.commands import TRAINERS

if __name__ == "__main__":
  sys.exit(main_of(TRAINERS["grpo"]))
