"""The tokenizer in a GGUF file's metadata, as a HuggingFace tokenizer folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Regex as Pattern

from maxtext_posttrain.errors import ModelError
from maxtext_posttrain.models.safetensors_files import write_json

_CONTROL, _USER_DEFINED = 3, 4
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_LLAMA3 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
  r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _split(pattern: str) -> Any:
  return pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(Pattern(pattern), "isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )


def _pre_tokenizer(name: str) -> Any | None:
  """How text is cut before merges apply, by GGUF's name for it; None where the name is not known."""
  byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
  match name:
    case "default" | "gpt-2" | "gpt2":
      return byte_level
    case "smollm":
      return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    case "llama-bpe" | "llama3" | "llama-v3":
      return _split(_LLAMA3)
    case "qwen2":
      return _split(_QWEN2)
  return None


def write_tokenizer(metadata: Mapping[str, Any], folder: Path, where: str) -> str | None:
  """Writes `tokenizer.json`, `tokenizer_config.json` and `generation_config.json` into `folder`, which exists.

  Returns:
    None, or where the tokenizer is of a kind that is not converted, a line that says so; nothing is written then.

  Raises:
    ModelError: a value is of another type than GGUF's, or the metadata contradict themselves.
  """
  kind = _value(metadata, "tokenizer.ggml.model", str, where)
  if kind is None:
    return f"{where} holds no tokenizer; set tokenizer_path and tokenizer_type"
  name = _value(metadata, "tokenizer.ggml.pre", str, where) or "default"
  pre_tokenizer = _pre_tokenizer(name) if kind == "gpt2" else None
  if pre_tokenizer is None:
    which = f"kind {kind!r}" if kind != "gpt2" else f"pre-tokenizer {name!r}"
    return f"{where}: its tokenizer ({which}) is not converted; set tokenizer_path and tokenizer_type"
  tokens = _value(metadata, "tokenizer.ggml.tokens", list, where)
  merges = _value(metadata, "tokenizer.ggml.merges", list, where)
  types = _value(metadata, "tokenizer.ggml.token_type", np.ndarray, where)
  if tokens is None or merges is None:
    raise ModelError(f"{where}: its tokenizer has no tokens or no merges")
  if types is None or len(types) != len(tokens):
    raise ModelError(f"{where}: its tokenizer has {len(tokens)} tokens and another number of token types")
  vocabulary = {token: index for index, token in enumerate(tokens)}
  if len(vocabulary) != len(tokens):
    raise ModelError(f"{where}: its tokenizer holds a token twice")
  pairs = [tuple(merge.split(" ")) for merge in merges]
  if any(len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys() for pair in pairs):
    raise ModelError(f"{where}: its tokenizer has a merge of tokens that do not exist")
  model: Any = models.BPE(vocabulary, pairs, ignore_merges=name in ("llama-bpe", "llama3", "llama-v3"))
  tokenizer = Tokenizer(model)
  if name == "qwen2":
    tokenizer.normalizer = normalizers.NFC()  # type: ignore[assignment]
  tokenizer.pre_tokenizer = pre_tokenizer
  tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
  added = [
    AddedToken(token, special=token_type == _CONTROL, normalized=False)
    for token, token_type in zip(tokens, types, strict=True)
    if token_type in (_CONTROL, _USER_DEFINED)
  ]
  # All of them are in the vocabulary, and keep their ids.
  tokenizer.add_special_tokens([token for token in added if token.special])
  tokenizer.add_tokens([token for token in added if not token.special])
  special = _special_tokens(metadata, tokens, where)
  if _value(metadata, "tokenizer.ggml.add_bos_token", bool, where) and "bos_token" in special:
    bos = special["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
      single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, vocabulary[bos])]
    )
  tokenizer.save(str(folder / "tokenizer.json"))
  config: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    **special,
    "clean_up_tokenization_spaces": False,
    "add_prefix_space": False,
  }
  context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
  if isinstance(context, int) and context:
    config["model_max_length"] = context
  template = metadata.get("tokenizer.chat_template")
  if isinstance(template, str):
    config["chat_template"] = template
  write_json(folder / "tokenizer_config.json", config)
  ids = {f"{key}_id": vocabulary[token] for key, token in special.items() if key != "unk_token"}
  write_json(folder / "generation_config.json", ids)
  return None


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str], where: str) -> dict[str, str]:
  special = {}
  for key, name in _SPECIAL.items():
    index = _value(metadata, f"tokenizer.ggml.{name}_token_id", int, where)
    if index is None:
      continue
    if not 0 <= index < len(tokens):
      raise ModelError(f"{where}: its tokenizer's {name} token {index} is not among its {len(tokens)} tokens")
    special[key] = tokens[index]
  return special


def _value[T](metadata: Mapping[str, Any], key: str, kind: type[T], where: str) -> T | None:
  """A value of the metadata; None where there is none.

  Raises:
    ModelError: it is of another type.
  """
  value = metadata.get(key)
  if value is None or type(value) is kind:
    return value
  raise ModelError(f"{where}: {key} is of type {type(value).__name__}, {kind.__name__} is needed; the file is broken")
