"""The tokenizer a configuration names, as files beside exported weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from maxtext_posttrain.errors import TokenizerError
from maxtext_posttrain.models.safetensors_files import write_json
from maxtext_posttrain.models.tensor_source import TOKENIZER_FILES, read_json
from maxtext_posttrain.tokenizers import configured_tokenizer
from maxtext_posttrain.tokenizers.chat_template import load_template
from maxtext_posttrain.tokenizers.files import local_path, vocabulary_file

_GENERATION_CONFIG = "generation_config.json"
_MAX_GENERATION_CONFIG = 1_000_000
_CLASSES = {"gemma2": "GemmaTokenizer", "gemma3": "GemmaTokenizer"}
"""Of SentencePiece models, by MaxText's decoder block; Llama's for all others."""


def write_tokenizer(config: Any, folder: Path) -> tuple[dict[str, Any], list[str]]:
  """Writes tokenizer files and the chat template into `folder`, which exists.

  Args:
    config: MaxText's key names as attributes.
    folder: where to.

  Returns:
    What generation_config.json is to hold (the special tokens' ids at least), and lines on what could not be written.

  Raises:
    TokenizerError: the tokenizer named is not there or cannot be loaded.
  """
  if config.dataset_type == "synthetic" or not config.tokenizer_path:
    return {}, ["the configuration names no tokenizer: none is written"]
  notes: list[str] = []
  kind, path = config.tokenizer_type, local_path(config.tokenizer_path)
  if kind == "huggingface":
    notes += _copy_folder(path, folder, config.tokenizer_path)
  elif kind == "sentencepiece":
    shutil.copyfile(vocabulary_file(config.tokenizer_path, ("*.model",)), folder / "tokenizer.model")
    block = getattr(config.decoder_block, "value", config.decoder_block)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": _CLASSES.get(block, "LlamaTokenizer")})
    notes.append("tokenizer.model is written as it is; transformers converts it, and may cut runs of spaces otherwise")
  else:
    notes.append(f"tokenizer {config.tokenizer_path} is of kind {kind}, which transformers does not read: not written")
  template = config.chat_template or config.chat_template_path
  if template:
    (folder / "chat_template.jinja").write_text(load_template(template).text, encoding="utf-8")
    (folder / "chat_template.json").unlink(missing_ok=True)
  return _generation_config(config, folder), notes


def _copy_folder(path: Path, folder: Path, name: str) -> list[str]:
  path = path.parent if path.is_file() else path
  if not path.is_dir():
    return [f"tokenizer {name} is not a folder here: not written; save it beside the weights"]
  found = [file for file in TOKENIZER_FILES if (path / file).is_file()]
  if not found:
    raise TokenizerError(f"tokenizer {name}: the folder has none of {', '.join(TOKENIZER_FILES[:2])}")
  for file in found:
    shutil.copyfile(path / file, folder / file)
  return []


def _generation_config(config: Any, folder: Path) -> dict[str, Any]:
  """What came with the tokenizer, or the tokenizer's special tokens."""
  written = folder / _GENERATION_CONFIG
  if written.is_file():
    return read_json(written, _MAX_GENERATION_CONFIG)
  tokenizer = configured_tokenizer(config)
  if tokenizer is None:
    return {}
  ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
  return {name: int(index) for name, index in ids.items() if index is not None and index >= 0}
