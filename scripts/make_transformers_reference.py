"""Makes tests/data/transformers_llama.npz: loss and gradients of one SFT batch by transformers, in float32.

It needs torch, which this project does not: run it in an environment of its own,

  python -m venv /tmp/reference && /tmp/reference/bin/pip install torch transformers==5.12.1
  /tmp/reference/bin/python scripts/make_transformers_reference.py

The model is a random two-layer Llama. The batch has three conversations of different lengths, padded on the right, with
labels on some tokens only, as SFT has them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

TARGET = Path(__file__).resolve().parents[1] / "tests" / "data" / "transformers_llama.npz"
LENGTHS = (12, 7, 10)
SEQ = 12


def main() -> None:
  """Computes and writes the reference."""
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    attn_implementation="eager",
  )
  model = transformers.LlamaForCausalLM(config).float()
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      if "norm" in name:
        parameter.normal_(1.0, 0.2)
      else:
        parameter.normal_(0.0, 0.15)
  rng = np.random.default_rng(0)
  tokens = np.zeros((len(LENGTHS), SEQ), np.int64)
  labels = np.full((len(LENGTHS), SEQ), -100, np.int64)
  attention = np.zeros((len(LENGTHS), SEQ), np.int64)
  for row, length in enumerate(LENGTHS):
    tokens[row, :length] = rng.integers(1, 48, length)
    attention[row, :length] = 1
    trained = rng.random(length) < 0.6
    trained[0] = False
    trained[-1] = True
    labels[row, :length][trained] = tokens[row, :length][trained]
  out = model(
    input_ids=torch.tensor(tokens), attention_mask=torch.tensor(attention), labels=torch.tensor(labels), use_cache=False
  )
  out.loss.backward()
  arrays = {
    "tokens": tokens,
    "labels": labels,
    "lengths": np.array(LENGTHS),
    "loss": np.float64(out.loss.item()),
    "logits": out.logits.detach().numpy(),
  }
  for name, parameter in model.named_parameters():
    arrays[f"weight/{name}"] = parameter.detach().numpy()
    arrays[f"grad/{name}"] = parameter.grad.numpy()
  TARGET.parent.mkdir(parents=True, exist_ok=True)
  np.savez_compressed(TARGET, **arrays)
  print(f"{TARGET}: loss {out.loss.item():.6f}, transformers {transformers.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
  main()
