"""MaxText's models with adapters: which modules have one, what they compute, their gradients."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtext_posttrain import maxtext_api, maxtext_lora
from maxtext_posttrain.config import load_config
from maxtext_posttrain.errors import ConfigError
from maxtext_posttrain.lora.kernels import adapted_kernels, merged_kernel, stacked_axis
from maxtext_posttrain.trainers.base import absolute_paths
from tests.support import lora, runs

pytestmark = pytest.mark.slow


def configured(folder: Path, *extra: str) -> Any:
  maxtext_api.quiet_logs(show=False)
  maxtext_api.use_pretraining_prng()
  argv = runs.arguments(folder, "run", "steps=1", "lora_fresh_base=true", *lora.LORA, *extra)
  return maxtext_api.build_config(absolute_paths(load_config(argv).maxtext_overrides()))


def by_path(model: nnx.Module, kind: Any) -> dict[tuple, Any]:
  return {tuple(path): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model, kind))}


class Adapted:
  """A base model, and the same with an adapter that is not zero."""

  def __init__(self, config: Any):
    self.config, self.plain = config, maxtext_lora.without_lora(config)
    self.mesh = maxtext_api.build_mesh(config)
    states = maxtext_lora.lora_states(config, self.mesh)
    base = maxtext_api.init_model(self.plain, states.base, self.mesh)
    self.kernels = {path: np.asarray(leaf) for path, leaf in by_path(base, nnx.Param).items()}
    self.base_logits = lora.logits(self.plain, self.mesh, base)
    self.model = maxtext_lora.adapt(config, self.mesh, states, base)
    self.fresh_logits = lora.logits(config, self.mesh, self.model)
    keys = iter(jax.random.split(jax.random.key(1), 1000))
    adapter = jax.tree.map(
      lambda leaf: leaf + 0.05 * jax.random.normal(next(keys), leaf.shape, leaf.dtype),
      nnx.state(self.model, nnx.LoRAParam),
    )
    nnx.update(self.model, adapter)

  def base_with(self, weights: dict[tuple, Any]) -> nnx.Module:
    base = maxtext_api.init_model(self.plain, maxtext_api.pretraining_state(self.plain, self.mesh), self.mesh)
    flat = [(path, leaf.replace(jnp.asarray(weights[tuple(path)]))) for path, leaf in params(base)]
    nnx.update(base, nnx.from_flat_state(flat))
    return base


def params(model: nnx.Module) -> Any:
  return nnx.to_flat_state(nnx.state(model, nnx.Param))


@pytest.fixture(scope="module", params=["scan_layers=true", "scan_layers=false"], ids=["scanned", "unscanned"])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
  return Adapted(configured(tmp_path_factory.mktemp("adapted"), request.param))


def test_a_fresh_adapter_changes_nothing(adapted: Adapted) -> None:
  np.testing.assert_array_equal(adapted.fresh_logits, adapted.base_logits)


def test_with_the_adapter_off_it_is_the_base(adapted: Adapted) -> None:
  config, mesh, model = adapted.config, adapted.mesh, adapted.model
  changed = lora.logits(config, mesh, model)
  assert np.abs(changed - adapted.base_logits).max() > 0.05
  off = lora.logits(config, mesh, model, lambda model: maxtext_lora.without_adapter(config, model))
  np.testing.assert_array_equal(off, adapted.base_logits)
  np.testing.assert_array_equal(lora.logits(config, mesh, model), changed)


def test_merged_weights_compute_the_same(adapted: Adapted) -> None:
  scale = lora.ALPHA / lora.RANK
  merged = dict(adapted.kernels)
  for path, a, b in adapted_kernels(by_path(adapted.model, nnx.LoRAParam)):
    merged[path] = merged_kernel(merged[path], np.asarray(a), np.asarray(b), scale=scale, axis=stacked_axis(path, 1))
  computed = lora.logits(adapted.plain, adapted.mesh, adapted.base_with(merged))
  np.testing.assert_allclose(computed, lora.logits(adapted.config, adapted.mesh, adapted.model), rtol=0, atol=1e-5)


def merged_in_memory(adapted: Adapted) -> np.ndarray:
  """Logits of the base model with the live model's adapter folded in."""
  base = maxtext_api.init_model(adapted.plain, maxtext_api.pretraining_state(adapted.plain, adapted.mesh), adapted.mesh)
  graphdef, state = nnx.split(adapted.model)
  wanted = nnx.state(base, nnx.Param)
  merge = jax.jit(lambda state: maxtext_lora.merged_state(adapted.config, wanted, nnx.merge(graphdef, state)))
  nnx.update(base, merge(state))
  return lora.logits(adapted.plain, adapted.mesh, base)


