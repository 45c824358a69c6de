"""The native engine as Tunix knows engines: by itself, and chosen by Tunix's own RLCluster."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tunix.rl import rl_cluster
from tunix.rl.rollout import base_rollout

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.errors import GenerationError
from maxtext_posttrain.rollout.tunix_rollout import NativeRollout
from maxtext_posttrain.tokenizers import build_tokenizer
from tests.support.generation import TinyModel

pytestmark = pytest.mark.slow

CONFIG = base_rollout.RolloutConfig(
  max_tokens_to_generate=8,
  temperature=0.7,
  max_prompt_length=12,
  seed=5,  # pyright: ignore[reportArgumentType]
  eos_tokens=[2],
)
PROMPTS = [[1, 5, 9], [1, 5, 9], [1, 200, 31, 7, 8]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
  folder = tmp_path_factory.mktemp("tiny")
  return TinyModel.build(folder, "vocab_size=32000", "base_num_decoder_layers=1", "scan_layers=false")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
  return build_tokenizer("maxtext://tokenizers/tokenizer.llama2", "sentencepiece", chat_template="llama2")


def rollout_of(tiny: TinyModel, tokenizer: Any) -> NativeRollout:
  return NativeRollout(
    rollout_actor=tiny.model,
    tokenizer=None,
    mesh=tiny.mesh,
    rollout_config=CONFIG,
    maxtext=tiny.config,
    texts=tokenizer,
  )


@pytest.fixture(scope="module")
def rollout(tiny: TinyModel, tokenizer: Any) -> NativeRollout:
  return rollout_of(tiny, tokenizer)


def test_the_weights_are_the_actors_own_arrays(tiny: TinyModel, rollout: NativeRollout):
  given = nnx.state(tiny.model)
  rollout.update_params(given)
  assert rollout._weights is not None
  mine = {id(leaf) for leaf in jax.tree.leaves(nnx.filter_state(given, nnx.Param))}
  kept = {id(leaf) for leaf in jax.tree.leaves(nnx.filter_state(rollout._weights, nnx.Param))}
  assert kept == mine


def test_log_probabilities_are_those_of_what_was_sampled_from(tiny: TinyModel, rollout: NativeRollout):
  output = rollout.generate(PROMPTS, CONFIG)
  assert output.left_padded_prompt_tokens.shape == (3, 12)
  assert output.left_padded_prompt_tokens[0].tolist() == [rollout.pad_id()] * 9 + [1, 5, 9]
  for prompt, tokens, log_probs in zip(PROMPTS, output.tokens, output.logprobs or [], strict=True):
    logits = tiny.log_probs(prompt, tokens.tolist()) / CONFIG.temperature
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(log_probs, logits[np.arange(len(tokens)), tokens], atol=1e-4, rtol=0)


def test_the_same_seed_gives_the_same_bits_and_repeated_prompts_do_not(rollout: NativeRollout):
  one, other = rollout.generate(PROMPTS, CONFIG), rollout.generate(PROMPTS, CONFIG)
  for have, want in zip(one.tokens, other.tokens, strict=True):
    np.testing.assert_array_equal(have, want)
  for have, want in zip(one.logprobs or [], other.logprobs or [], strict=True):
    np.testing.assert_array_equal(have, want)
  assert one.tokens[0].tolist() != one.tokens[1].tolist()


def test_the_trainers_log_probabilities(tiny: TinyModel, rollout: NativeRollout):
  pad = rollout.pad_id()
  prompts = jnp.asarray([[pad, pad, 1, 5, pad], [1, 2, 3, 4, 5]], jnp.int32)
  completions = jnp.asarray([[7, 0, 9], [4, 5, 6]], jnp.int32)
  have = rollout.get_per_token_logps(prompts, completions)
  for row, prompt in enumerate(([1, 5, pad], [1, 2, 3, 4, 5])):
    said = completions[row].tolist()
    np.testing.assert_allclose(have[row], tiny.log_probs(prompt, said)[np.arange(3), said], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
  ("prompts", "options", "says"),
  [
    ([list(range(1, 14))], {}, "more than max_prompt_length=12"),
    ([[]], {}, "is empty"),
    ([[99999]], {}, "not in the vocabulary"),
    ([[1]], {"stop": 3}, "takes no stop"),
  ],
)
def test_what_it_does_not_take(rollout: NativeRollout, prompts: Any, options: Any, says: str):
  with pytest.raises(GenerationError, match=says):
    rollout.generate(prompts, CONFIG, **options)


def test_tunix_builds_it_and_generates_with_it(tiny: TinyModel, tokenizer: Any, tmp_path: Path):
  engine = functools.partial(NativeRollout, maxtext=tiny.config, texts=tokenizer)
  roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
  with maxtext_api.mesh_context(tiny.config, tiny.mesh):
    cluster = rl_cluster.RLCluster(
      actor=tiny.model,
      tokenizer=tokenizer,
      cluster_config=rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, tiny.mesh),
        rollout_engine=engine,  # pyright: ignore[reportArgumentType]
        training_config=rl_cluster.RLTrainingConfig(
          actor_optimizer=optax.sgd(1e-3), eval_every_n_steps=10, max_steps=1, mini_batch_size=2
        ),
        rollout_config=CONFIG,
      ),
    )
    output = cluster.generate(["What is 2 + 2?", "hello"])
    assert [len(each) > 0 for each in output.tokens] == [True, True]
    assert all(isinstance(text, str) for text in output.text)
    completions = np.zeros((2, 8), np.int32)
    for row, each in enumerate(output.tokens):
      completions[row, : len(each)] = each
    log_probs = cluster.get_old_per_token_logps(jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(completions))
    assert log_probs.shape == (2, 8)
    cluster.sync_weights()
    again = cluster.generate(["What is 2 + 2?", "hello"])
  for have, want in zip(again.tokens, output.tokens, strict=True):
    np.testing.assert_array_equal(have, want)
