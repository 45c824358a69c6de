"""The native engine against the trainer's forward: tokens, log-probabilities, padding, windows, seeds, compilations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from maxtext.common.common_types import DecoderBlockType
from scipy import stats

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.errors import GenerationError
from maxtext_posttrain.rollout.native import NativeEngine
from maxtext_posttrain.rollout.options import Completion, SamplingOptions
from maxtext_posttrain.rollout.weights import model_weights
from tests.support.generation import CONTEXT, TinyModel

pytestmark = pytest.mark.slow

GREEDY = SamplingOptions(max_new_tokens=16, temperature=0.0)
SAMPLED = SamplingOptions(16, temperature=0.9, top_k=100, top_p=0.95, seed=11, stop_token_ids=(3, 5), n=2)
PROMPTS = [np.random.default_rng(length).integers(0, 256, length).tolist() for length in (1, 2, 9, 17)]
# Longer prompts, so of another width, but as many sequences.
LONG = [*PROMPTS[:3], np.arange(40).tolist()]

MODELS = {
  "scanned": ("base_num_decoder_layers=3",),
  "unscanned": ("scan_layers=false", "base_num_decoder_layers=1"),
  "gemma2, windows": ("decoder_block=gemma2", "sliding_window_size=6", "base_num_decoder_layers=1"),
  "gemma3, blocks": ("model_name=gemma3-4b", "sliding_window_size=6", "base_num_decoder_layers=7"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
  return TinyModel.build(tmp_path_factory.mktemp("tiny"), *MODELS["scanned"])


@pytest.fixture(scope="module")
def engine(tiny: TinyModel) -> NativeEngine:
  return NativeEngine(tiny.config, tiny.mesh, tiny.model, max_context=CONTEXT)


def check(model: TinyModel, prompts: Sequence[Sequence[int]], options: SamplingOptions, got: list[Completion]) -> None:
  """Log-probabilities agree with the trainer's; greedy tokens are its most probable ones."""
  assert len(got) == len(prompts) * options.n
  for number, completion in enumerate(got):
    want = model.log_probs(prompts[number // options.n], completion.token_ids)
    chosen = want[np.arange(len(want)), completion.token_ids]
    np.testing.assert_allclose(completion.log_probs, chosen, atol=1e-4, rtol=0)
    if options.temperature == 0:
      np.testing.assert_array_equal(completion.token_ids, want.argmax(axis=-1))


@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_the_trainers_forward(name: str, tiny: TinyModel, engine: NativeEngine, tmp_path: Path):
  if name != "scanned":
    tiny = TinyModel.build(tmp_path, *MODELS[name])
    engine = NativeEngine(tiny.config, tiny.mesh, tiny.model, max_context=CONTEXT)
  for options in (GREEDY, SAMPLED):
    check(tiny, PROMPTS, options, engine.generate(PROMPTS, options))
  assert engine.programs == 2  # four sequences, then eight


SAMPLES = 10_000


@pytest.mark.parametrize(
  ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.0, 12, 1.0), (1.0, 0, 0.7), (1.4, 40, 0.9)]
)
def test_samples_follow_the_trainers_distribution(tiny: TinyModel, temperature: float, top_k: int, top_p: float):
  """A chi-square test of 10,000 first tokens after one prompt; what the filters drop never comes."""
  engine = NativeEngine(tiny.config, tiny.mesh, tiny.model, max_context=CONTEXT, max_batch=2048)
  options = SamplingOptions(1, temperature=temperature, top_k=top_k, top_p=top_p, seed=3, n=SAMPLES)
  counts = np.bincount(
    [one.token_ids[0] for one in engine.generate(PROMPTS[2:3], options)], minlength=engine.vocab_size
  )
  expected = SAMPLES * filtered(tiny.log_probs(PROMPTS[2], [0])[0], temperature, top_k, top_p)
  assert not counts[expected == 0].any()
  # Tokens of too small a count are one, so that every expected count is at least 5.
  rare = expected < 5
  have = np.append(counts[~rare], counts[rare].sum())
  want = np.append(expected[~rare], expected[rare].sum())
  have, want = have[want > 0], want[want > 0]
  assert len(have) > 5
  assert stats.chisquare(have, want * have.sum() / want.sum()).pvalue > 1e-3


