"""Tokens follow the distribution that temperature, top-k and top-p leave; draws depend on their numbers alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from maxtext_posttrain.rollout import sampling

SAMPLES = 10_000
VOCAB = 300


def distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
  """By definition, in float64: sort, keep the k first, then the shortest prefix that reaches p, with its equals."""
  scaled = logits.astype(np.float64) / temperature
  probabilities = np.exp(scaled - scaled.max())
  order = np.argsort(-probabilities, kind="stable")
  if top_k:
    probabilities = np.where(probabilities >= probabilities[order[min(top_k, len(order)) - 1]], probabilities, 0.0)
  probabilities /= probabilities.sum()
  reached = np.cumsum(probabilities[order])
  last = np.searchsorted(reached, min(top_p, reached[-1]) - 1e-12)
  probabilities = np.where(probabilities >= probabilities[order[last]], probabilities, 0.0)
  return probabilities / probabilities.sum()


@functools.cache
def compiled():
  return jax.jit(
    lambda logits, draws, temperature, top_k, top_p: sampling.choose(
      logits, draws, temperature=temperature, top_k=top_k, top_p=top_p
    )
  )


def choose(logits: np.ndarray, draws: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
  arguments = (np.float32(temperature), np.int32(top_k), np.float32(top_p))
  return np.asarray(compiled()(np.asarray(logits, np.float32), np.asarray(draws, np.float32), *arguments))


@functools.cache
def uniform_draws() -> np.ndarray:
  made = jax.jit(lambda *numbers: sampling.uniforms(sampling.sequence_keys(*numbers), 1)[0])
  return np.asarray(made(jnp.array([0, 7], jnp.uint32), jnp.arange(SAMPLES), jnp.zeros(SAMPLES, jnp.int32)))


@pytest.mark.parametrize(
  ("temperature", "top_k", "top_p"),
  [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 20, 1.0), (1.0, 0, 0.8), (1.3, 50, 0.9), (1.0, VOCAB + 5, 1.0), (2.0, 1, 0.5)],
)
def test_samples_follow_the_distribution(temperature: float, top_k: int, top_p: float):
  logits = np.random.default_rng(1).normal(size=VOCAB, scale=2.0)
  draws = uniform_draws()
  tokens = choose(np.broadcast_to(logits, (SAMPLES, VOCAB)), draws, temperature, top_k, top_p)
  counts = np.bincount(tokens, minlength=VOCAB)
  expected = distribution(logits, temperature, top_k, top_p) * SAMPLES
  assert not counts[expected == 0].any()
  order = np.argsort(expected)
  # Rare tokens together, so that every expected count is at least 5.
  rare = order[np.cumsum(expected[order]) < 5]
  common = np.setdiff1d(np.flatnonzero(expected), rare)
  have, want = np.append(counts[common], counts[rare].sum()), np.append(expected[common], expected[rare].sum())
  have, want = have[want > 0], want[want > 0]
  assert len(have) == 1 or stats.chisquare(have, want * have.sum() / want.sum()).pvalue > 1e-3


@pytest.mark.parametrize("top_k", [0, 1, 3, 17, VOCAB])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.95, 1.0])
def test_what_is_kept(top_k: int, top_p: float):
  rng = np.random.default_rng(2)
  # Rounded, so that many tokens are equally probable.
  logits = np.round(rng.normal(size=(8, VOCAB)), 1).astype(np.float32)
  weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
  kept = np.asarray(jax.jit(sampling._truncate)(weights, np.int32(top_k), np.float32(top_p)))
  for row in range(len(logits)):
    np.testing.assert_array_equal(kept[row] > 0, distribution(logits[row], 1.0, top_k, top_p) > 0)


def test_greedy_takes_the_first_of_equals():
  logits = np.zeros((2, VOCAB))
  logits[0, [4, 9]] = 1.0
  assert choose(logits, np.full(2, 0.999), 0.0).tolist() == [4, 0]


@pytest.mark.parametrize("draw", [0.0, 1e-7, 0.5, np.nextafter(np.float32(1), np.float32(0))])
def test_tokens_without_weight_are_never_drawn(draw: float):
  logits = np.full((3, VOCAB), -np.inf)
  logits[0, 130] = logits[1, 0] = logits[2, VOCAB - 1] = 3.0
  assert choose(logits, np.full(3, draw), 1.0).tolist() == [130, 0, VOCAB - 1]


def test_draws_depend_on_seed_prompt_sample_and_step_alone():
  def draws(seed: int, prompts: list[int], samples: list[int], steps: int) -> np.ndarray:
    words = jnp.asarray(sampling.request_key(seed))
    made = jax.jit(lambda *numbers: sampling.uniforms(sampling.sequence_keys(*numbers), steps))
    return np.asarray(made(words, jnp.array(prompts), jnp.array(samples)))

  many = draws(5, [0, 1, 2, 2], [0, 0, 0, 1], 8)
  np.testing.assert_array_equal(draws(5, [2], [1], 3)[:, 0], many[:3, 3])
  assert len(np.unique(many)) == many.size
  assert not np.isin(draws(5 + 2**32, [0, 1, 2, 2], [0, 0, 0, 1], 8), many).any()
