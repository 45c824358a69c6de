"""The YAML files under `configs/` and the data they name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxtext_posttrain.config import Config, load_config

ROOT = Path(__file__).parents[3]
CONFIGS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.yml"))
FILL = ["run_name=r", "base_output_directory=runs", "steps=1", "dataset_type=synthetic"]
TOKENIZER = "tokenizer_path=maxtext://tokenizers/tokenizer.llama2"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.chdir(ROOT)


def load(*argv: str, trainer: str = "sft") -> Config:
  return load_config(list(argv), trainer=trainer, environ={})


def trainer_of(path: str) -> str:
  """A file's trainer: named in its own name, else SFT."""
  return "grpo" if "grpo" in Path(path).stem else "sft"


@pytest.mark.parametrize("path", CONFIGS)
def test_loads(path: str):
  fill = FILL if trainer_of(path) == "sft" else [*FILL[:3], "hf_train_files=configs/data/sums.jsonl", TOKENIZER]
  assert load(path, *fill, trainer=trainer_of(path)).sources["steps"] == "command line"


def test_there_are_the_files_the_readme_names():
  assert {
    "configs/sft.yml",
    "configs/models/tiny.yml",
    "configs/models/gsm8k_10m.yml",
    "configs/quickstart/sft.yml",
    "configs/demo/sft_gsm8k.yml",
  } <= set(CONFIGS)


def test_sft_has_maxtexts_defaults_for_sft(tmp_path: Path):
  """Against MaxText's own post_train/sft.yml, but for its data set and the accumulation this package does itself."""
  (tmp_path / "maxtexts.yml").write_text("base_config: post_train/sft.yml\n")
  ours, maxtexts = load("configs/sft.yml", *FILL), load(str(tmp_path / "maxtexts.yml"), *FILL)
  differ = {name for name in ours.sources if ours[name] != maxtexts[name]}
  assert differ == {"hf_path", "train_split", "hf_eval_split", "use_tunix_gradient_accumulation"}


def test_grpo_quickstart_runs_as_it_is():
  config = load("configs/quickstart/grpo.yml", trainer="grpo")
  assert config.rl.num_generations == 4
  assert config.reward_weights == {"exact_answer": 1.0, "finished": 0.1}
  assert not {"rl", "batch_size", "reward_weights", "rollout_engine"} & config.maxtext_overrides().keys()


def test_quickstart_runs_as_it_is():
  config = load("configs/quickstart/sft.yml")
  assert (config.run_name, config.base_output_directory, config.steps) == ("quickstart", "runs", 40)
  assert (config.base_emb_dim, config.packing, config.learning_rate) == (64, True, 3e-3)
  assert config.sources["base_emb_dim"] == "configs/models/tiny.yml"
  assert config.sources["packing"] == "configs/sft.yml"
  assert config.sources["steps"] == "configs/quickstart/sft.yml"


def test_gsm8k_demo_runs_as_it_is():
  if not (ROOT / "../shared/data/gsm8k/train.jsonl").exists():
    pytest.skip("the shared GSM8K data are not here")
  config = load("configs/demo/sft_gsm8k.yml")
  assert config.steps >= 200
  # Embedding (shared with the output) + per layer: q, k, v, out, three MLP matrices and two norms + the last norm.
  emb, mlp, heads = config.base_emb_dim, config.base_mlp_dim, config.head_dim
  attention = 2 * emb * heads * (config.base_num_query_heads + config.base_num_kv_heads)
  layers = config.base_num_decoder_layers * (attention + 3 * emb * mlp + 2 * emb)
  assert 9e6 < config.vocab_size * emb + layers + emb < 11e6
  assert config.logits_via_embedding


@pytest.mark.parametrize(("name", "rows"), [("quickstart_chat", 60), ("quickstart_chat_eval", 8)])
def test_quickstart_data_are_chats(name: str, rows: int):
  lines = (ROOT / f"configs/data/{name}.jsonl").read_text(encoding="utf-8").splitlines()
  chats = [json.loads(line)["messages"] for line in lines]
  assert len(chats) == rows
  for chat in chats:
    turns = [message["role"] for message in chat if message["role"] != "system"]
    assert turns == ["user", "assistant"] * (len(turns) // 2)
    assert all(message["content"].strip() for message in chat)
  assert any(len(chat) > 3 for chat in chats)
  assert any(chat[0]["role"] == "system" for chat in chats)


def test_held_out_chats_are_not_trained_on():
  train, held_out = (
    set((ROOT / f"configs/data/{name}.jsonl").read_text(encoding="utf-8").splitlines())
    for name in ("quickstart_chat", "quickstart_chat_eval")
  )
  assert not train & held_out
