"""Loss and gradients of one batch against transformers, and packed against unpacked, accumulated against at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.config import load_config
from maxtext_posttrain.data import BATCH_KEYS
from maxtext_posttrain.optimizer import add_gradient_clipping
from maxtext_posttrain.trainers.objective import Batch, LossContext, LossOutput
from maxtext_posttrain.trainers.sft import SFT
from maxtext_posttrain.trainers.train_step import StepSettings, make_train_step
from tests.support import runs

pytestmark = pytest.mark.slow

REFERENCE = Path(__file__).resolve().parents[1] / "data" / "transformers_llama.npz"
HEAD_DIM = 8
LAYERS = 2


@pytest.fixture(scope="module")
def reference() -> Mapping[str, np.ndarray]:
  with np.load(REFERENCE) as arrays:
    return dict(arrays)


class Model:
  """The tiny Llama of the reference as a MaxText model, with the SFT objective on it."""

  def __init__(self, folder: Path, *extra: str):
    argv = runs.arguments(
      folder,
      "numbers",
      "steps=10",
      "vocab_size=48",
      "base_emb_dim=32",
      "base_mlp_dim=48",
      "head_dim=8",
      f"base_num_decoder_layers={LAYERS}",
      "base_num_query_heads=4",
      "base_num_kv_heads=2",
      "normalization_layer_epsilon=1e-5",
      "matmul_precision=highest",
      *extra,
    )
    maxtext_api.use_pretraining_prng()
    self.config = maxtext_api.build_config(load_config(argv).maxtext_overrides())
    self.mesh = maxtext_api.build_mesh(self.config)
    self.pretraining = maxtext_api.pretraining_state(self.config, self.mesh)
    self.model = maxtext_api.init_model(self.config, self.pretraining, self.mesh)
    self.objective = SFT()

  def _loss(self, model: nnx.Module, batch: Batch, step: jax.Array, is_train: bool) -> LossOutput:
    return self.objective.loss(model, batch, LossContext(None, self.config, step, is_train))

  def load(self, weights: Mapping[str, np.ndarray]) -> None:
    nnx.update(
      self.model, nnx.from_flat_state([(path, nnx.Param(jnp.asarray(w))) for path, w in to_maxtext(weights).items()])
    )

  def loss_and_gradients(self, batch: Mapping[str, np.ndarray]) -> tuple[float, dict[tuple, np.ndarray]]:
    graphdef, params, rest = nnx.split(self.model, nnx.Param, ...)
    arrays = {key: jnp.asarray(value) for key, value in batch.items()}

    @jax.jit
    def mean_loss(params: nnx.State) -> jax.Array:
      model = nnx.merge(graphdef, params, rest, copy=True)
      return self._loss(model, arrays, jnp.int32(0), True).loss_sum / self.objective.weight(arrays)

    with maxtext_api.mesh_context(self.config, self.mesh):
      loss, grads = jax.value_and_grad(mean_loss)(params)
    return float(loss), {tuple(path): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(grads)}

  def one_update(self, batch: Mapping[str, np.ndarray]) -> tuple[dict[str, float], dict[tuple, np.ndarray]]:
    """Metrics, and the weights after one update with the trainer's own step; batch is [micro-batches, batch, seq]."""
    tx = add_gradient_clipping(self.pretraining.tx, 0.0)
    graphdef = maxtext_api.train_state_graphdef(self.pretraining, tx)
    state = nnx.state(maxtext_api.TrainStateNNX(self.model, nnx.Optimizer(self.model, tx, wrt=nnx.Param)))
    step = make_train_step(
      graphdef,
      lambda model, frozen, batch, step, is_train: self._loss(model, batch, step, is_train),
      self.objective.weight,
      StepSettings(schedule=self.pretraining.schedule),
    )
    with maxtext_api.mesh_context(self.config, self.mesh):
      state, metrics = jax.jit(step)(state, {}, {key: jnp.asarray(value) for key, value in batch.items()})
    params = nnx.state(nnx.merge(graphdef, state).model, nnx.Param)
    return (
      {key: float(value) for key, value in metrics.items()},
      {tuple(path): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(params)},
    )


