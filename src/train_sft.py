"""Supervised fine-tuning: `python -m train_sft config.yml [key=value ...]`, the same as `posttrain sft`."""

import sys

from maxtext_posttrain.cli import main
from maxtext_posttrain.huge_pages import restart_with_huge_pages

if __name__ == "__main__":
  restart_with_huge_pages()
  sys.exit(main(["sft", *sys.argv[1:]]))