def test_the_live_model_can_be_merged_for_an_engine(adapted: Adapted) -> None:
  want = lora.logits(adapted.config, adapted.mesh, adapted.model)
  np.testing.assert_allclose(merged_in_memory(adapted), want, rtol=0, atol=1e-5)


def test_gradients_follow_from_those_of_the_merged_weights(adapted: Adapted) -> None:
  """dL/dA = s · dL/dW Bᵀ and dL/dB = s · Aᵀ dL/dW, with dL/dW of the merged model; and numerically."""
  config, mesh, scale = adapted.config, adapted.mesh, lora.ALPHA / lora.RANK
  batch = lora.random_batch(config.vocab_size)
  weights = jax.random.normal(jax.random.key(2), adapted.base_logits.shape)

  def loss_of(config: Any, model: nnx.Module, kind: Any) -> tuple[Any, nnx.State]:
    graphdef, state, rest = nnx.split(model, kind, ...)

    def loss(state: nnx.State) -> jax.Array:
      model = nnx.merge(graphdef, state, rest, copy=True)
      return jnp.mean(maxtext_api.forward(config, model, batch, is_train=False) * weights)

    return jax.jit(loss), state

  adapter = by_path(adapted.model, nnx.LoRAParam)
  merged = dict(adapted.kernels)
  for path, a, b in adapted_kernels(adapter):
    merged[path] = merged_kernel(merged[path], np.asarray(a), np.asarray(b), scale=scale, axis=stacked_axis(path, 1))
  with maxtext_api.mesh_context(config, mesh):
    plain_loss, plain_state = loss_of(adapted.plain, adapted.base_with(merged), nnx.Param)
    of_weights = {
      tuple(path): leaf.get_value() for path, leaf in nnx.to_flat_state(jax.jit(jax.grad(plain_loss))(plain_state))
    }
    loss, state = loss_of(config, adapted.model, nnx.LoRAParam)
    gradient = jax.jit(jax.grad(loss))(state)
    direction = jax.tree.map(lambda leaf: jnp.sign(leaf), gradient)
    step = 1e-3
    higher, lower = (
      float(loss(jax.tree.map(lambda leaf, way, sign=sign: leaf + sign * step * way, state, direction)))
      for sign in (1, -1)
    )
  slope = sum(float(jnp.sum(jnp.abs(leaf))) for leaf in jax.tree.leaves(gradient))
  assert (higher - lower) / (2 * step) == pytest.approx(slope, rel=2e-2)
  found = {tuple(path): np.asarray(leaf.get_value(), np.float64) for path, leaf in nnx.to_flat_state(gradient)}
  for path, a, b in adapted_kernels(adapter):
    axis = stacked_axis(path, 1)
    a, b, of_w = (np.asarray(array, np.float64) for array in (a, b, of_weights[path]))
    if axis is not None:
      a, b, of_w = (np.moveaxis(array, axis, 0) for array in (a, b, of_w))
    of_w = of_w.reshape(*a.shape[:-1], b.shape[-1])
    wanted = {
      "kernel_lora_a": scale * of_w @ np.swapaxes(b, -1, -2),
      "kernel_lora_b": scale * np.swapaxes(a, -1, -2) @ of_w,
    }
    for name, want in wanted.items():
      have = found[*path[:-1], name]
      have = have if axis is None else np.moveaxis(have, axis, 0)
      np.testing.assert_allclose(have, want, rtol=1e-3, atol=1e-5 * np.abs(want).max() + 1e-9, err_msg=str(path))


