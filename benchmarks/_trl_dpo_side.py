"""Trains with TRL's `DPOTrainer` on the CPU what `dpo_step.py` trains with MaxText, and notes what it does.

  python _trl_dpo_side.py RESULT.json key=value ...

As `_trl_side.py`, whose model and recorder it uses. The reference is a second model in memory, as here. Gradient
checkpointing, on by default, is off in TRL's favour.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch  # pyright: ignore[reportMissingImports]  # in another interpreter
from _trl_side import Recorder, build_model, write_result
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
    output_dir=keys["base_output_directory"],
    max_steps=int(keys["steps"]),
    per_device_train_batch_size=int(keys["per_device_batch_size"]),
    gradient_accumulation_steps=int(keys["gradient_accumulation_steps"]),
    max_length=int(keys["max_target_length"]),
    beta=float(keys["dpo.dpo_beta"]),
    loss_type="sigmoid",
    learning_rate=float(keys["learning_rate"]),
    max_grad_norm=float(keys["gradient_clipping_threshold"]),
    optim="adamw_torch",
    lr_scheduler_type="cosine",
    warmup_steps=int(0.1 * int(keys["steps"])),
    gradient_checkpointing=False,
    bf16=False,
    use_cpu=True,
    save_strategy="no",
    logging_steps=1,
    report_to="none",
    disable_tqdm=True,
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


def main() -> None:
  result, *arguments = sys.argv[1:]
  recorder = PairRecorder()
  trainer = build_trainer(dict(argument.split("=", 1) for argument in arguments), recorder)
  trainer.train()
  write_result(result, recorder, trainer.model)


if __name__ == "__main__":
  main()
