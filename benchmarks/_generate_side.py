"""One contender of `generate.py`, in a process and, where need be, an interpreter of its own.

  python _generate_side.py {ours,tunix,transformers} SHAPE

SHAPE is JSON. For each batch size that comes on standard input, one a line, generates once and answers with the seconds
that took. Nothing here imports what only another side needs.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Prompts = list[list[int]]
Generate = Callable[[Prompts], Any]


def ours(shape: Mapping[str, int]) -> Generate:
  """The native engine on a MaxText model."""
  from maxtext_posttrain import maxtext_api
  from maxtext_posttrain.rollout.native import NativeEngine
  from maxtext_posttrain.rollout.options import SamplingOptions

  maxtext_api.use_pretraining_prng()
  config = maxtext_api.build_config(
    {
      "run_name": "benchmark",
      "model_name": "default",
      "override_model_config": True,
      "decoder_block": "llama2",
      "base_num_decoder_layers": shape["layers"],
      "base_emb_dim": shape["emb"],
      "base_mlp_dim": shape["mlp"],
      "base_num_query_heads": shape["heads"],
      "base_num_kv_heads": shape["kv_heads"],
      "head_dim": shape["head_dim"],
      "vocab_size": shape["vocab"],
      "max_target_length": shape["prompt"] + shape["new"],
      "per_device_batch_size": 1,
      "attention": "dot_product",
      "dtype": "float32",
      "weight_dtype": "float32",
      "hardware": os.environ["JAX_PLATFORMS"],
      "enable_checkpointing": False,
      "skip_jax_distributed_system": True,
    }
  )
  mesh = maxtext_api.build_mesh(config)
  model = maxtext_api.init_model(config, maxtext_api.pretraining_state(config, mesh), mesh)
  engine = NativeEngine(config, mesh, model)
  options = SamplingOptions(max_new_tokens=shape["new"], temperature=0.0)
  return lambda prompts: [completion.token_ids for completion in engine.generate(prompts, options)]


def tunix(shape: Mapping[str, int]) -> Generate:
  """Tunix's vanilla sampler on its own Llama."""
  import jax
  import jax.numpy as jnp
  from flax import nnx
  from tunix.generate.sampler import CacheConfig, Sampler
  from tunix.models.llama3.model import Llama3, ModelConfig

  class Tokenizer:
    """Prompts are ids in a string already; no id is eos."""

    def encode(self, text: str) -> list[int]:
      return [int(part) for part in text.split()]

    def decode(self, ids: list[int]) -> str:
      return " ".join(map(str, ids))

    def bos_id(self) -> int:
      return 1

    def eos_id(self) -> int:
      return shape["vocab"]

    def pad_id(self) -> int:
      return 0

  config = ModelConfig(
    num_layers=shape["layers"],
    vocab_size=shape["vocab"],
    embed_dim=shape["emb"],
    hidden_dim=shape["mlp"],
    num_heads=shape["heads"],
    head_dim=shape["head_dim"],
    num_kv_heads=shape["kv_heads"],
    rope_theta=10_000,
    norm_eps=1e-5,
  )
  model = Llama3(config, rngs=nnx.Rngs(0))
  weights = nnx.state(model)
  nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights))
  size = shape["prompt"] + shape["new"]
  sampler = Sampler(model, Tokenizer(), CacheConfig(size, shape["layers"], shape["kv_heads"], shape["head_dim"]))

  def generate(prompts: Prompts) -> Any:
    # The sampler puts bos in front.
    texts = [" ".join(map(str, prompt[1:])) for prompt in prompts]
    return sampler(texts, max_generation_steps=shape["new"], max_prompt_length=shape["prompt"]).tokens

  return generate


def transformers(shape: Mapping[str, int]) -> Generate:
  """`generate` of transformers on PyTorch."""
  import torch  # pyright: ignore[reportMissingImports]  # in another interpreter
  from transformers import LlamaConfig, LlamaForCausalLM

  config = LlamaConfig(
    num_hidden_layers=shape["layers"],
    vocab_size=shape["vocab"],
    hidden_size=shape["emb"],
    intermediate_size=shape["mlp"],
    num_attention_heads=shape["heads"],
    num_key_value_heads=shape["kv_heads"],
    head_dim=shape["head_dim"],
    max_position_embeddings=shape["prompt"] + shape["new"],
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=0,
  )
  torch.manual_seed(0)
  model = LlamaForCausalLM(config).eval()

  def generate(prompts: Prompts) -> Any:
    ids = torch.tensor(prompts)
    with torch.inference_mode():
      out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=shape["new"],
        min_new_tokens=shape["new"],
      )
    return out[:, ids.shape[1] :].tolist()

  return generate


def main() -> None:
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  side, shape = sys.argv[1], json.loads(sys.argv[2])
  generate = {"ours": ours, "tunix": tunix, "transformers": transformers}[side](shape)
  draw = random.Random(0)
  print("ready", file=answers, flush=True)
  for line in sys.stdin:
    prompts = [[draw.randrange(1, shape["vocab"]) for _ in range(shape["prompt"])] for _ in range(int(line))]
    started = time.perf_counter()
    completions = generate(prompts)
    seconds = time.perf_counter() - started
    tokens = sum(len(completion) for completion in completions)
    print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
  main()
