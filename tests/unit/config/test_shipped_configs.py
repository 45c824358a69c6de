"""The YAML files under `configs/` and the data they name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxtext_posttrain.config import Config, load_config

ROOT = Path(__file__).parents[3]
CONFIGS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.yml"))
FILL = ["run_name=r", "base_output_directory=runs", "steps=1", "dataset_type=synthetic"]
FILL_DPO = [
  *FILL[:3],
  "hf_train_files=configs/data/quickstart_pairs.jsonl",
  "tokenizer_path=maxtext://tokenizers/tokenizer.llama2",
  "hf_eval_files=configs/data/quickstart_pairs_eval.jsonl",
]

# What an import, or a run before it, would leave.
FILL_DISTILL = [*FILL, "teacher_overrides.load_parameters_path=configs", "base_num_decoder_layers=30"]
FILL_GRPO = [
  *FILL[:3],
  "hf_train_files=configs/data/sums.jsonl",
  "tokenizer_path=maxtext://tokenizers/tokenizer.llama2",
]
FILLS = {
  "dpo": ("dpo", FILL_DPO),
  "distill": ("distill", FILL_DISTILL),
  "grpo_tiny_sft": ("sft", FILL),
  "grpo": ("grpo", FILL_GRPO),
  "grpo_gsm8k": ("grpo", [*FILL_GRPO, "load_parameters_path=configs"]),
  "dpo_smollm2": ("dpo", [*FILL_DPO, "load_parameters_path=configs"]),
}
"""The trainer and what its user would add, by the longest of these that a file's name begins with."""


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.chdir(ROOT)


def load(*argv: str, trainer: str = "sft") -> Config:
  return load_config(list(argv), trainer=trainer, environ={})


@pytest.mark.parametrize("path", CONFIGS)
def test_loads(path: str):
  longest = max((name for name in FILLS if Path(path).name.startswith(name)), key=len, default="")
  trainer, fill = FILLS.get(longest, ("sft", FILL))
  assert load(path, *fill, trainer=trainer).sources["steps"] == "command line"


def test_there_are_the_files_the_readme_names():
  assert {
    "configs/sft.yml",
    "configs/models/tiny.yml",
    "configs/models/gsm8k_10m.yml",
    "configs/quickstart/sft.yml",
    "configs/demo/sft_gsm8k.yml",
    "configs/distillation.yml",
    "configs/quickstart/distillation.yml",
    "configs/demo/distill_smollm2.yml",
  } <= set(CONFIGS)


def test_sft_has_maxtexts_defaults_for_sft(tmp_path: Path):
  """Against MaxText's own post_train/sft.yml, but for its data set and the accumulation this package does itself."""
  (tmp_path / "maxtexts.yml").write_text("base_config: post_train/sft.yml\n")
  ours, maxtexts = load("configs/sft.yml", *FILL), load(str(tmp_path / "maxtexts.yml"), *FILL)
  differ = {name for name in ours.sources if ours[name] != maxtexts[name]}
  assert differ == {"hf_path", "train_split", "hf_eval_split", "use_tunix_gradient_accumulation"}


def test_dpo_has_maxtexts_defaults_for_dpo(tmp_path: Path):
  """Against MaxText's own post_train/dpo.yml, but for its model, its data, its sizes and what is said in dpo.yml."""
  (tmp_path / "maxtexts.yml").write_text("base_config: post_train/dpo.yml\n")
  ours = load("configs/dpo.yml", *FILL_DPO, trainer="dpo")
  maxtexts = load(str(tmp_path / "maxtexts.yml"), *FILL_DPO, "override_model_config=true", trainer="dpo")
  differ = {name for name in ours.sources if ours[name] != maxtexts[name]}
  assert differ >= {"packing", "train_data_columns", "gradient_clipping_threshold", "model_name"}
  assert not {name for name in differ if name.startswith("dpo.")} | {"learning_rate", "opt_type"} & differ


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


def test_distillation_has_maxtexts_defaults_for_it(tmp_path: Path):
  """Against MaxText's own post_train/distillation.yml, but for its models, data, length and checkpoints."""
  (tmp_path / "maxtexts.yml").write_text("base_config: post_train/distillation.yml\n")
  fill = (*FILL, "teacher_overrides.load_parameters_path=configs")
  paths = ("configs/distillation.yml", str(tmp_path / "maxtexts.yml"))
  ours, maxtexts = (load(path, *fill, trainer="distill") for path in paths)
  differ = {name for name in ours.sources if ours[name] != maxtexts[name]}
  assert {name for name in differ if name.startswith("distill_")} == set()
  assert ours.learning_rate == maxtexts.learning_rate


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


@pytest.mark.parametrize(("name", "rows"), [("quickstart_pairs", 60), ("quickstart_pairs_eval", 8)])
def test_quickstart_pairs_are_a_prompt_and_two_answers(name: str, rows: int):
  lines = (ROOT / f"configs/data/{name}.jsonl").read_text(encoding="utf-8").splitlines()
  pairs = [json.loads(line) for line in lines]
  assert len(pairs) == rows
  assert all(set(pair) == {"prompt", "chosen", "rejected"} and pair["chosen"] != pair["rejected"] for pair in pairs)
  assert {type(pair["prompt"]) for pair in pairs} == {str, list}


@pytest.mark.parametrize("kind", ["chat", "pairs"])
def test_what_is_held_out_is_not_trained_on(kind: str):
  train, held_out = (
    set((ROOT / f"configs/data/{name}.jsonl").read_text(encoding="utf-8").splitlines())
    for name in (f"quickstart_{kind}", f"quickstart_{kind}_eval")
  )
  assert not train & held_out
