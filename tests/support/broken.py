"""Checkpoints of a tiny model as pre-training writes them, and the same with one thing wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

Tree = dict[str, Any]
Answers = tuple[str, str, str | None]

STEP = 3


def adamw_items(step: int = STEP) -> Tree:
  """A small `items` tree with AdamW, by hand: the module paths are a scanned MaxText model's."""
  f32 = np.dtype(np.float32)

  def weights() -> Tree:
    return {
      "token_embedder": {"embedding": jax.ShapeDtypeStruct((8, 4), f32)},
      "decoder": {
        "decoder_norm": {"scale": jax.ShapeDtypeStruct((4,), f32)},
        "layers": {"mlp": {"wi_0": {"kernel": jax.ShapeDtypeStruct((4, 2, 6), f32)}}},
      },
    }

  def count() -> Any:
    return jax.ShapeDtypeStruct((), np.dtype(np.int32))

  def rngs(*shape: int) -> Tree:
    kind = np.dtype(np.uint32)
    return {"params": {"count": jax.ShapeDtypeStruct(shape, kind), "key": jax.ShapeDtypeStruct((*shape, 4), kind)}}

  abstract = {
    "params": {"params": weights()},
    "opt_state": [
      {"count": count(), "mu": {"params": weights()}, "nu": {"params": weights()}},
      None,
      {"count": count()},
    ],
    "step": count(),
    "nnx_aux": {"model": {"decoder": {"rngs": rngs(), "layers": {"self_attention": {"rngs": rngs(2)}}}}},
  }
  return concrete(abstract, step=step)


