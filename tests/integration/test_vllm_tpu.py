"""vLLM on TPUs, which can't run here: its runner and tpu_inference are stand-ins, Tunix's and MaxText's samplers real.

What is shown: what vLLM would be started with, and that every weight of the trainer reaches its place in vLLM's model.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtext_posttrain import maxtext_decoding
from maxtext_posttrain.errors import GenerationError
from maxtext_posttrain.rollout.vllm_settings import VllmSettings
from maxtext_posttrain.rollout.vllm_tpu import TpuVllmEngine
from maxtext_posttrain.rollout.weights import by_path, model_weights
from tests.support.generation import CONTEXT, TinyModel

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


class Anything:
  """Takes whatever it is called with, and has whatever it is asked for."""

  def __init__(self, *_: Any, **__: Any):
    pass

  def __call__(self, *_: Any, **__: Any) -> Anything:
    return self

  def __getattr__(self, name: str) -> Anything:
    if name.startswith("__"):
      raise AttributeError(name)
    return self


class StandInModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Modules of tpu_inference, in which every name is a class: MaxText's part for vLLM imports many."""

  def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
    del path, target
    return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == "tpu_inference" else None

  def exec_module(self, module: ModuleType) -> None:
    def name_of(name: str) -> type:
      if name.startswith("__"):
        raise AttributeError(name)
      return type(name, (Anything,), {})

    module.__dict__["__getattr__"] = name_of


class StandIn:
  """vLLM's `LLM` beside tpu_inference, as far as a sampler touches it."""

  def __init__(self, state: nnx.State, **arguments: Any):
    self.arguments = arguments
    self.calls: list[str] = []
    runner = SimpleNamespace(state=state)
    worker = SimpleNamespace(model_runner=runner)
    self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

  def reset_prefix_cache(self) -> bool:
    self.calls.append("reset_prefix_cache")
    return True

  def collective_rpc(self, name: str) -> None:
    self.calls.append(name)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
  return TinyModel.build(tmp_path_factory.mktemp("tiny"), "base_num_decoder_layers=3")


@pytest.fixture
def state(tiny: TinyModel) -> nnx.State:
  """Of vLLM's model: layers apart, zeros."""
  apart = maxtext_decoding.decoding_model(maxtext_decoding.inference_config(tiny.config, "tpu"), tiny.mesh)
  sharding = jax.sharding.NamedSharding(tiny.mesh, jax.sharding.PartitionSpec())
  return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=sharding), model_weights(apart))


@pytest.fixture
def engine(tiny: TinyModel, state: nnx.State, monkeypatch: pytest.MonkeyPatch) -> Iterator[TpuVllmEngine]:
  import vllm.config  # noqa: F401  # pyright: ignore[reportMissingImports]  # before there is a tpu_inference for it

  monkeypatch.setattr(sys, "meta_path", [StandInModules(), *sys.meta_path])
  from maxtext.integration.vllm import maxtext_vllm_adapter
  from tunix.generate import vllm_sampler

  monkeypatch.setattr(vllm_sampler, "LLM", lambda **arguments: StandIn(state, **arguments))
  monkeypatch.setattr(maxtext_vllm_adapter, "register", lambda config: None)
  settings = VllmSettings({"gpu_memory_utilization": 0.4, "additional_config": {"seen": 1}})
  engine = TpuVllmEngine(
    tiny.config, mesh=tiny.mesh, settings=settings, platform="tpu", filters=False, max_context=CONTEXT, max_batch=8
  )
  yield engine
  engine.close()


def test_vllm_is_started_with_maxtexts_model_on_the_trainers_devices(engine: TpuVllmEngine, tiny: TinyModel):
  said = engine._llm.arguments
  assert said["hf_overrides"] == {"architectures": ["MaxTextForCausalLM"]}
  assert said["gpu_memory_utilization"] == 0.4
  assert said["tensor_parallel_size"] == tiny.mesh.size
  assert said["max_model_len"] == CONTEXT
  assert said["trust_remote_code"] is False
  additional = said["additional_config"]
  assert additional["seen"] == 1
  assert additional["maxtext_config"]["base_emb_dim"] == tiny.config.emb_dim
  assert additional["maxtext_config"]["base_num_decoder_layers"] == 3


def test_every_weight_reaches_its_place(engine: TpuVllmEngine, tiny: TinyModel, state: nnx.State):
  weights = model_weights(tiny.model)
  engine.load(weights)
  held = by_path(weights)
  for path, got in by_path(nnx.filter_state(state, nnx.Param)).items():
    layer = str(path[1]).removeprefix("layers_")
    if layer.isdecimal() and path[0] == "decoder":
      axis = tiny.config.param_scan_axis
      whole = np.asarray(held["decoder", "layers", *path[2:]])
      want = np.take(whole, int(layer), axis=axis)
    else:
      want = np.asarray(held[path])
    np.testing.assert_array_equal(np.asarray(got), want, err_msg=str(path))
  assert engine._llm.calls == ["reset_prefix_cache", "delete_kv_cache", "reinitialize_kv_cache", "reset_prefix_cache"]


def test_a_model_with_another_layer_is_refused(engine: TpuVllmEngine, tiny: TinyModel, state: nnx.State):
  state["decoder"]["layers_3"] = state["decoder"]["layers_0"]
  with pytest.raises(GenerationError, match=r"does not take the weights: .*at random initialization"):
    engine.load(model_weights(tiny.model))


def test_top_k_is_refused(tiny: TinyModel):
  with pytest.raises(GenerationError, match="after top-k and top-p"):
    TpuVllmEngine(tiny.config, mesh=tiny.mesh, settings=VllmSettings(), platform="tpu", filters=True)