def to_maxtext(weights: Mapping[str, np.ndarray]) -> dict[tuple, np.ndarray]:
  """A HuggingFace Llama as MaxText's scanned tree; linear, so gradients go the same way but for the query's scale."""

  def heads(name: str, layer: int) -> np.ndarray:
    weight = weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
    return weight.T.reshape(weight.shape[1], -1, HEAD_DIM)

  def stack(make: Any, axis: int = 1) -> np.ndarray:
    return np.stack([make(layer) for layer in range(LAYERS)], axis=axis)

  def linear(name: str) -> np.ndarray:
    return stack(lambda layer: weights[f"model.layers.{layer}.{name}.weight"].T)

  attention = ("decoder", "layers", "self_attention")
  return {
    ("token_embedder", "embedding"): weights["model.embed_tokens.weight"],
    ("decoder", "decoder_norm", "scale"): weights["model.norm.weight"],
    ("decoder", "logits_dense", "kernel"): weights["lm_head.weight"].T,
    (*attention, "query", "kernel"): stack(lambda layer: heads("q", layer) / np.float32(np.sqrt(HEAD_DIM))),
    (*attention, "key", "kernel"): stack(lambda layer: heads("k", layer)),
    (*attention, "value", "kernel"): stack(lambda layer: heads("v", layer)),
    (*attention, "out", "kernel"): stack(
      lambda layer: weights[f"model.layers.{layer}.self_attn.o_proj.weight"].T.reshape(-1, HEAD_DIM, 32)
    ),
    ("decoder", "layers", "mlp", "wi_0", "kernel"): linear("mlp.gate_proj"),
    ("decoder", "layers", "mlp", "wi_1", "kernel"): linear("mlp.up_proj"),
    ("decoder", "layers", "mlp", "wo", "kernel"): linear("mlp.down_proj"),
    ("decoder", "layers", "pre_self_attention_layer_norm", "scale"): stack(
      lambda layer: weights[f"model.layers.{layer}.input_layernorm.weight"]
    ),
    ("decoder", "layers", "post_self_attention_layer_norm", "scale"): stack(
      lambda layer: weights[f"model.layers.{layer}.post_attention_layernorm.weight"]
    ),
  }