def concrete(abstract: Any, *, step: int = STEP, seed: int = 0) -> Any:
  """Arrays for an abstract `items` tree: small random numbers, counts and steps as after `step` updates."""
  rng = np.random.default_rng(seed)

  def make(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
      return rng.integers(0, 2**32, words.shape, np.uint32)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
      return np.full(leaf.shape, step, leaf.dtype)
    return (0.02 * rng.random(leaf.shape)).astype(leaf.dtype)

  return jax.tree.map(make, abstract)


def write_step(folder: Path, items: Any, metadata: Mapping[str, Any] | None = None, **others: Any) -> Path:
  """Writes one step's folder with Orbax; returns it."""
  ocp.save_checkpointables(folder, {"items": items, **others}, custom_metadata=dict(metadata or {}))
  return folder


def _without_params_level(state: Tree) -> Tree:
  return {key: value["params"] if key in ("mu", "nu") else value for key, value in state.items()}


def _map_keys(tree: Any, change: Callable[[np.ndarray], Any]) -> Any:
  return {
    key: _map_keys(child, change) if isinstance(child, dict) else change(child) if key == "key" else child
    for key, child in tree.items()
  }


def _edit(change: Callable[[Tree], Any]) -> Callable[[Tree], Tree]:
  def edited(tree: Tree) -> Tree:
    tree = copy.deepcopy(tree)
    change(tree)
    return tree

  return edited


def _set(**parts: Callable[[Tree], Any]) -> Callable[[Tree], Tree]:
  return _edit(lambda tree: tree.update({key: make(tree) for key, make in parts.items()}))


def _drop(*names: str) -> Callable[[Tree], Tree]:
  return _edit(lambda tree: [tree.pop(name) for name in names])


def _boxed(tree: Any) -> Any:
  return {key: _boxed(child) for key, child in tree.items()} if isinstance(tree, dict) else {"value": tree}


def _adam(tree: Tree) -> Tree:
  return tree["opt_state"][0]


def _schedule(tree: Tree) -> Tree:
  return tree["opt_state"][2]


EDITS: dict[str, Callable[[Tree], Tree]] = {
  "intact": _set(),
  "keys of two words": _set(nnx_aux=lambda tree: _map_keys(tree["nnx_aux"], lambda key: key[..., :2])),
  "no rng state": _drop("nnx_aux"),
  "clip in the chain": _set(opt_state=lambda tree: [None, [_without_params_level(_adam(tree)), None, _schedule(tree)]]),
  "clip in the chain, as dicts": _set(
    opt_state=lambda tree: [None, {"0": _without_params_level(_adam(tree)), "2": _schedule(tree)}]
  ),
  "flat clip": _set(opt_state=lambda tree: [None, *tree["opt_state"]]),
  "list too short": _set(opt_state=lambda tree: tree["opt_state"][:1]),
  "no schedule count": _set(opt_state=lambda tree: [_adam(tree), None, None]),
  "list too long": _set(opt_state=lambda tree: [*tree["opt_state"], {"count": _schedule(tree)["count"]}]),
  "dict for a list": _set(opt_state=lambda tree: {"0": _adam(tree), "2": _schedule(tree)}),
  "no adam count": _edit(lambda tree: _adam(tree).pop("count")),
  "no nu": _edit(lambda tree: _adam(tree).pop("nu")),
  "moments without params": _set(opt_state=lambda tree: [_without_params_level(_adam(tree)), None, _schedule(tree)]),
  "moments behind the adapter": _set(
    opt_state=lambda tree: [
      {
        "count": _adam(tree)["count"],
        **{name: {"params": {"base": _adam(tree)[name]["params"]}} for name in ("mu", "nu")},
      },
      None,
      _schedule(tree),
    ]
  ),
  "moments of another shape": _edit(
    lambda tree: _adam(tree)["mu"]["params"]["token_embedder"].update(embedding=np.zeros((3, 5), np.float32))
  ),
  "no optimizer": _drop("opt_state", "step"),
  "no opt_state": _drop("opt_state"),
  "no step": _drop("step"),
  "step uint32": _set(step=lambda tree: tree["step"].astype(np.uint32)),
  "step float": _set(step=lambda tree: tree["step"].astype(np.float32)),
  "step vector": _set(step=lambda tree: tree["step"].reshape(1)),
  "adapter level": _set(params=lambda tree: {"params": {"base": tree["params"]["params"]}}),
  "no params collection": _set(params=lambda tree: tree["params"]["params"]),
  "boxed weights": _set(params=lambda tree: {"params": _boxed(tree["params"]["params"])}),
  "missing weight": _edit(lambda tree: tree["params"]["params"].pop("token_embedder")),
  "MultiSteps": _set(
    opt_state=lambda tree: {
      "mini_step": np.zeros((), np.int32),
      "gradient_step": np.full((), STEP, np.int32),
      "acc_grads": tree["params"]["params"],
      "inner_opt_state": {"0": _without_params_level(_adam(tree)), "2": _schedule(tree)},
    }
  ),
  "inject_hyperparams": _set(
    opt_state=lambda tree: {
      "count": np.full((), STEP, np.int32),
      "hyperparams": {"learning_rate": np.full((), 1e-3, np.float32)},
      "hyperparams_states": {"learning_rate": {"count": np.full((), STEP, np.int32)}},
      "inner_state": {"0": _without_params_level(_adam(tree))},
    }
  ),
  "weights alone": _drop("opt_state", "step", "nnx_aux"),
}


ANSWERS: dict[str, Answers] = {
  "intact": ("yes", "yes", None),
  "keys of two words": ("no", "yes", "rng_keys"),
  "no rng state": ("yes", "yes", "no_rng_state"),
  "clip in the chain": ("no", "yes", "chain_level"),
  "clip in the chain, as dicts": ("no", "yes", "chain_level"),
  "flat clip": ("no", "yes", "chain_level"),
  "list too short": ("no", "yes", "list_too_short"),
  "no schedule count": ("no", "yes", "no_schedule_count"),
  "list too long": ("no", "yes", "list_too_long"),
  "dict for a list": ("no", "yes", "dict_for_list"),
  "no adam count": ("partly", "yes", "no_count"),
  "no nu": ("partly", "yes", "no_nu"),
  "moments without params": ("partly", "yes", "moments_level"),
  "moments behind the adapter": ("partly", "yes", "moments_adapter"),
  "moments of another shape": ("no", "yes", "moments_shape"),
  "no optimizer": ("partly", "yes", "no_optimizer"),
  "no opt_state": ("partly", "yes", "no_optimizer"),
  "no step": ("partly", "yes", "no_step"),
  "step uint32": ("yes", "yes", None),
  "step float": ("yes", "yes", "step_dtype"),
  "step vector": ("no", "yes", "step_shape"),
  "adapter level": ("no", "no", "adapter_level"),
  "no params collection": ("no", "no", "no_params_level"),
  "boxed weights": ("no", "no", "boxed"),
  "missing weight": ("no", "no", "weights_missing"),
  "MultiSteps": ("no", "yes", "multi_steps"),
  "inject_hyperparams": ("no", "yes", "inject_hyperparams"),
  "weights alone": ("partly", "yes", "no_optimizer"),
}
"""For each edit what real pre-training does: with everything (by the run's name or `load_full_state_path`), with the
weights alone, and the finding that says so. The first two were seen with MaxText 0.2.5, every one of them."""
