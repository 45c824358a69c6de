"""Makes tests/data/greedy_prompts.json: greedy completions of 50 prompts by transformers, in float32.

The model is tests/data/families/llama3_1, and the environment that of make_family_references.py, which made it:

  .venv-reference/bin/python scripts/make_greedy_reference.py

Each prompt is completed by itself, without padding. Prompts are random; one that leads to a near tie is replaced, since
what is chosen there depends on how sums are rounded.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import transformers

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
FAMILY = "llama3_1"
TARGET = DATA / "greedy_prompts.json"
PROMPTS = 50
LONGEST = 40
NEW_TOKENS = 16
NEAR_TIE = 1e-4


def main() -> None:
  """Computes and writes them."""
  model = transformers.AutoModelForCausalLM.from_pretrained(DATA / "families" / FAMILY, dtype=torch.float32).eval()
  model.generation_config.eos_token_id = None
  rng = np.random.default_rng(5)
  lines: list[str] = []
  smallest = float("inf")
  while len(lines) < PROMPTS:
    prompt = rng.integers(0, model.config.vocab_size, rng.integers(1, LONGEST + 1)).tolist()
    out = model.generate(
      torch.tensor([prompt]),
      attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
      do_sample=False,
      max_new_tokens=NEW_TOKENS,
      output_logits=True,
      return_dict_in_generate=True,
    )
    top = torch.cat(out.logits).topk(2).values
    gap = float((top[:, 0] - top[:, 1]).min())
    if gap < NEAR_TIE:
      continue
    smallest = min(smallest, gap)
    lines.append(json.dumps({"prompt": prompt, "tokens": out.sequences[0, len(prompt) :].tolist()}))
  TARGET.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
  print(f"{TARGET}: {len(lines)} prompts, smallest gap {smallest:.5f}, {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
  main()
