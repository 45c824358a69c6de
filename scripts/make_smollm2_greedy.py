"""Makes tests/data/smollm2_greedy.json: greedy answers of SmolLM2-135M-Instruct by transformers, in float32.

The model and the environment are those of make_smollm2_reference.py:

  .venv-reference/bin/python scripts/make_smollm2_greedy.py <the GGUF file>

For each prompt, a user's only turn: the ids of the chat, those of the answer (at most NEW_TOKENS, eos included) and by
how much the largest logit was above the second, at the step where that was least. A near tie is refused: what is
chosen there depends on how sums are rounded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

TARGET = Path(__file__).resolve().parents[1] / "tests" / "data" / "smollm2_greedy.json"
NEW_TOKENS = 24
NEAR_TIE = 1e-4
PROMPTS = (
  "What is the capital of Italy?",
  "Who wrote Romeo and Juliet?",
  "In which year did people first land on the Moon?",
  "Name the largest planet of the solar system.",
  "Why is the sky blue? One sentence, please.",
  "What is 7 times 8?",
  "A train covers 180 km in 3 hours. How fast is it?",
  "Solve for x: 3x + 5 = 20.",
  "Is 91 a prime number?",
  "Tom has 12 apples and gives a third of them to Ann. How many has he left?",
  "Write a Python function that reverses a string.",
  "What does this print?\n\n```python\nfor i in range(3):\n    print(i * i)\n```",
  "SELECT name FROM users WHERE age > 30; -- explain this query",
  "Translate into French: good morning, my friend.",
  "¿Cuál es la capital de España?",
  "Wie heißt die Hauptstadt von Österreich?",
  "日本の首都はどこですか?",
  "What do these mean: 🙂 ❤️ 🚀?",
  "Write a haiku about the sea.",
  "Hi",
)


def main() -> None:
  """Computes and writes the answers."""
  path = Path(sys.argv[1])
  tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
  model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
  model.eval()
  lines, ties = [], []
  for prompt in PROMPTS:
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    out = model.generate(
      torch.tensor([ids]),
      do_sample=False,
      max_new_tokens=NEW_TOKENS,
      output_logits=True,
      return_dict_in_generate=True,
    )
    answer = out.sequences[0, len(ids) :].tolist()
    top = torch.cat(out.logits).topk(2).values
    gap = float((top[:, 0] - top[:, 1]).min())
    if gap < NEAR_TIE:
      ties.append(prompt)
    print(f"{prompt!r} ({len(ids)} ids, smallest gap {gap:.5f}): {tokenizer.decode(answer)!r}")
    entry = {"prompt": prompt, "prompt_ids": ids, "answer_ids": answer, "smallest_gap": round(gap, 5)}
    lines.append(json.dumps(entry, ensure_ascii=False))
  if ties:
    sys.exit(f"near ties, take other prompts: {ties}")
  TARGET.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
  main()
