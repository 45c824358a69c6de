"""Trains with TRL's `SFTTrainer` on the CPU what `sft_step.py` trains with MaxText, and notes what it does.

  python _trl_side.py RESULT.json key=value ...

The keys are MaxText's; this file says what they are called in transformers and TRL. It runs in an interpreter that has
those (.venv-torch) and imports nothing of this package. RESULT.json is what `_probe.py` writes.

Two of TRL's defaults are changed in its favour: gradient checkpointing is off, and examples are cut to fill every row
(`wrapped`), since its other packing wants FlashAttention, which no CPU has.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]  # in another interpreter
from datasets import load_dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]


class Recorder(TrainerCallback):
  """Notes the clocks at the end of each update, and the losses; as the collator, what was in each batch."""

  def __init__(self) -> None:
    self.result: dict[str, Any] = {
      name: [] for name in ("completed", "processor_seconds", "losses", "positions", "tokens", "trained_tokens")
    }

  def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
    """On the CPU, PyTorch returns when the update is made."""
    del args, state, control
    self.result["completed"].append(time.monotonic())
    self.result["processor_seconds"].append(time.process_time())

  def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
    """One log a step, and one more at the end, which has no `loss`."""
    del args, state, control
    if logs is not None and "loss" in logs:
      self.result["losses"].append(float(logs["loss"]))

  def observe(self, collator: Any) -> Any:
    """The collator, counting what it makes."""

    def collate(examples: Any) -> Any:
      batch = collator(examples)
      for name, number in zip(("positions", "tokens", "trained_tokens"), self.count(batch), strict=True):
        self.result[name].append(number)
      return batch

    return collate

  def count(self, batch: Mapping[str, Any]) -> tuple[int, int, int]:
    """Positions, tokens and trained tokens of a batch."""
    trained = int((batch["labels"][:, 1:] != -100).sum())
    return batch["input_ids"].numel(), int(batch["attention_mask"].sum()), trained


def build_model(keys: Mapping[str, str]) -> LlamaForCausalLM:
  """The same architecture with random weights."""
  torch.manual_seed(0)
  config = LlamaConfig(
    num_hidden_layers=int(keys["base_num_decoder_layers"]),
    vocab_size=int(keys["vocab_size"]),
    hidden_size=int(keys["base_emb_dim"]),
    intermediate_size=int(keys["base_mlp_dim"]),
    num_attention_heads=int(keys["base_num_query_heads"]),
    num_key_value_heads=int(keys["base_num_kv_heads"]),
    head_dim=int(keys["head_dim"]),
    max_position_embeddings=int(keys["max_target_length"]),
    rope_parameters={"rope_type": "default", "rope_theta": float(keys.get("rope_max_timescale", 10_000))},
    tie_word_embeddings=keys["logits_via_embedding"] == "true",
    dtype="float32",
  )
  return LlamaForCausalLM(config)


def training_arguments(keys: Mapping[str, str]) -> dict[str, Any]:
  """MaxText's keys as arguments that every trainer's configuration takes."""
  return {
    "output_dir": keys["base_output_directory"],
    "max_steps": int(keys["steps"]),
    "per_device_train_batch_size": int(keys["per_device_batch_size"]),
    "gradient_accumulation_steps": int(keys["gradient_accumulation_steps"]),
    "max_length": int(keys["max_target_length"]),
    "learning_rate": float(keys["learning_rate"]),
    "max_grad_norm": float(keys["gradient_clipping_threshold"]),
    "optim": "adamw_torch",
    "lr_scheduler_type": "cosine",
    "warmup_steps": int(0.1 * int(keys["steps"])),
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
  }


def build_trainer(keys: Mapping[str, str], recorder: Recorder) -> SFTTrainer:
  """The trainer for MaxText's keys."""
  config = SFTConfig(
    **training_arguments(keys),
    packing=keys["packing"] == "true",
    packing_strategy="wrapped",
    assistant_only_loss=keys["sft_train_on_completion_only"] == "true",
  )
  trainer = SFTTrainer(
    model=build_model(keys),
    args=config,
    train_dataset=load_dataset("json", data_files=keys["hf_train_files"], split="train"),
    processing_class=AutoTokenizer.from_pretrained(keys["tokenizer_path"]),
    callbacks=[recorder],
  )
  trainer.data_collator = recorder.observe(trainer.data_collator)
  return trainer


def run(build: Callable[[Mapping[str, str], Recorder], Any], recorder: Recorder) -> None:
  """Trains as the command line says, and writes what was recorded."""
  path, *arguments = sys.argv[1:]
  trainer = build(dict(argument.split("=", 1) for argument in arguments), recorder)
  trainer.train()
  kilobytes = 1 if sys.platform == "darwin" else 1024
  counts = {
    "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
    "compile_seconds": 0.0,
    "compilations": 0,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobytes,
  }
  Path(path).write_text(json.dumps({**recorder.result, **counts}), encoding="utf-8")


if __name__ == "__main__":
  run(build_trainer, Recorder())
