"""Loads a HuggingFace folder with transformers and answers questions greedily. Run it with .venv-torch's Python.

  python scripts/transformers_answer.py FOLDER QUESTION [QUESTION ...]

Prints one JSON object: `parameters`, `tied`, and `answers`.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

from transformers import AutoModelForCausalLM, AutoTokenizer

_MOST_TOKENS = 128


def main() -> None:
  """Answers the questions of the command line.

  Raises:
    SystemExit: a weight is missing, left over, or of another shape.
  """
  folder, *questions = sys.argv[1:]
  tokenizer = AutoTokenizer.from_pretrained(folder)
  model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", output_loading_info=True)
  if wrong := {key: sorted(map(str, names)) for key, names in loading.items() if names}:
    sys.exit(f"error: {folder} does not load as it is: {wrong}")
  answers = []
  for question in questions:
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=_MOST_TOKENS)
    answers.append(tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
  tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
  print(json.dumps({"parameters": model.num_parameters(), "tied": tied, "answers": answers}))


if __name__ == "__main__":
  main()
