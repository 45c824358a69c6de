"""Makes tests/data/trl_grpo.npz: TRL's GRPO loss and gradients on given log-probabilities, in float32.

It needs torch and TRL, which this project does not: run it in the environment that `make torch-env` makes,

  .venv-torch/bin/python scripts/make_trl_grpo_reference.py

TRL's own `GRPOTrainer._compute_loss` is run on logits instead of on a model, once for each of its aggregations, ratios,
clip bounds, KL coefficients and importance weights.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer

TARGET = Path(__file__).resolve().parents[1] / "tests" / "data" / "trl_grpo.npz"
LENGTHS = (6, 1, 4, 3, 6, 2)
SEQ, VOCAB = 6, 12


def _alone(values: torch.Tensor, reduction: str) -> torch.Tensor:
  """A reduction over one process."""
  del reduction
  return values


class OnLogits(GRPOTrainer):
  """TRL's trainer with logits in its model's place."""

  def __init__(self, logits: torch.Tensor, targets: torch.Tensor, *, loss_type: str, level: str, options: Any):
    self.logits, self.targets = logits, targets
    self.loss_type, self.importance_sampling_level = loss_type, level
    self.epsilon_low, self.epsilon_high, self.beta = options.epsilon_low, options.epsilon_high, options.beta
    self.args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    self.accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=_alone)
    self.model = SimpleNamespace(training=True)
    self.aux_loss_enabled = False
    self.top_entropy_quantile = 1.0
    self.off_policy_mask_threshold = None
    self.use_vllm = self.vllm_importance_sampling_correction = options.corrected
    self.current_gradient_accumulation_steps = 1
    self.max_completion_length = SEQ
    self._entropy_bonus_enabled = False
    self._metrics = {"train": defaultdict(list)}

  def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    log_softmax = torch.log_softmax(self.logits, dim=-1)
    log_probs = torch.gather(log_softmax, -1, self.targets[..., None])[..., 0]
    entropy = -(log_softmax.exp() * log_softmax).sum(-1).detach()
    return log_probs, entropy, None


def main() -> None:
  """Computes and writes the reference."""
  rng = np.random.default_rng(0)
  rows = len(LENGTHS)
  logits = rng.normal(scale=1.5, size=(rows, SEQ, VOCAB)).astype(np.float32)
  targets = rng.integers(VOCAB, size=(rows, SEQ))
  mask = np.arange(SEQ) < np.array(LENGTHS)[:, None]
  exact = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  log_probs = np.take_along_axis(exact, targets[..., None], -1)[..., 0]
  old = (log_probs + rng.normal(scale=0.4, size=log_probs.shape)).astype(np.float32)
  engine = (old + rng.normal(scale=0.3, size=log_probs.shape)).astype(np.float32)
  reference = (log_probs + rng.normal(scale=0.5, size=log_probs.shape)).astype(np.float32)
  advantages = np.array([1.2, -0.7, 0.0, 0.4, -1.5, 0.6], np.float32)
  weights = np.minimum(np.exp(old - engine), 1.5).astype(np.float32)
  arrays: dict[str, np.ndarray] = {
    "logits": logits,
    "targets": targets.astype(np.int32),
    "mask": mask,
    "old": old,
    "engine": engine,
    "reference": reference,
    "advantages": advantages,
  }
  numbers = ((0.2, 0.2, 0.0, False), (0.1, 0.5, 0.3, False), (0.1, 0.5, 0.3, True))
  cases = itertools.product(("grpo", "dr_grpo", "dapo", "luspo"), ("token", "sequence"), numbers)
  for loss_type, level, (low, high, beta, corrected) in cases:
    options = SimpleNamespace(epsilon_low=low, epsilon_high=high, beta=beta, corrected=corrected)
    leaf = torch.tensor(logits, requires_grad=True)
    trainer = OnLogits(leaf, torch.tensor(targets), loss_type=loss_type, level=level, options=options)
    inputs = {
      "prompt_ids": torch.zeros((rows, 1), dtype=torch.long),
      "prompt_mask": torch.ones((rows, 1), dtype=torch.long),
      "completion_ids": torch.tensor(targets),
      "completion_mask": torch.tensor(mask).long(),
      "advantages": torch.tensor(advantages),
      "old_per_token_logps": torch.tensor(old),
      "ref_per_token_logps": torch.tensor(reference),
      "importance_sampling_ratio": torch.tensor(weights),
      "num_items_in_batch": torch.tensor(float(mask.sum())),
    }
    loss = trainer._compute_loss(None, inputs)
    loss.backward()
    name = f"{loss_type}/{level}/{low}/{high}/{beta}/{int(corrected)}"
    arrays[f"loss/{name}"] = np.array(loss.item(), np.float32)
    arrays[f"grad/{name}"] = leaf.grad.numpy()
    metrics = trainer._metrics["train"]
    kl = metrics["kl"][0] if beta else 0.0
    arrays[f"metrics/{name}"] = np.array(
      [kl, metrics["entropy"][0], metrics["clip_ratio/low_mean"][0], metrics["clip_ratio/high_mean"][0]], np.float32
    )
  np.savez_compressed(TARGET, allow_pickle=False, **arrays)
  print(f"{TARGET}: {len(arrays)} arrays, {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
  main()
