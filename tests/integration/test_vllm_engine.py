"""Real vLLM against the native engine and the trainer's forward: tokens, log-probabilities, seeds, new weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.config import load_config
from maxtext_posttrain.errors import ConfigError, GenerationError, ModelError
from maxtext_posttrain.rollout.native import NativeEngine
from maxtext_posttrain.rollout.options import Completion, SamplingOptions
from maxtext_posttrain.rollout.vllm_engine import VllmEngine
from maxtext_posttrain.rollout.vllm_settings import VllmSettings
from maxtext_posttrain.rollout.weights import model_weights
from tests.support import runs
from tests.support.generation import CONTEXT, TinyModel

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

# vLLM's attention on the CPU takes no heads narrower than 32.
MODELS = {
  "llama, scanned": ("head_dim=32", "base_num_decoder_layers=3"),
  "llama 3.1, no filters": ("head_dim=32", "rope_type=llama3.1", "scan_layers=false"),
  "qwen3, tied": (
    "head_dim=32",
    "decoder_block=qwen3",
    "use_qk_norm=true",
    "logits_via_embedding=true",
    "normalize_embedding_logits=false",
  ),
}
STOPS = tuple(range(3, 19))
"""So many that completions of every model end both ways."""
GREEDY = SamplingOptions(max_new_tokens=16, temperature=0.0)
SAMPLED = SamplingOptions(
  16, temperature=0.7, top_k=40, top_p=0.9, seed=11, stop_token_ids=STOPS, n=2, tempered_log_probs=True
)
WHOLE = SamplingOptions(16, temperature=1.3, seed=2**63, tempered_log_probs=True)
DRAW = np.random.default_rng(0)
PROMPTS = [DRAW.integers(0, 256, length).tolist() for length in DRAW.integers(1, 24, 50)]


@dataclasses.dataclass
class Engines:
  """A model with both engines."""

  tiny: TinyModel
  native: NativeEngine
  vllm: VllmEngine


def scaled(model: nnx.Module, factor: float) -> nnx.State:
  """Other weights of a model: matrices times a factor, so that its distributions are wider or narrower."""
  return jax.tree.map(lambda leaf: leaf * factor if leaf.ndim > 1 else leaf, model_weights(model))


def build(folder: Path, name: str) -> Engines:
  tiny = TinyModel.build(folder, *MODELS[name])
  # Fresh weights hardly tell tokens apart.
  nnx.update(tiny.model, scaled(tiny.model, 3.0))
  vllm = VllmEngine(
    tiny.config, settings=VllmSettings(), max_context=CONTEXT, max_batch=64, filters="no filters" not in name
  )
  vllm.load(model_weights(tiny.model))
  return Engines(tiny, NativeEngine(tiny.config, tiny.mesh, tiny.model, max_context=CONTEXT), vllm)


@pytest.fixture(scope="module", params=MODELS)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
  made = build(tmp_path_factory.mktemp("tiny"), request.param)
  yield made
  made.vllm.close()


def gap(tiny: TinyModel, options: SamplingOptions, got: Sequence[Completion]) -> float:
  """The largest difference between an engine's log-probabilities and the trainer's at the same temperature."""
  gaps = []
  for number, each in enumerate(got):
    logits = tiny.log_probs(PROMPTS[number // options.n], each.token_ids) / (options.temperature or 1.0)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = logits[np.arange(len(each.token_ids)), each.token_ids]
    gaps.append(np.abs(chosen - each.log_probs).max())
  return float(max(gaps))


def test_greedy_tokens_are_the_native_engines(engines: Engines):
  got, want = engines.vllm.generate(PROMPTS, GREEDY), engines.native.generate(PROMPTS, GREEDY)
  assert [one.token_ids for one in got] == [one.token_ids for one in want]
  assert gap(engines.tiny, GREEDY, got) < 1e-3


@pytest.mark.parametrize("options", [SAMPLED, WHOLE], ids=["filtered", "whole"])
def test_log_probabilities_are_those_before_the_filters(engines: Engines, options: SamplingOptions):
  if options is SAMPLED and not engines.vllm._filters:
    with pytest.raises(GenerationError, match="without top-k and top-p"):
      engines.vllm.generate(PROMPTS, options)
    return
  got = engines.vllm.generate(PROMPTS, options)
  assert len(got) == len(PROMPTS) * options.n
  assert gap(engines.tiny, options, got) < 1e-3
  if options is SAMPLED:
    assert {one.finish_reason for one in got} == {"stop", "length"}
    assert all((one.token_ids[-1] in STOPS) == (one.finish_reason == "stop") for one in got)
    assert all(not set(one.token_ids[:-1]) & set(STOPS) for one in got)


def test_a_seed_gives_the_same_tokens_and_another_seed_others(engines: Engines):
  options = dataclasses.replace(WHOLE, n=2)
  first, again = (engines.vllm.generate(PROMPTS, options) for _ in range(2))
  assert first == again
  other = engines.vllm.generate(PROMPTS, dataclasses.replace(options, seed=12))
  assert [one.token_ids for one in first] != [one.token_ids for one in other]
  assert any(one.token_ids != two.token_ids for one, two in zip(first[::2], first[1::2], strict=True))


def test_new_weights_are_used_from_then_on(engines: Engines):
  tiny, other = engines.tiny, scaled(engines.tiny.model, 0.7)
  before = engines.vllm.generate(PROMPTS[:8], GREEDY)
  engines.vllm.load(other)
  want = engines.native.generate(PROMPTS[:8], GREEDY, weights=other)
  got = engines.vllm.generate(PROMPTS[:8], GREEDY)
  engines.vllm.load(model_weights(tiny.model))
  assert [one.token_ids for one in got] == [one.token_ids for one in want]
  for one, two in zip(got, want, strict=True):
    np.testing.assert_allclose(one.log_probs, two.log_probs, atol=1e-3, rtol=0)
  assert engines.vllm.generate(PROMPTS[:8], GREEDY) == before != got


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
  made = build(tmp_path_factory.mktemp("llama"), "llama, scanned")
  yield made
  made.vllm.close()


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.8, 12, 1.0), (1.2, 30, 0.6)])
def test_samples_follow_the_distribution(llama: Engines, temperature: float, top_k: int, top_p: float):
  """10,000 first tokens: chi-square against the trainer's distribution, filtered by the definitions."""
  from scipy import stats

  prompt, count = PROMPTS[0], 10_000
  options = SamplingOptions(1, temperature, top_k, top_p, seed=7, n=count, tempered_log_probs=True)
  seen = np.bincount([one.token_ids[0] for one in llama.vllm.generate([prompt], options)], minlength=256)
  probabilities = np.exp(llama.tiny.log_probs(prompt, [0])[0] / temperature)
  order = np.argsort(-probabilities, kind="stable")
  kept = order[: top_k or None]
  sums = np.cumsum(probabilities[kept]) / probabilities[kept].sum()
  kept = kept[: np.searchsorted(sums, top_p) + 1] if top_p < 1 else kept
  assert seen[np.setdiff1d(order, kept)].sum() == 0
  expected = count * probabilities[kept] / probabilities[kept].sum()
  # Cells of fewer than five are taken together.
  often = expected >= 5
  have, want = seen[kept][often], expected[often]
  if not often.all():
    have, want = np.append(have, seen[kept][~often].sum()), np.append(want, expected[~often].sum())
  assert stats.chisquare(have, want * have.sum() / want.sum()).pvalue > 1e-3


