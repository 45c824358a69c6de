"""config.json to MaxText's keys and back."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from maxtext_posttrain.config import load_model_config
from maxtext_posttrain.errors import ModelError
from maxtext_posttrain.models.huggingface_config import from_huggingface, huggingface_config
from maxtext_posttrain.models.maxtext_config import from_maxtext, maxtext_keys
from tests.support import families


def described(config: dict[str, Any]) -> Any:
  return dataclasses.replace(from_huggingface(config), notes=())


@pytest.mark.parametrize("name", families.NAMES)
def test_maxtext_keys_say_all_there_is(name: str) -> None:
  want = dataclasses.replace(families.architecture(name), notes=())
  assert from_maxtext(SimpleNamespace(**maxtext_keys(want))) == want


@pytest.mark.parametrize("name", families.NAMES)
def test_the_config_written_is_the_config_read(name: str) -> None:
  want = dataclasses.replace(families.architecture(name), notes=())
  assert described(huggingface_config(want, dtype="float32")) == want


@pytest.mark.parametrize("name", families.NAMES)
def test_transformers_reads_the_same_model_from_what_is_written(name: str) -> None:
  config = huggingface_config(families.architecture(name), dtype="float32")
  written = AutoConfig.for_model(**config).to_dict()
  wanted = AutoConfig.for_model(**families.config(name)).to_dict()
  ignored = {"bos_token_id", "eos_token_id", "pad_token_id", "max_window_layers", "hidden_act", "_name_or_path"}
  for key, value in wanted.items():
    if key not in ignored:
      assert written[key] == value, key


def test_the_older_spelling_of_rope_is_read() -> None:
  config = families.config("llama3_1")
  rope = config.pop("rope_parameters")
  config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
  assert from_huggingface(config) == families.architecture("llama3_1")


def test_the_older_spelling_of_gemma3s_rope_is_read() -> None:
  config = families.config("gemma3")
  del config["rope_parameters"]
  config |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
  assert from_huggingface(config) == families.architecture("gemma3")


def test_what_a_config_leaves_out_is_what_transformers_takes() -> None:
  sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
  architecture = from_huggingface({"architectures": ["LlamaForCausalLM"], "vocab_size": 99, **sizes})
  assert architecture.dimensions.kv_heads == 4
  assert architecture.dimensions.head == 8
  assert architecture.rope.theta == 10000
  assert architecture.norm_epsilon == 1e-6
  assert not architecture.dimensions.tied


@pytest.mark.parametrize(
  ("name", "changes", "words"),
  [
    ("llama2", {"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not known"),
    ("llama2", {"architectures": ["Gemma3ForConditionalGeneration"]}, "is not known"),
    ("llama2", {"hidden_size": None}, "hidden_size is missing"),
    ("llama2", {"hidden_size": "32"}, "hidden_size is '32'"),
    ("llama2", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    ("llama2", {"num_attention_heads": 0}, "num_attention_heads is 0"),
    ("llama2", {"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
    ("llama2", {"head_dim": 15}, "head_dim 15 is odd"),
    ("llama2", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ("llama2", {"attention_bias": True}, "attention_bias is True"),
    ("llama2", {"mlp_bias": True}, "mlp_bias is True"),
    ("llama2", {"rms_norm_eps": -1}, "rms_norm_eps is -1"),
    ("llama2", {"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
    ("llama2", {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
    ("llama2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "rope_scaling 'yarn'"),
    ("llama2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor is None"),
    ("llama2", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.5}}, "rope_theta is 10000.5"),
    ("llama2", {"rope_parameters": [1]}, "rope_scaling is [1]"),
    ("llama3_1", {"rope_parameters": {"rope_type": "llama3", "factor": 8.5, "rope_theta": 1e4}}, "factor is 8.5"),
    (
      "llama3_1",
      {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 3.0}},
      "high_freq_factor is 3.0",
    ),
    ("qwen2_5", {"use_sliding_window": True}, "use_sliding_window is True"),
    ("qwen3", {"attention_bias": True}, "attention_bias is True"),
    ("gemma2", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
    ("gemma2", {"num_hidden_layers": 3, "layer_types": None}, "has pairs of layers"),
    ("gemma2", {"tie_word_embeddings": False}, "tie_word_embeddings is false"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
    ("gemma3", {"layer_types": ["full_attention"] * 13}, "5 local layers before each global one"),
    ("gemma3", {"query_pre_attn_scalar": 17}, "query_pre_attn_scalar 17"),
  ],
)
def test_what_maxtext_cannot_compute_is_named(name: str, changes: dict[str, Any], words: str) -> None:
  with pytest.raises(ModelError, match=r"^here: ") as raised:
    from_huggingface({**families.config(name), **changes}, "here")
  assert words in str(raised.value)
  assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
  ("name", "changes", "words"),
  [
    ("llama2", {"decoder_block": "deepseek"}, "decoder_block 'deepseek'"),
    ("llama2", {"mlp_activations": ["gelu", "linear"]}, "mlp_activations=['gelu', 'linear']"),
    ("llama2", {"fused_qkv": True}, "fused_qkv=True"),
    ("llama2", {"final_logits_soft_cap": 30.0}, "final_logits_soft_cap=30.0"),
    ("llama2", {"global_parameter_scale": 2}, "global_parameter_scale=2"),
    ("llama2", {"rope_type": "yarn"}, "rope_type=yarn"),
    ("smollm2", {"normalize_embedding_logits": True}, "normalize_embedding_logits=True"),
    ("qwen3", {"use_qk_norm": False}, "use_qk_norm=False"),
    ("qwen2_5", {"attention_bias": False}, "attention_bias=False"),
    ("gemma2", {"use_post_ffw_norm": False}, "use_post_ffw_norm=False"),
  ],
)
def test_what_huggingface_cannot_express_is_named(name: str, changes: dict[str, Any], words: str) -> None:
  with pytest.raises(ModelError) as raised:
    from_maxtext(SimpleNamespace(**{**maxtext_keys(families.architecture(name)), **changes}))
  assert words in str(raised.value)


def test_notes_say_where_maxtext_differs() -> None:
  assert "rope_factor is 32" in families.architecture("llama3_2").notes[0]
  mistral = from_huggingface({**families.config("mistral"), "sliding_window": 4096})
  assert "up to 4096 tokens" in mistral.notes[0]
  assert families.architecture("llama3_1").notes == ()


@pytest.mark.parametrize(
  ("model_name", "architecture", "emb", "layers", "heads", "theta"),
  [
    ("llama2-7b", "LlamaForCausalLM", 4096, 32, (32, 32, 128), 10000),
    ("llama3.1-8b", "LlamaForCausalLM", 4096, 32, (32, 8, 128), 500000),
    ("mistral-7b", "MistralForCausalLM", 4096, 32, (32, 8, 128), 1000000),
    ("qwen2.5-7b", "Qwen2ForCausalLM", 3584, 28, (28, 4, 128), 1000000),
    ("qwen3-0.6b", "Qwen3ForCausalLM", 1024, 28, (16, 8, 128), 1000000),
    ("gemma2-2b", "Gemma2ForCausalLM", 2304, 26, (8, 4, 256), 10000),
    ("gemma3-4b", "Gemma3ForCausalLM", 2560, 34, (8, 4, 256), 1000000),
  ],
)
def test_maxtexts_named_models(
  model_name: str, architecture: str, emb: int, layers: int, heads: tuple[int, int, int], theta: int
) -> None:
  """Sizes as the models' authors publish them."""
  described = from_maxtext(load_model_config(["sft.yml", f"model_name={model_name}", "run_name=x"], environ={}))
  config = huggingface_config(described, dtype="bfloat16")
  assert config["architectures"] == [architecture]
  assert (config["hidden_size"], config["num_hidden_layers"], config["rope_theta"]) == (emb, layers, theta)
  assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == heads
  assert ("rope_scaling" in config) == (model_name in ("llama3.1-8b", "gemma3-4b"))
