"""The estimate of memory: exact where it is counted from shapes, and by hand where it is a formula."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from maxtext_posttrain import memory
from maxtext_posttrain.errors import ConfigError
from maxtext_posttrain.memory import GIB, Decoder, MemoryEstimate, Share
from maxtext_posttrain.trainers.memory import Fit, check_fit

LLAMA_8B = Decoder(
  layers=32, emb=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336, vocab=128256, itemsize=2, remat_policy="full"
)
MESH = AbstractMesh((4, 2), ("fsdp", "tensor"))


def spread(shape: tuple[int, ...], *axes: str | None, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, PartitionSpec(*axes)))


def test_bytes_of_a_tree_are_those_of_one_device():
  tree = {
    "both": spread((64, 32), "fsdp", "tensor"),
    "one": spread((64, 32), None, "tensor", dtype=jnp.bfloat16),
    "whole": spread((7,)),
    "unplaced": jax.ShapeDtypeStruct((5, 3), jnp.int8),
  }
  assert memory.device_bytes(tree) == 16 * 16 * 4 + 64 * 16 * 2 + 7 * 4 + 15


def test_full_remat_keeps_each_layers_input():
  assert memory.saved_bytes(LLAMA_8B, Share(tokens=8192, length=2048, logits=1)) == 32 * 8192 * 4096 * 2


@pytest.mark.parametrize(
  ("policy", "width"),
  [
    ("minimal", 4096 + 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096),
    ("minimal_with_context", 4096 + 4096 + 2 * 1024 + 4096 + 4096 + 2 * 14336 + 4096),
    ("save_qkv_proj", 4096 + 4096 + 2 * 1024),
    ("save_out_proj", 4096 + 4096),
    ("minimal_offloaded", 4096),
    ("none", 4096),
  ],
)
def test_other_policies_keep_what_they_name(policy: str, width: int):
  model = Decoder(**{**vars(LLAMA_8B), "remat_policy": policy})
  assert memory.saved_bytes(model, Share(tokens=10, length=10, logits=1)) == 32 * 10 * width * 2


def test_a_custom_policy_keeps_what_it_is_told():
  model = Decoder(**{**vars(LLAMA_8B), "remat_policy": "custom", "kept": frozenset({"decoder_layer_input", "mlpwi_0"})})
  # Two devices share the feed-forward layer.
  assert memory.saved_bytes(model, Share(10, 10, 1, tensor=2)) == 32 * 10 * (4096 + 14336 // 2) * 2


def test_a_cache_of_llama_takes_128_kib_a_token():
  share = Share(tokens=4, length=1024, logits=4)
  assert memory.cache_bytes(LLAMA_8B, share) == 4 * 1024 * 128 * 1024
  assert memory.cache_bytes(LLAMA_8B, Share(4, 1024, 4, tensor=4)) == 1024 * 128 * 1024


def test_logits():
  share = Share(tokens=1024, length=512, logits=256)
  head = 1024 * 4096
  # In bfloat16 as they come, float32, and the gradient in float32.
  assert memory.logit_bytes(LLAMA_8B, share) == 256 * 128256 * (2 + 4 + 4) + head * (2 + 4)
  assert memory.logit_bytes(LLAMA_8B, share, gradient=False) == 256 * 128256 * (2 + 4) + head * 2


def test_attention_that_holds_its_scores_needs_them():
  share = Share(tokens=1024, length=512, logits=1)
  scores = Decoder(**{**vars(LLAMA_8B), "scores": True})
  assert memory.layer_bytes(scores, share) - memory.layer_bytes(LLAMA_8B, share) == 3 * 1024 * 32 * 512 * 4


def test_only_spread_weights_are_gathered():
  model = Decoder(**{**vars(LLAMA_8B), "layers": 2})
  params = {
    "decoder": {"layers": {"kernel": spread((64, 2, 32), "fsdp"), "scale": spread((64, 2))}},
    "embedding": spread((1000, 64), None, "fsdp"),
    "head": spread((64, 900), "fsdp"),
  }
  assert memory.gathered_bytes(params, model) == 3 * 64 * 32 * 2 + 64_000 * (2 + 4)
  assert memory.gathered_bytes({"decoder": {"layers": {"scale": spread((64, 2))}}}, model) == 0


def test_the_worst_moment_counts():
  held = {"weights": 10, "optimizer": 20}
  assert MemoryEstimate(held, {"gradients": 10}, {"keys and values": 3, "logits": 4}).total == 40
  in_rollout = MemoryEstimate(held, {"gradients": 10}, {"keys and values": 30})
  assert in_rollout.total == 60
  assert dict(in_rollout.worst) == {**held, "keys and values": 30}


def device(platform: str, kind: str, stats: dict[str, int] | None) -> Any:
  return SimpleNamespace(platform=platform, device_kind=kind, memory_stats=lambda: stats)


def test_a_devices_memory():
  assert memory.device_memory(device("cpu", "cpu", {"bytes_limit": 5})) is None
  assert memory.device_memory(device("gpu", "NVIDIA H200", {"bytes_limit": 100 * GIB})) == 100 * GIB
  assert memory.device_memory(device("tpu", "TPU v6 lite", None)) == int(31.25 * GIB)
  assert memory.device_memory(device("tpu", "TPU v99", None)) is None


def maxtext(**keys: Any) -> Any:
  defaults = {
    "num_vocab_tiling": 1,
    "quantization": "",
    "remat_policy": "full",
    "lora": SimpleNamespace(enable_lora=False),
  }
  return SimpleNamespace(**{**defaults, **keys})


def config(check: str) -> Any:
  return SimpleNamespace(memory_check=check)


ESTIMATE = MemoryEstimate(
  {"weights": 4 * GIB, "optimizer": 8 * GIB, "reference": 4 * GIB},
  {"gradients": 4 * GIB, "activations at work": 16 * GIB},
)


def test_a_run_that_does_not_fit_is_refused_in_one_line():
  fit = Fit(ESTIMATE, 32 * GIB)
  with pytest.raises(ConfigError) as refused:
    check_fit(config("error"), maxtext(), fit)
  line = str(refused.value)
  assert "\n" not in line
  assert "needs about 36.0 GiB on each device, which has 32.0 GiB" in line
  for part in ("weights 4.0 GiB", "reference 4.0 GiB", "num_vocab_tiling=8", "per_device_batch_size", "rl.grpo_beta=0"):
    assert part in line
  assert line.endswith("memory_check=warn runs it all the same")
  # A batch of nothing would not help where the state alone is too large.
  with pytest.raises(ConfigError) as refused:
    check_fit(config("error"), maxtext(), Fit(ESTIMATE, 18 * GIB))
  assert "per_device_batch_size" not in str(refused.value)
  assert "lora.enable_lora=true" in str(refused.value)
  assert "more devices" in str(refused.value)


def test_the_refusal_can_be_turned_off(capsys: pytest.CaptureFixture[str]):
  check_fit(config("warn"), maxtext(), Fit(ESTIMATE, 32 * GIB))
  assert "warning: memory: the run needs about 36.0 GiB" in capsys.readouterr().out
  check_fit(config("off"), maxtext(), Fit(ESTIMATE, 32 * GIB))
  for limit in (36 * GIB, None):
    check_fit(config("error"), maxtext(), Fit(ESTIMATE, limit))
  assert not capsys.readouterr().out