def filtered(log_probs: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
  """By definition: the k most probable, then of these the shortest prefix that reaches p."""
  order = np.argsort(-log_probs)
  weights = np.exp(log_probs[order] / temperature)
  weights[top_k or len(weights) :] = 0
  weights /= weights.sum()
  reached = np.cumsum(weights)
  weights[np.searchsorted(reached, top_p - 1e-9) + 1 :] = 0
  probabilities = np.zeros_like(weights)
  probabilities[order] = weights / weights.sum()
  return probabilities


def test_neither_the_batch_nor_padding_changes_a_completion(engine: NativeEngine):
  together = engine.generate(PROMPTS, SAMPLED)
  # The first prompt keeps its number, and so its draws.
  alone = engine.generate(PROMPTS[:1], SAMPLED)
  assert [one.token_ids for one in alone] == [one.token_ids for one in together[:2]]
  wider = engine.generate(LONG, SAMPLED)
  assert [one.token_ids for one in wider[:-2]] == [one.token_ids for one in together[:-2]]


def test_a_seed_gives_the_same_bits_and_another_seed_others(engine: NativeEngine):
  first, again = (engine.generate(PROMPTS, SAMPLED) for _ in range(2))
  assert first == again
  assert first != engine.generate(PROMPTS, dataclasses.replace(SAMPLED, seed=12))
  pairs = [(first[2 * i].token_ids, first[2 * i + 1].token_ids) for i in range(len(PROMPTS))]
  assert any(one != other for one, other in pairs)


@contextmanager
def compilations() -> Iterator[list[str]]:
  """The compilations that happen inside the block."""
  seen: list[str] = []

  def listen(event: str, seconds: float, **_: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
      seen.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield seen
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


def test_other_lengths_batches_and_options_compile_nothing(tiny: TinyModel):
  engine = NativeEngine(tiny.config, tiny.mesh, tiny.model, max_context=CONTEXT)
  engine.generate(PROMPTS, GREEDY)
  assert engine.programs == 1
  options = [
    SamplingOptions(max_new_tokens=3, temperature=1.5, seed=2**40),
    SamplingOptions(max_new_tokens=16, temperature=0.3, top_k=7, stop_token_ids=(1, 2, 3)),
    SamplingOptions(max_new_tokens=9, top_p=0.5),
  ]
  with compilations() as seen:
    for prompts in (PROMPTS[1:], [PROMPTS[3]] * 4, [[1] * length for length in range(4, 8)]):
      for option in options:
        engine.generate(prompts, option)
  assert engine.programs == 1
  assert not seen


def test_weights_of_another_model_are_used_where_they_are_given(tiny: TinyModel, engine: NativeEngine):
  mine = engine.generate(PROMPTS, GREEDY)
  other = nnx.merge(*nnx.split(tiny.model), copy=True)
  nnx.update(other, jax.tree.map(lambda leaf: leaf * 1.5, nnx.state(other, nnx.Param)))
  given = engine.generate(PROMPTS, GREEDY, weights=model_weights(other))
  assert [one.token_ids for one in given] != [one.token_ids for one in mine]
  check(dataclasses.replace(tiny, model=other), PROMPTS, GREEDY, given)
  assert engine.generate(PROMPTS, GREEDY) == mine


def test_stops_and_budgets(engine: NativeEngine):
  free = engine.generate(PROMPTS, GREEDY)
  stop = free[2].token_ids[4]
  stopped = engine.generate(PROMPTS, dataclasses.replace(GREEDY, stop_token_ids=(stop,)))
  for before, after in zip(free, stopped, strict=True):
    if stop in before.token_ids:
      end = before.token_ids.index(stop) + 1
      assert (after.token_ids, after.finish_reason) == (before.token_ids[:end], "stop")
    else:
      assert (after.token_ids, after.finish_reason) == (before.token_ids, "length")
  # A sequence, not its tokens alone, and not one that begins in the prompt.
  pair, never = tuple(free[2].token_ids[3:5]), (PROMPTS[2][-1], free[2].token_ids[0])
  by_sequence = engine.generate(PROMPTS, dataclasses.replace(GREEDY, stop_sequences=(never, pair, (256 - 1,) * 3)))
  assert by_sequence[2].finish_reason == "stop"
  ends = [at for at in range(2, 17) if tuple(free[2].token_ids[at - 2 : at]) in (pair, never)]
  assert by_sequence[2].token_ids == free[2].token_ids[: ends[0]]
  near_the_end = engine.generate([[7] * (CONTEXT - 2), *PROMPTS], GREEDY)
  assert [len(one.token_ids) for one in near_the_end] == [2, 16, 16, 16, 16]
  assert near_the_end[0].finish_reason == "length"
  assert engine.generate([], GREEDY) == []


def test_more_requests_than_a_wave_holds(tiny: TinyModel, engine: NativeEngine):
  small = NativeEngine(tiny.config, tiny.mesh, tiny.model, max_context=CONTEXT, max_batch=2)
  got, want = small.generate(PROMPTS, SAMPLED), engine.generate(PROMPTS, SAMPLED)
  assert [one.token_ids for one in got] == [one.token_ids for one in want]


@pytest.mark.parametrize(
  ("prompts", "options", "message"),
  [
    ([[1], []], {}, "prompt 1 is empty"),
    ([[1, 256]], {}, "token 256 is not in the vocabulary of 256 tokens"),
    ([[-1]], {}, "token -1 is not in the vocabulary"),
    ([[0.5]], {}, "prompt 0 is not a list of token ids"),
    ([["a"]], {}, "prompt 0 is not a list of token ids"),
    ([[[1, 2]]], {}, "prompt 0 is not a list of token ids"),
    ([[1] * CONTEXT], {}, "no room in a context of 64"),
    ([[1]], {"stop_token_ids": (256,)}, "stop token 256 is not in the vocabulary"),
    ([[1]], {"stop_sequences": ((1, 256),)}, "stop token 256 is not in the vocabulary"),
  ],
)
def test_refused_requests(engine: NativeEngine, prompts: list, options: dict, message: str):
  with pytest.raises(GenerationError, match=message):
    engine.generate(prompts, dataclasses.replace(GREEDY, **options))


def test_refused_models(tiny: TinyModel, tmp_path: Path):
  with pytest.raises(GenerationError, match="max_batch is 0"):
    NativeEngine(tiny.config, tiny.mesh, tiny.model, max_batch=0)
  other = TinyModel.build(tmp_path, "base_num_decoder_layers=2", "scan_layers=false")
  with pytest.raises(GenerationError, match="lacks decoder/layers_2/"):
    NativeEngine(tiny.config, tiny.mesh, other.model)
  pydantic = tiny.config._pydantic_config
  for update, message in (
    ({"decoder_block": DecoderBlockType.DEEPSEEK}, "decoder_block=deepseek"),
    ({"moba": True}, "moba=True"),
  ):
    refused = maxtext_api.MaxTextConfig(pydantic.model_copy(update=update))
    with pytest.raises(GenerationError, match=message):
      NativeEngine(refused, tiny.mesh, tiny.model)
