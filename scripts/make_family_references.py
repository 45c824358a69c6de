"""Makes tests/data/families/<family>/: a tiny random HuggingFace model each, transformers' logits and its completions.

It needs torch, which this project does not: run it in an environment of its own,

  python -m venv .venv-reference && .venv-reference/bin/pip install torch transformers==5.12.1
  .venv-reference/bin/python scripts/make_family_references.py

Weights and logits are float32. Values that MaxText keeps in a coarser form are drawn from that form, as those of
published models (bfloat16) are: tied embedding tables are bfloat16 numbers, since MaxText rounds a tied head to
bfloat16, and Gemma's norms are multiples of 1/256, since MaxText stores 1 + w.

Completions are greedy, of prompts whose completions have no near ties: at each step the largest logit is more than
SMALLEST_GAP above the second. Of such prompts the one whose completion has the most different tokens is kept, since
random models like to repeat themselves.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
import transformers

TARGET = Path(__file__).resolve().parents[1] / "tests" / "data" / "families"
LENGTHS = (1, 7, 40)
PROMPT_LENGTHS = (2, 9, 20)
NEW_TOKENS = 14
CANDIDATES = 256
SMALLEST_GAP = 1e-3
SMALL = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 16}
GQA = {"num_key_value_heads": 2}
WINDOW = 8
LLAMA3_ROPE = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192,
}


def families() -> dict[str, transformers.PretrainedConfig]:
  """The configurations, by the folder's name."""
  return {
    "llama2": transformers.LlamaConfig(
      **SMALL, **GQA, num_hidden_layers=2, rms_norm_eps=1e-5, tie_word_embeddings=False
    ),
    "llama3_1": transformers.LlamaConfig(
      **SMALL,
      **GQA,
      num_hidden_layers=2,
      rms_norm_eps=1e-5,
      tie_word_embeddings=False,
      max_position_embeddings=131072,
      rope_parameters={"rope_theta": 500000.0, **LLAMA3_ROPE},
    ),
    "llama3_2": transformers.LlamaConfig(
      **SMALL,
      **GQA,
      num_hidden_layers=2,
      rms_norm_eps=1e-5,
      tie_word_embeddings=True,
      max_position_embeddings=131072,
      rope_parameters={"rope_theta": 500000.0, **LLAMA3_ROPE, "factor": 32.0},
    ),
    "smollm2": transformers.LlamaConfig(
      vocab_size=128,
      hidden_size=48,
      intermediate_size=96,
      num_attention_heads=3,
      num_key_value_heads=1,
      num_hidden_layers=3,
      rms_norm_eps=1e-5,
      tie_word_embeddings=True,
      rope_parameters={"rope_theta": 100000.0, "rope_type": "default"},
    ),
    "mistral": transformers.MistralConfig(
      **SMALL, **GQA, num_hidden_layers=2, rms_norm_eps=1e-5, tie_word_embeddings=False, sliding_window=None
    ),
    "qwen2_5": transformers.Qwen2Config(
      **SMALL,
      **GQA,
      num_hidden_layers=2,
      tie_word_embeddings=False,
      rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"},
    ),
    "qwen3": transformers.Qwen3Config(
      **{**SMALL, "hidden_size": 48},
      **GQA,
      num_hidden_layers=2,
      tie_word_embeddings=True,
      rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"},
    ),
    "gemma2": transformers.Gemma2Config(
      **{**SMALL, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64},
      num_key_value_heads=1,
      num_hidden_layers=4,
      query_pre_attn_scalar=16,
      sliding_window=WINDOW,
      final_logit_softcapping=5.0,
      attn_logit_softcapping=4.0,
    ),
    "gemma3": transformers.Gemma3TextConfig(
      **{**SMALL, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32},
      num_key_value_heads=1,
      num_hidden_layers=13,
      query_pre_attn_scalar=16,
      sliding_window=WINDOW,
      rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
      },
    ),
  }


def randomise(model: torch.nn.Module, config: transformers.PretrainedConfig) -> None:
  """Weights that make every part of the model matter."""
  gemma = config.model_type.startswith("gemma")
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      if "norm" in name:
        parameter.normal_(0.0 if gemma else 1.0, 0.2)
        if gemma:
          parameter.copy_(torch.round(parameter * 256) / 256 + 0.0)  # Without -0, which 1 + w does not keep.
      else:
        parameter.normal_(0.0, 0.15)
        if "embed_tokens" in name and config.tie_word_embeddings:
          parameter.copy_(parameter.bfloat16().float())


def greedy_completions(model: torch.nn.Module) -> dict[str, np.ndarray]:
  """For each prompt length: the prompt's ids, those that follow, and by how much each was above the next best."""
  model.generation_config.eos_token_id = None
  rng = np.random.default_rng(1)
  arrays = {}
  for length in PROMPT_LENGTHS:
    prompts = rng.integers(0, model.config.vocab_size, (CANDIDATES, length))
    out = model.generate(
      torch.tensor(prompts),
      attention_mask=torch.ones(prompts.shape, dtype=torch.long),
      do_sample=False,
      max_new_tokens=NEW_TOKENS,
      output_logits=True,
      return_dict_in_generate=True,
    )
    tokens = out.sequences[:, length:].numpy()
    top = torch.stack(out.logits, dim=1).topk(2).values.numpy()
    gaps = top[..., 0] - top[..., 1]
    different = np.array([len(set(row)) for row in tokens.tolist()])
    best = int(np.where(gaps.min(axis=1) > SMALLEST_GAP, different, 0).argmax())
    if not gaps[best].min() > SMALLEST_GAP:
      raise ValueError(f"each of {CANDIDATES} prompts of {length} tokens leads to a near tie; take more")
    arrays[f"prompt_{length}"] = prompts[best].astype(np.int32)
    arrays[f"tokens_{length}"] = tokens[best].astype(np.int32)
    arrays[f"gaps_{length}"] = gaps[best]
    print(f"  {length}: {different[best]} different tokens, smallest gap {gaps[best].min():.4f}")
  return arrays


def main() -> None:
  """Makes every folder anew."""
  for name, config in families().items():
    torch.manual_seed(len(name))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    randomise(model, config)
    folder = TARGET / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    rng = np.random.default_rng(0)
    arrays = {}
    with torch.no_grad():
      for length in LENGTHS:
        tokens = rng.integers(0, config.vocab_size, (1, length))
        arrays[f"tokens_{length}"] = tokens.astype(np.int32)
        arrays[f"logits_{length}"] = model(torch.tensor(tokens), use_cache=False).logits.numpy()
    np.savez_compressed(folder / "logits.npz", **arrays)
    np.savez_compressed(folder / "greedy.npz", **greedy_completions(model))
    (folder / "generation_config.json").unlink(missing_ok=True)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name}: {size / 1024:.0f} KiB, logits up to {max(abs(arrays[f'logits_{LENGTHS[-1]}'].ravel())):.2f}")


if __name__ == "__main__":
  main()
