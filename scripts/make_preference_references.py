"""Makes tests/data/preference_losses.npz: TRL's losses on random pairs with padding, and their gradients.

It needs torch and TRL 1.16.0, which this project does not: run it in the environment that `make torch-env` makes,

  .venv-torch/bin/python scripts/make_preference_references.py

DPO's losses come from `DPOTrainer._compute_loss`, on a stand-in for the model that looks the logits up; SimPO's and
the smoothed sigmoid from `CPOTrainer.cpo_loss`; ORPO's odds ratio from `ORPOTrainer.odds_ratio_loss`. Each value is the
mean over pairs, each gradient that of the mean with regard to the logits.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trl import DPOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

TARGET = Path(__file__).resolve().parents[1] / "tests" / "data" / "preference_losses.npz"
PAIRS, LENGTH, VOCABULARY = 5, 10, 13
BETA, SMOOTHING, GAMMA, LAMBDA = 0.3, 0.15, 0.7, 0.25


def random_pairs() -> dict[str, np.ndarray]:
  """Logits, ids and masks, first all chosen sequences and then all rejected, of different lengths, padded right."""
  rng = np.random.default_rng(7)
  rows = 2 * PAIRS
  completion_mask = np.zeros((rows, LENGTH), np.int64)
  for row in range(rows):
    start = 2 + row % PAIRS % 3
    completion_mask[row, start : rng.integers(start + 1, LENGTH + 1)] = 1
  return {
    "logits": rng.normal(scale=2.0, size=(rows, LENGTH, VOCABULARY)).astype(np.float32),
    "ids": rng.integers(VOCABULARY, size=(rows, LENGTH)),
    "completion_mask": completion_mask,
    "reference": -rng.uniform(5.0, 20.0, size=(2, PAIRS)).astype(np.float32),
  }


def token_log_probs(pairs: dict[str, np.ndarray], logits: torch.Tensor) -> torch.Tensor:
  """[rows, length - 1]: of each token but the first, 0 outside the completion."""
  ids = torch.tensor(pairs["ids"])[:, 1:]
  mask = torch.tensor(pairs["completion_mask"])[:, 1:]
  return torch.log_softmax(logits[:, :-1].double(), -1).gather(-1, ids[..., None])[..., 0] * mask


def dpo(pairs: dict[str, np.ndarray], loss_type: str) -> Callable[[torch.Tensor], torch.Tensor]:
  """DPOTrainer's loss."""

  def loss(logits: torch.Tensor) -> torch.Tensor:
    log_probs = token_log_probs(pairs, logits)

    class Model:
      training = True

      def __call__(self, **_: Any) -> Any:
        zeros = torch.zeros_like(log_probs)
        return types.SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    trainer = object.__new__(DPOTrainer)
    same = lambda value: value  # noqa: E731
    trainer.__dict__.update(
      model=Model(),
      accelerator=types.SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=same, gather=same),
      aux_loss_enabled=False,
      ld_alpha=None,
      precompute_ref_logps=True,
      f_divergence_type="reverse_kl",
      loss_types=[loss_type],
      loss_weights=[1.0],
      beta=BETA,
      label_smoothing=0.0,
      use_weighting=False,
      _metrics=defaultdict(lambda: defaultdict(list)),
      _total_train_tokens=0,
      _tp_size=1,
    )
    mask = torch.tensor(pairs["completion_mask"])
    inputs = {
      "input_ids": torch.tensor(pairs["ids"]),
      "attention_mask": torch.ones_like(mask),
      "completion_mask": mask,
      "ref_chosen_logps": torch.tensor(pairs["reference"][0]).double(),
      "ref_rejected_logps": torch.tensor(pairs["reference"][1]).double(),
    }
    return trainer._compute_loss(trainer.model, inputs, return_outputs=False)

  return loss


def _halves(pairs: dict[str, np.ndarray], logits: torch.Tensor, *, mean: bool) -> tuple[torch.Tensor, ...]:
  sums = token_log_probs(pairs, logits).sum(-1)
  lengths = torch.tensor(pairs["completion_mask"])[:, 1:].sum(-1)
  return ((sums / lengths) if mean else sums).chunk(2)


def cpo(pairs: dict[str, np.ndarray], loss_type: str, smoothing: float) -> Callable[[torch.Tensor], torch.Tensor]:
  """CPOTrainer's loss: SimPO of means, or the smoothed sigmoid of DPO's log-ratios."""

  def loss(logits: torch.Tensor) -> torch.Tensor:
    chosen, rejected = _halves(pairs, logits, mean=loss_type == "simpo")
    if loss_type == "sigmoid":
      chosen, rejected = (
        each - torch.tensor(ref) for each, ref in zip((chosen, rejected), pairs["reference"], strict=True)
      )
    trainer = object.__new__(CPOTrainer)
    trainer.__dict__.update(
      accelerator=types.SimpleNamespace(device=torch.device("cpu")),
      alpha=0.0,
      beta=BETA,
      label_smoothing=smoothing,
      loss_type=loss_type,
      simpo_gamma=GAMMA,
    )
    return trainer.cpo_loss(chosen, rejected)[0].mean()

  return loss


def orpo(pairs: dict[str, np.ndarray]) -> Callable[[torch.Tensor], torch.Tensor]:
  """The paper's loss of a pair, its likelihood over the completion alone, with ORPOTrainer's odds ratio."""

  def loss(logits: torch.Tensor) -> torch.Tensor:
    chosen, rejected = _halves(pairs, logits, mean=True)
    trainer = object.__new__(ORPOTrainer)
    trainer.__dict__.update(accelerator=types.SimpleNamespace(device=torch.device("cpu")), beta=LAMBDA)
    return (-chosen - trainer.odds_ratio_loss(chosen, rejected)[0]).mean()

  return loss


def main() -> None:
  """Computes and writes them all."""
  pairs = random_pairs()
  losses = {
    "sigmoid": dpo(pairs, "sigmoid"),
    "sigmoid_norm": dpo(pairs, "sigmoid_norm"),
    "hinge": dpo(pairs, "hinge"),
    "ipo": dpo(pairs, "ipo"),
    "sigmoid_smoothed": cpo(pairs, "sigmoid", SMOOTHING),
    "simpo": cpo(pairs, "simpo", 0.0),
    "simpo_smoothed": cpo(pairs, "simpo", SMOOTHING),
    "orpo": orpo(pairs),
  }
  arrays: dict[str, Any] = dict(pairs)
  for name, loss in losses.items():
    logits = torch.tensor(pairs["logits"], requires_grad=True)
    value = loss(logits)
    value.backward()
    assert logits.grad is not None
    arrays[f"{name}_loss"] = np.float64(value.item())
    arrays[f"{name}_gradient"] = logits.grad.numpy()
  np.savez_compressed(TARGET, beta=BETA, smoothing=SMOOTHING, gamma=GAMMA, orpo_lambda=LAMBDA, **arrays)
  print(f"{TARGET}: {', '.join(losses)}")


if __name__ == "__main__":
  main()