def test_a_quantised_base_with_its_adapter_off(tmp_path: Path) -> None:
  """It computes with the dequantised kernels, which are near the base's and the same for every adapter."""
  config = configured(tmp_path, "lora.lora_weight_qtype=nf4", "lora.lora_tile_size=16")
  adapted = Adapted(config)
  off = lora.logits(config, adapted.mesh, adapted.model, lambda model: maxtext_lora.without_adapter(config, model))
  np.testing.assert_array_equal(off, adapted.fresh_logits)
  assert 0 < np.abs(off - adapted.base_logits).max() < 3.0
  want = lora.logits(config, adapted.mesh, adapted.model)
  np.testing.assert_allclose(merged_in_memory(adapted), want, rtol=0, atol=1e-4)


def test_the_computation_in_bfloat16_stays_in_bfloat16(tmp_path: Path) -> None:
  config = configured(tmp_path, "dtype=bfloat16")
  adapted = Adapted(config)
  np.testing.assert_array_equal(adapted.fresh_logits, adapted.base_logits)
  assert {leaf.dtype for leaf in by_path(adapted.model, nnx.LoRAParam).values()} == {np.dtype(np.float32)}


GEMMA = ("sliding_window_size=8",)
GEMMA3 = (
  *GEMMA,
  "model_name=gemma3-4b",
  "base_num_decoder_layers=8",
  "use_multimodal=false",
  "local_rope_max_timescale=10000",
)


@pytest.mark.parametrize("scan_layers", ["true", "false"])
@pytest.mark.parametrize(
  ("block", "layers", "keys"),
  [
    ("llama2", 2, ()),
    ("mistral", 2, ()),
    ("qwen2", 2, ("attention_bias=true",)),
    ("qwen3", 2, ("use_qk_norm=true",)),
    ("gemma", 2, ()),
    ("gemma2", 4, GEMMA),
    ("gemma3", 8, GEMMA3),
  ],
)
def test_every_dense_kernel_of_every_layer_has_an_adapter(
  block: str, layers: int, keys: tuple[str, ...], scan_layers: str, tmp_path: Path
) -> None:
  config = configured(tmp_path, f"decoder_block={block}", f"scan_layers={scan_layers}", *keys)
  states = maxtext_lora.lora_states(config, maxtext_api.build_mesh(config))
  emb, heads, kv, head, mlp, rank = 32, 4, 2, 16, 64, lora.RANK
  one_layer = [(emb, heads * head), (emb, kv * head), (emb, kv * head), (heads * head, emb)]
  one_layer += [(emb, mlp), (emb, mlp), (mlp, emb)]
  wanted = layers * sum(rank * (inputs + outputs) for inputs, outputs in one_layer)
  sizes = [math.prod(leaf.shape) for leaf in by_path(states.run.abstract_model, nnx.LoRAParam).values()]
  assert sum(sizes) == wanted
  moments = jax.tree.leaves(states.run.opt_state[0].mu)
  assert sum(math.prod(leaf.shape) for leaf in moments) == wanted


@pytest.mark.parametrize(
  ("keys", "says"),
  [
    (["lora.lora_module_path=decoder/none"], "matches no module with a kernel; there are decoder/layers/mlp/wi_0"),
    (["decoder_block=gpt3"], "decoder_block=gpt3 has no adapters here; known are llama2"),
    (["quantization=int8"], "quantization=int8 does not go with adapters"),
    (["lora.lora_weight_qtype=int8", "lora.lora_tile_size=7"], "Qwix can't adapt the model"),
  ],
)
def test_what_cannot_be_adapted_is_named(keys: list[str], says: str, tmp_path: Path) -> None:
  config = configured(tmp_path, *keys)
  with pytest.raises(ConfigError, match=says) as error:
    maxtext_lora.lora_states(config, maxtext_api.build_mesh(config))
  assert "\n" not in str(error.value)
