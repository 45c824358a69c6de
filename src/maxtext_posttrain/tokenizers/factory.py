"""Builds a tokenizer from a path and a kind."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from maxtext_posttrain.errors import TokenizerError
from maxtext_posttrain.tokenizers.base import Tokenizer, TokenizerOptions
from maxtext_posttrain.tokenizers.chat_template import load_template

KINDS = ("sentencepiece", "tiktoken", "huggingface")


def configured_tokenizer(config: Any) -> Tokenizer | None:
  """The tokenizer that a configuration names, with its chat template; None where it names none.

  Args:
    config: MaxText's key names as attributes.

  Raises:
    TokenizerError: it can't be loaded.
  """
  if config.dataset_type == "synthetic" or not config.tokenizer_path:
    return None
  return build_tokenizer(
    config.tokenizer_path,
    config.tokenizer_type,
    chat_template=config.chat_template or config.chat_template_path or None,
    hf_access_token=config.hf_access_token or None,
    parse_special_tokens_in_content=config.parse_special_tokens_in_content,
    trust_remote_code=config.trust_remote_code,
  )


def build_tokenizer(
  path: str,
  kind: str,
  *,
  chat_template: str | None = None,
  hf_access_token: str | None = None,
  parse_special_tokens_in_content: bool = False,
  trust_remote_code: bool = False,
  add_bos: bool | None = None,
) -> Tokenizer:
  """Loads a tokenizer.

  Args:
    path: a file, a folder, or `maxtext://tokenizers/...` for a file in the installed maxtext's assets. For kind
      `huggingface` also a hub repository, `owner/name`; nothing is downloaded for any other path.
    kind: `sentencepiece`, `tiktoken` or `huggingface`.
    chat_template: a built-in name, a file or Jinja text (see `load_template`); by default the tokenizer's own, which
      only HuggingFace's have.
    hf_access_token: for hub repositories that need one.
    parse_special_tokens_in_content: let text of conversations become special tokens, as transformers does. Off, the
      spelling of a special token in a message, a tool or a document stays plain text.
    trust_remote_code: run code that a HuggingFace tokenizer brings along.
    add_bos: True puts bos in front of all that is encoded, where it is not in front already. None and False leave it
      to the template, and for plain text to `encode`'s argument.

  Raises:
    TokenizerError: the kind is unknown, or the tokenizer cannot be loaded.
    ChatTemplateError: the template cannot be found or compiled.
  """
  if kind not in KINDS:
    nearest = get_close_matches(str(kind), KINDS, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise TokenizerError(f"tokenizer_type {kind!r} is none of {', '.join(KINDS)}{hint}")
  template = None if chat_template is None else load_template(chat_template)
  options = TokenizerOptions(template, parse_special_tokens_in_content, add_bos)
  if kind == "sentencepiece":
    from maxtext_posttrain.tokenizers.sentencepiece import SentencePieceTokenizer

    return SentencePieceTokenizer(path, options)
  if kind == "tiktoken":
    from maxtext_posttrain.tokenizers.tiktoken import TikTokenTokenizer

    return TikTokenTokenizer(path, options)
  from maxtext_posttrain.tokenizers.huggingface import HuggingFaceTokenizer

  return HuggingFaceTokenizer(path, options, hf_access_token=hf_access_token, trust_remote_code=trust_remote_code)
