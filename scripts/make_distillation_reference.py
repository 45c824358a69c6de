"""Makes tests/data/trl_distillation.npz: TRL's generalised Jensen-Shannon loss and its gradients, in float64.

It needs torch and TRL, which this project does not: run it in an environment of its own,

  python -m venv /tmp/reference && /tmp/reference/bin/pip install torch trl==1.16.0
  /tmp/reference/bin/python scripts/make_distillation_reference.py

Random logits of a student and a teacher, padded on the right, some of the other positions untrained too. TRL's loss has
no factor T²; the reference holds what TRL computes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from trl.experimental.gkd import GKDTrainer

TARGET = Path(__file__).resolve().parents[1] / "tests" / "data" / "trl_distillation.npz"
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
TEMPERATURES = (1.0, 2.5)
SHAPE = (3, 6, 17)
LENGTHS = (6, 4, 5)


def main() -> None:
  """Computes and writes the reference."""
  rng = np.random.default_rng(0)
  student = rng.normal(scale=3.0, size=SHAPE).astype(np.float32)
  teacher = rng.normal(scale=3.0, size=SHAPE).astype(np.float32)
  labels = rng.integers(0, SHAPE[-1], size=SHAPE[:2])
  labels[rng.random(SHAPE[:2]) < 0.3] = -100
  for row, length in enumerate(LENGTHS):
    labels[row, length:] = -100
  arrays = {"student": student, "teacher": teacher, "mask": labels != -100}
  for beta in BETAS:
    for temperature in TEMPERATURES:
      logits = torch.tensor(student.astype(np.float64), requires_grad=True)
      loss = GKDTrainer.generalized_jsd_loss(
        logits,
        torch.tensor(teacher.astype(np.float64)),
        labels=torch.tensor(labels),
        beta=beta,
        temperature=temperature,
        reduction="sum",
      )
      loss.backward()
      assert logits.grad is not None
      arrays[f"loss_{beta}_{temperature}"] = loss.detach().numpy()
      arrays[f"gradient_{beta}_{temperature}"] = logits.grad.numpy().astype(np.float32)
  np.savez_compressed(TARGET, **arrays)


if __name__ == "__main__":
  main()
