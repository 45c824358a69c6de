"""Loading: what is found where, and what is said when it is not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from maxtext_posttrain.errors import ChatTemplateError, TokenizerError
from maxtext_posttrain.tokenizers import build_tokenizer
from tests.support.chat_samples import asset


def test_importing_and_loading_files_imports_nothing_heavy():
  code = """
import sys
import maxtext_posttrain.tokenizers as t
heavy = {"jax", "transformers", "maxtext", "tunix", "sentencepiece", "tiktoken", "torch", "numpy"} & set(sys.modules)
assert not heavy, heavy
t.build_tokenizer("maxtext://tokenizers/tokenizer.llama2", "sentencepiece", chat_template="llama2")
t.build_tokenizer("maxtext://tokenizers/tokenizer_llama3.tiktoken", "tiktoken")
heavy = {"jax", "transformers", "maxtext", "tunix", "torch"} & set(sys.modules)
assert not heavy, heavy
"""
  subprocess.run([sys.executable, "-c", code], check=True)


def message(*args, error=TokenizerError, **kwargs):
  with pytest.raises(error) as caught:
    build_tokenizer(*args, **kwargs)
  text = str(caught.value)
  assert "\n" not in text
  assert text.startswith(("tokenizer", "chat template"))
  return text


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken", "huggingface"])
@pytest.mark.parametrize("path", ["/nowhere/tokenizer.model", "./nowhere", "maxtext://tokenizers/nowhere", "a/b/c"])
def test_missing_files(kind, path):
  text = message(path, kind)
  assert path in text
  assert "no such" in text


def test_a_missing_asset_lists_those_there_are():
  assert "tokenizer.gemma3, tokenizer.llama2" in message("maxtext://tokenizers/tokenizer.lama2", "sentencepiece")


def test_a_path_that_leaves_the_assets():
  assert "leads out of" in message("maxtext://../../../../etc/passwd", "sentencepiece")


def test_unknown_kinds():
  assert "did you mean sentencepiece?" in message("x", "sentencepeice")
  assert "none of sentencepiece, tiktoken, huggingface" in message("x", "bpe")


@pytest.mark.parametrize(
  ("name", "kind", "hint"),
  [
    ("tokenizer_llama3.tiktoken", "sentencepiece", "tokenizer_type=tiktoken"),
    ("qwen3-tokenizer/tokenizer.json", "sentencepiece", "tokenizer_type=huggingface"),
    ("tokenizer.llama2", "tiktoken", "tokenizer_type=sentencepiece"),
    ("qwen3-tokenizer/tokenizer.json", "tiktoken", "tokenizer_type=huggingface"),
    ("tokenizer.llama2", "huggingface", "tokenizer_type=sentencepiece"),
    ("tokenizer_llama3.tiktoken", "huggingface", "tokenizer_type=tiktoken"),
  ],
)
def test_files_of_another_kind(name, kind, hint):
  assert hint in message(str(asset(name)), kind)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x00" * 100, b"\x0a\x0e\x0a\x05<unk>"])
@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken"])
def test_corrupt_files(tmp_path, kind, content):
  file = tmp_path / "tokenizer.model"
  file.write_bytes(content)
  assert str(file) in message(str(file), kind)


def test_cut_files(tmp_path):
  data = asset("tokenizer.llama2").read_bytes()
  (tmp_path / "a.model").write_bytes(data[: len(data) // 2])
  assert "not a SentencePiece model" in message(str(tmp_path / "a.model"), "sentencepiece")
  lines = asset("tokenizer_llama3.tiktoken").read_bytes().splitlines()
  (tmp_path / "a.tiktoken").write_bytes(b"\n".join(lines[:100]))
  assert "the file is incomplete" in message(str(tmp_path / "a.tiktoken"), "tiktoken")
  (tmp_path / "b.tiktoken").write_bytes(b"\n".join([*lines[:300], b"!!! 300", *lines[301:400]]))
  assert "line 301: not base64 bytes and a rank" in message(str(tmp_path / "b.tiktoken"), "tiktoken")


def test_folders(tmp_path):
  assert "it has none" in message(str(tmp_path), "sentencepiece")
  shutil.copy(asset("tokenizer.llama2"), tmp_path / "tokenizer.model")
  assert build_tokenizer(str(tmp_path), "sentencepiece").vocab_size == 32000
  shutil.copy(asset("tokenizer.llama2"), tmp_path / "other.model")
  assert "it has other.model, tokenizer.model; name the file" in message(str(tmp_path), "sentencepiece")


def test_huggingface_folders_that_are_none(tmp_path):
  assert "holds no tokenizer that can be loaded" in message(str(tmp_path), "huggingface")
  (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
  (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
  assert "holds no tokenizer that can be loaded" in message(str(tmp_path), "huggingface")


def test_a_hub_repository_that_cannot_be_had(monkeypatch):
  monkeypatch.setenv("HF_HUB_OFFLINE", "1")
  monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
  text = message("owner/does-not-exist", "huggingface")
  assert "the hub gave none" in text
  assert "owner/does-not-exist" in text


def test_remote_code_is_not_run(tmp_path):
  (tmp_path / "code.py").write_text("raise SystemExit('remote code ran')")
  config = {"auto_map": {"AutoTokenizer": ["code.Tok", None]}, "tokenizer_class": "Tok"}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  (tmp_path / "config.json").write_text(json.dumps({"model_type": "x"}))
  message(str(tmp_path), "huggingface")


def test_huggingface_by_its_file_and_template_overridden(qwen):
  tokenizer = build_tokenizer(
    "maxtext://tokenizers/qwen3-tokenizer/tokenizer.json", "huggingface", chat_template="chatml"
  )
  assert tokenizer.vocab_size == qwen.vocab_size
  assert tokenizer.chat_template != qwen.chat_template
  assert "im_start" in str(qwen.chat_template)
  assert tokenizer.fingerprint != qwen.fingerprint


def test_templates_are_checked_when_the_tokenizer_is_built():
  path = "maxtext://tokenizers/tokenizer.llama2"
  assert "did you mean llama2" in message(path, "sentencepiece", chat_template="llama-2", error=ChatTemplateError)
  assert "line 1" in message(path, "sentencepiece", chat_template="{% for %}", error=ChatTemplateError)
