"""Distils with TRL's `GKDTrainer` on the CPU what `distillation_step.py` distils with this package.

  python _gkd_side.py RESULT.json key=value ...

Keys, interpreter and result are those of `_trl_side.py`. TRL distils off-policy (`lmbda=0`), with the forward KL
(`beta=0`). Its own collator pads every chat by itself; here all rows are filled, with the assistant's tokens trained,
so that both sides do the same work. Gradient checkpointing is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch  # pyright: ignore[reportMissingImports]  # in another interpreter
from _trl_side import Recorder, build_model, run, training_arguments
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer
from trl.experimental.gkd import GKDConfig, GKDTrainer  # pyright: ignore[reportMissingImports]

_STUDENT_LAYERS = "student_overrides.base_num_decoder_layers"
_CHATS = 2000


def filled_rows(keys: Mapping[str, str], tokenizer: Any) -> Dataset:
  """Chats one after the other, cut into rows of `max_target_length`."""
  length = int(keys["max_target_length"])
  ids: list[int] = []
  labels: list[int] = []
  chats: Any = load_dataset("json", data_files=keys["hf_train_files"], split=f"train[:{_CHATS}]")
  for chat in chats:
    encoded = tokenizer.apply_chat_template(
      chat["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids += encoded["input_ids"]
    trained = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    labels += [token if counts else -100 for token, counts in trained]
  rows = range(0, len(ids) - length + 1, length)
  return Dataset.from_dict(
    {"input_ids": [ids[row : row + length] for row in rows], "labels": [labels[row : row + length] for row in rows]}
  )


def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
  """Rows of one length as a batch."""
  batch = {key: torch.tensor([example[key] for example in examples]) for key in ("input_ids", "labels")}
  return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def build_trainer(keys: Mapping[str, str], recorder: Recorder) -> GKDTrainer:
  """The trainer for MaxText's keys."""
  config = GKDConfig(
    **training_arguments(keys),
    lmbda=0.0,
    beta=0.0,
    seq_kd=False,
  )
  tokenizer = AutoTokenizer.from_pretrained(keys["tokenizer_path"])
  return GKDTrainer(
    model=build_model({**keys, "base_num_decoder_layers": keys[_STUDENT_LAYERS]}),
    teacher_model=build_model(keys),
    args=config,
    data_collator=recorder.observe(collate),
    train_dataset=filled_rows(keys, tokenizer),
    processing_class=tokenizer,
    callbacks=[recorder],
  )


if __name__ == "__main__":
  run(build_trainer, Recorder())
