"""Trains with TRL's `DPOTrainer` on the CPU what `dpo_step.py` trains with MaxText, and notes what it does.

  python _trl_dpo_side.py RESULT.json key=value ...

As `_trl_side.py`, whose model and recorder it uses. The reference is a second model in memory, as here. Gradient
checkpointing, on by default, is off in TRL's favour.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch  # pyright: ignore[reportMissingImports]  # in another interpreter
from _trl_side import Recorder, build_model, run, training_arguments
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer  # pyright: ignore[reportMissingImports]


class PairRecorder(Recorder):
  """A recorder of batches with chosen sequences first and rejected ones behind them."""

  def count(self, batch: Mapping[str, Any]) -> tuple[int, int, int]:
    """Positions, tokens and trained tokens of a batch."""
    return batch["input_ids"].numel(), int(batch["attention_mask"].sum()), int(batch["completion_mask"].sum())


def build_trainer(keys: Mapping[str, str], recorder: Recorder) -> DPOTrainer:
  """The trainer for MaxText's keys."""
  config = DPOConfig(
    **training_arguments(keys),
    beta=float(keys["dpo.dpo_beta"]),
    loss_type="sigmoid",
  )
  reference = build_model(keys)
  model = build_model(keys)
  with torch.no_grad():
    for own, start in zip(model.parameters(), reference.parameters(), strict=True):
      own.copy_(start)
  trainer = DPOTrainer(
    model=model,
    ref_model=reference,
    args=config,
    train_dataset=load_dataset("json", data_files=keys["hf_train_files"], split="train"),
    processing_class=AutoTokenizer.from_pretrained(keys["tokenizer_path"]),
    callbacks=[recorder],
  )
  trainer.data_collator = recorder.observe(trainer.data_collator)
  return trainer


if __name__ == "__main__":
  run(build_trainer, PairRecorder())