def examples(reference: Mapping[str, np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
  """Each conversation's tokens, and which of them are trained on."""
  return [
    (reference["tokens"][row, :length].astype(np.int32), reference["labels"][row, :length] >= 0)
    for row, length in enumerate(reference["lengths"])
  ]


def rows(packs: list[list[tuple[np.ndarray, np.ndarray]]], seq: int) -> dict[str, np.ndarray]:
  """[rows, seq] batch: each pack's examples one after the other, as the data room lays them out."""
  batch = {key: np.zeros((len(packs), seq), np.int32) for key in BATCH_KEYS}
  for row, pack in enumerate(packs):
    start = 0
    for segment, (tokens, trained) in enumerate(pack, 1):
      span = slice(start, start + len(tokens) - 1)
      batch["inputs"][row, span] = tokens[:-1]
      batch["targets"][row, span] = tokens[1:]
      for key in ("inputs_position", "targets_position"):
        batch[key][row, span] = np.arange(len(tokens) - 1)
      batch["inputs_segmentation"][row, span] = segment
      batch["targets_segmentation"][row, span] = np.where(trained[1:], segment, 0)
      start += len(tokens) - 1
  return batch


def relative_difference(have: np.ndarray, want: np.ndarray) -> float:
  return float(np.linalg.norm(have.astype(np.float64) - want) / np.linalg.norm(want.astype(np.float64)))


def test_loss_and_gradients_equal_transformers(reference: Mapping[str, np.ndarray], tmp_path: Path):
  model = Model(tmp_path)
  model.load({name.removeprefix("weight/"): w for name, w in reference.items() if name.startswith("weight/")})
  loss, grads = model.loss_and_gradients(rows([[example] for example in examples(reference)], 32))
  assert loss == pytest.approx(float(reference["loss"]), rel=1e-5)
  expected = to_maxtext({name.removeprefix("grad/"): g for name, g in reference.items() if name.startswith("grad/")})
  # The query's kernel is the weight over √head_dim, so its gradient is the weight's times √head_dim.
  expected["decoder", "layers", "self_attention", "query", "kernel"] *= HEAD_DIM
  assert set(grads) == set(expected)
  for path, gradient in expected.items():
    assert relative_difference(grads[path], gradient) < 1e-5, path


def test_packing_changes_nothing(reference: Mapping[str, np.ndarray], tmp_path: Path):
  model = Model(tmp_path)
  first, second, third = examples(reference)
  loss, grads = model.loss_and_gradients(rows([[first], [second], [third]], 32))
  packed_loss, packed_grads = model.loss_and_gradients(rows([[second, third, first], [], []], 32))
  assert packed_loss == pytest.approx(loss, rel=1e-6)
  for path, gradient in grads.items():
    assert relative_difference(packed_grads[path], gradient) < 1e-5, path

  def per_token(batch: Mapping[str, np.ndarray]) -> np.ndarray:
    arrays = {key: jnp.asarray(value) for key, value in batch.items()}
    with maxtext_api.mesh_context(model.config, model.mesh):
      logits = maxtext_api.forward(model.config, model.model, arrays, is_train=False)
    return np.asarray(jax.nn.log_softmax(logits)[arrays["inputs_segmentation"] != 0])

  alone = per_token(rows([[second], [third], [first]], 32))
  np.testing.assert_allclose(per_token(rows([[second, third, first]], 32)), alone, atol=1e-6 * np.abs(alone).max())


def test_accumulation_is_the_mean_over_all_tokens_not_a_mean_of_means(
  reference: Mapping[str, np.ndarray], tmp_path: Path
):
  """Micro-batches of very different token counts, against the same batch at once; and against the loss by hand."""
  model = Model(tmp_path, "opt_type=sgd", "warmup_steps_fraction=0.0")
  model.load({name.removeprefix("weight/"): w for name, w in reference.items() if name.startswith("weight/")})
  batch = rows([[example] for example in examples(reference)], 32)
  batch["targets_segmentation"][1, 3:] = 0
  at_once = {key: value[None] for key, value in batch.items()}
  accumulated = {key: value[:, None] for key, value in batch.items()}
  metrics, weights = model.one_update(at_once)
  accumulated_metrics, accumulated_weights = model.one_update(accumulated)
  for key in ("loss", "grad_norm", "weight", "tokens"):
    assert accumulated_metrics[key] == pytest.approx(metrics[key], rel=1e-6), key
  for path, weight in weights.items():
    assert relative_difference(accumulated_weights[path], weight) < 1e-6, path

  logits = reference["logits"].astype(np.float64)
  log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  trained = batch["targets_segmentation"][:, :11] != 0
  losses = -np.take_along_axis(log_probs[:, :11], batch["targets"][:, :11, None], -1)[..., 0]
  assert metrics["loss"] == pytest.approx((losses * trained).sum() / trained.sum(), rel=1e-5)
  means = [(losses[row] * trained[row]).sum() / trained[row].sum() for row in range(3)]
  assert metrics["loss"] != pytest.approx(np.mean(means), rel=1e-3)


def test_a_batch_that_trains_nothing_moves_nothing(reference: Mapping[str, np.ndarray], tmp_path: Path):
  model = Model(tmp_path, "opt_type=sgd")
  before = {
    tuple(path): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(nnx.state(model.model, nnx.Param))
  }
  batch = rows([[example] for example in examples(reference)], 32)
  batch["targets_segmentation"][:] = 0
  metrics, after = model.one_update({key: value[None] for key, value in batch.items()})
  assert metrics["loss"] == 0.0
  assert metrics["grad_norm"] == 0.0
  assert metrics["finite"]
  for path, weight in before.items():
    np.testing.assert_array_equal(after[path], weight)
