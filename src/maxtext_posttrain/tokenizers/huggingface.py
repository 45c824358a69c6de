"""HuggingFace tokenizers, from a folder or from the hub.

Text without supplied spellings of special tokens goes through the tokenizer exactly as transformers would send it.
Where there are such spellings, a second copy of the tokenizer is used in which each special token has a secret
spelling of its own: the special tokens that the template wrote are respelled so before the text is encoded, and what
was supplied stays plain text. Everything else about the tokenizer (its normalizer, what a special token does to the
white space around it) stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from bisect import bisect_right
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Backend

from maxtext_posttrain.errors import TokenizerError
from maxtext_posttrain.tokenizers.base import MISSING, TokenId, Tokenizer, TokenizerOptions
from maxtext_posttrain.tokenizers.chat_template import named_templates, one_line
from maxtext_posttrain.tokenizers.files import ASSET_SCHEME, kind_hint, local_path
from maxtext_posttrain.tokenizers.special_tokens import RenderedText
from maxtext_posttrain.tokenizers.token_mask import mask_from_offsets

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class HuggingFaceTokenizer(Tokenizer):
  """A tokenizer that transformers' AutoTokenizer loads and that has a Rust backend (`tokenizer.json`).

  Special tokens are those that its files call special; other added tokens (`<think>`, say) are text.
  """

  def __init__(
    self,
    path: str,
    options: TokenizerOptions,
    *,
    hf_access_token: str | None = None,
    trust_remote_code: bool = False,
  ):
    """Loads a folder, a `tokenizer.json` file or, where neither exists, a hub repository.

    Raises:
      TokenizerError: there is no such folder, file or repository, or it is not a tokenizer.
    """
    loaded = _load(path, hf_access_token, trust_remote_code)
    if not getattr(loaded, "is_fast", False):
      raise TokenizerError(f"tokenizer {path}: has no fast backend; save it with a tokenizer.json first")
    self._backend: Backend = loaded.backend_tokenizer
    self._backend.no_padding()
    self._backend.no_truncation()
    self.vocab_size = len(loaded)
    self.bos_id = _token_id(loaded.bos_token_id)
    self.eos_id = _token_id(loaded.eos_token_id)
    self.pad_id = _token_id(loaded.pad_token_id) or self.eos_id or _token_id(loaded.unk_token_id) or TokenId(0)
    special_tokens = {token.content: index for index, token in loaded.added_tokens_decoder.items() if token.special}
    named = {name: value for name, value in loaded.special_tokens_map.items() if isinstance(value, str)}
    if options.chat_template is None and loaded.chat_template is not None:
      own = named_templates(f"of {path}", loaded.chat_template)
      options = TokenizerOptions(own, options.parse_special_tokens_in_content, options.add_bos)
    super().__init__(path, options, special_tokens, named)

  def __getstate__(self) -> dict[str, Any]:
    # What can be made again is not sent to other processes.
    return {name: value for name, value in vars(self).items() if name not in ("_secrets", "_secret_backend")}

  def _encode_text(self, text: str) -> list[int]:
    marks = tuple(start + 1 for start in self._matcher.starts(text))
    return self._tokenize(RenderedText(text, marks), with_mask=False)[0]

  def _tokenize(self, rendered: RenderedText, *, with_mask: bool) -> tuple[list[int], list[bool]]:
    if rendered.content_marks:
      rendered = self._respell(rendered)
      encoded = self._secret_backend.encode(rendered.text, add_special_tokens=False)
    else:
      encoded = self._backend.encode(rendered.text, add_special_tokens=False)
    return encoded.ids, mask_from_offsets(encoded.offsets, rendered.spans) if with_mask else []

  def _respell(self, rendered: RenderedText) -> RenderedText:
    """Gives the template's special tokens their secret spellings, and moves the spans along."""
    pieces: list[str] = []
    olds: list[int] = []
    news: list[int] = []
    length = 0
    for segment in self._matcher.split(rendered):
      piece = rendered.text[segment.start : segment.end]
      olds.append(segment.start)
      news.append(length)
      pieces.append(piece if segment.token_id is None else self._secrets[piece])
      length += len(pieces[-1])
    olds.append(len(rendered.text))
    news.append(length)

    def moved(position: int) -> int:
      index = bisect_right(olds, position) - 1
      return news[index] + position - olds[index]

    spans = tuple((moved(start), moved(end)) for start, end in rendered.spans)
    return RenderedText("".join(pieces), (), spans)

  @cached_property
  def _secrets(self) -> dict[str, str]:
    """A spelling for each special token that nobody outside this process can guess."""
    nonce = secrets.token_hex(16)
    return {token: f"\ufdd0{nonce}x{index}\ufdd1" for index, token in enumerate(self._special_tokens)}

  @cached_property
  def _secret_backend(self) -> Backend:
    """A copy of the tokenizer that knows special tokens by their secret spellings only."""
    state = json.loads(self._backend.to_str())
    for token in state["added_tokens"]:
      token["content"] = self._secrets.get(token["content"], token["content"])
    model = state["model"]
    if isinstance(model["vocab"], dict):
      model["vocab"] = {self._secrets.get(token, token): index for token, index in model["vocab"].items()}
    else:
      model["vocab"] = [[self._secrets.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") is not None:
      model["unk_token"] = self._secrets.get(model["unk_token"], model["unk_token"])
    state["post_processor"] = None
    backend = Backend.from_str(json.dumps(state))
    if any(backend.token_to_id(self._secrets[token]) != index for token, index in self._special_tokens.items()):
      raise TokenizerError(
        f"tokenizer {self.name}: its special tokens cannot be told from the same words in a conversation; "
        "if no text can hold them, set parse_special_tokens_in_content=true"
      )
    return backend

  def _decode(self, ids: list[int]) -> str:
    return self._backend.decode(ids, skip_special_tokens=False)

  def _vocabulary_digest(self) -> str:
    return hashlib.sha256(self._backend.to_str().encode()).hexdigest()


def _token_id(index: int | None) -> TokenId:
  return MISSING if index is None else TokenId(index)


def _load(path: str, hf_access_token: str | None, trust_remote_code: bool) -> Any:
  """Loads with transformers; a hub repository only where `path` cannot be meant as a file or folder."""
  local = local_path(path)
  is_local = local.exists()
  if not is_local and (path.startswith((ASSET_SCHEME, "/", ".", "~")) or not _HUB_NAME.fullmatch(path)):
    raise TokenizerError(f"tokenizer {path}: no such folder or file")
  data = b""
  if local.is_file():
    data = local.read_bytes()
    if local.name != "tokenizer.json":
      raise TokenizerError(f"tokenizer {path}: name the folder or its tokenizer.json{kind_hint(data, 'huggingface')}")
    local = local.parent
  from transformers import AutoTokenizer

  try:
    if is_local:
      return AutoTokenizer.from_pretrained(str(local), local_files_only=True, trust_remote_code=trust_remote_code)
    return AutoTokenizer.from_pretrained(path, token=hf_access_token, trust_remote_code=trust_remote_code)
  except Exception as error:
    what = "the folder holds no tokenizer that can be loaded" if is_local else "no such folder, and the hub gave none"
    raise TokenizerError(f"tokenizer {path}: {what}: {one_line(error, 200)}") from error