def test_a_stop_sequence_ends_a_completion(llama: Engines):
  whole = llama.vllm.generate(PROMPTS[:4], GREEDY)
  said = whole[0].token_ids
  options = dataclasses.replace(GREEDY, stop_sequences=(tuple(said[3:6]),))
  got = llama.vllm.generate(PROMPTS[:4], options)
  assert (got[0].token_ids, got[0].finish_reason) == (said[:6], "stop")
  want = llama.native.generate(PROMPTS[:4], options)
  assert [(one.token_ids, one.finish_reason) for one in got] == [(one.token_ids, one.finish_reason) for one in want]


@pytest.mark.parametrize(
  ("prompt", "options", "says"),
  [
    ([], GREEDY, "is empty"),
    ([999], GREEDY, "not in the vocabulary"),
    ([1] * CONTEXT, GREEDY, "leaves no room"),
    ([1], dataclasses.replace(WHOLE, temperature=0.001), "vLLM takes 0 or at least 0.01"),
    ([1], dataclasses.replace(WHOLE, tempered_log_probs=False), "ask for tempered_log_probs"),
  ],
)
def test_what_it_does_not_take(llama: Engines, prompt: list[int], options: SamplingOptions, says: str):
  with pytest.raises(GenerationError, match=says):
    llama.vllm.generate([prompt], options)


# Before another engine is started: what it leaves of torch's process groups is none of this one's.
def test_an_engine_that_dies_says_so_in_one_line(llama: Engines, monkeypatch: pytest.MonkeyPatch):
  step = llama.vllm._llm.llm_engine.step
  left = iter(range(3))

  def failing() -> Any:
    if next(left, None) is None:
      raise RuntimeError("EngineCore encountered an issue.\nSee stack trace above for the root cause.")
    return step()

  monkeypatch.setattr(llama.vllm._llm.llm_engine, "step", failing)
  with pytest.raises(GenerationError) as died:
    llama.vllm.generate(PROMPTS, GREEDY)
  message = str(died.value)
  assert "stopped amid a batch of 50 completions: RuntimeError: EngineCore encountered an issue." in message
  assert "\n" not in message
  monkeypatch.undo()
  # Nothing is asked of it again.
  with pytest.raises(GenerationError, match="amid a batch of 50"):
    llama.vllm.load(model_weights(llama.tiny.model))
  with pytest.raises(GenerationError, match="amid a batch of 50"):
    llama.vllm.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize(
  ("key", "settings", "error", "says"),
  [
    ("head_dim=16", {}, GenerationError, "head_dim=16"),
    (
      "head_dim=32",
      {"arguments": {"swap_space": 4}, "set_by": {"swap_space": "swap_space_vllm_gb=4"}},
      ConfigError,
      "swap_space_vllm_gb=4: vLLM .* has no engine argument swap_space",
    ),
    ("head_dim=32", {"arguments": {"block_size": 7}}, GenerationError, "does not start"),
    ("decoder_block=simple", {}, ModelError, "has no HuggingFace form"),
  ],
)
def test_what_it_does_not_start_with(
  tmp_path: Path, key: str, settings: dict[str, Any], error: type[Exception], says: str
):
  argv = runs.arguments(tmp_path, "refused", "steps=1", key)
  config = maxtext_api.build_config(load_config(argv).maxtext_overrides())
  with pytest.raises(error, match=says) as refused:
    VllmEngine(config, settings=VllmSettings(**settings))
  assert "\n" not in str(refused.value)


def test_what_an_engine_lacks_is_told_with_its_value(llama: Engines, capsys: pytest.CaptureFixture[str]):
  # capsys stands for a notebook: its standard output is no file.
  told: list[str] = []
  settings = VllmSettings(arguments={"swap_space": 2})
  engine = VllmEngine(llama.tiny.config, settings=settings, max_context=CONTEXT, max_batch=2, report=told.append)
  engine.close()
  assert len(told) == 1
  assert "swap_space=2" in told[0]
