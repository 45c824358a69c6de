"""tiktoken vocabularies, with the special tokens and the splitting rule of Llama 3."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator
from itertools import groupby

import tiktoken

from maxtext_posttrain.errors import TokenizerError
from maxtext_posttrain.tokenizers.base import TokenId, TokenizerOptions
from maxtext_posttrain.tokenizers.files import kind_hint, vocabulary_file
from maxtext_posttrain.tokenizers.special_tokens import RenderedText, Segment
from maxtext_posttrain.tokenizers.token_mask import SegmentingTokenizer

# Contractions, words, up to three digits, punctuation, line ends, white space: Llama 3's rule, part of its vocabulary.
_PATTERN = "|".join(
  (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
  )
)
_SPECIAL_TOKENS = 256
_NAMED = {
  0: "<|begin_of_text|>",
  1: "<|end_of_text|>",
  6: "<|start_header_id|>",
  7: "<|end_header_id|>",
  9: "<|eot_id|>",
}
# tiktoken's regular expression overflows its stack in longer runs; Llama 3's own code cuts at the same length.
_LONGEST_RUN = 25_000


class TikTokenTokenizer(SegmentingTokenizer):
  """A `.tiktoken` file: a line for each token, its bytes in base64 and its rank."""

  def __init__(self, path: str, options: TokenizerOptions):
    """Loads a file, or the one `*.tiktoken` file of a folder.

    Raises:
      TokenizerError: there is no such file, or it is not in tiktoken's format.
    """
    file = vocabulary_file(path, ("*.tiktoken", "tokenizer.model"))
    data = file.read_bytes()
    ranks = _read_ranks(path, data)
    self._digest = hashlib.sha256(data).hexdigest()
    self._encoding = tiktoken.Encoding(file.name, pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={})
    special_tokens = {name: len(ranks) + index for index, name in enumerate(_special_names())}
    self._spellings = {index: name for name, index in special_tokens.items()}
    self.vocab_size = len(ranks) + _SPECIAL_TOKENS
    self.bos_id = TokenId(special_tokens[_NAMED[0]])
    self.eos_id = TokenId(special_tokens[_NAMED[1]])
    self.pad_id = self.eos_id
    super().__init__(path, options, special_tokens, {"bos_token": _NAMED[0], "eos_token": _NAMED[1]})

  def _encode_text(self, text: str) -> list[int]:
    if len(text) <= _LONGEST_RUN:
      return self._encoding.encode_ordinary(text)
    return [index for part in _short_runs(text) for index in self._encoding.encode_ordinary(part)]

  def _encode_segment(self, rendered: RenderedText, segment: Segment) -> list[int]:
    return self._encode_text(rendered.text[segment.start : segment.end])

  def _token_bounds(self, rendered: RenderedText, segment: Segment, ids: list[int]) -> tuple[list[int], list[int]]:  # noqa: ARG002
    edges = self._edges(ids)
    return edges[:-1], edges[1:]

  def _byte_length(self, index: int) -> int:
    return len(self._encoding.decode_single_token_bytes(index))

  def _decode(self, ids: list[int]) -> str:
    data = bytearray()
    for special, run in groupby(ids, key=self._special_ids.__contains__):
      if special:
        data += "".join(self._spellings[index] for index in run).encode()
      else:
        data += self._encoding.decode_bytes(list(run))
    return data.decode("utf-8", errors="replace")

  def _vocabulary_digest(self) -> str:
    return self._digest


def _special_names() -> Iterator[str]:
  """Llama 3's special tokens in the order of their ids; those without a purpose are numbered."""
  reserved = 0
  for index in range(_SPECIAL_TOKENS):
    if index in _NAMED:
      yield _NAMED[index]
    else:
      yield f"<|reserved_special_token_{reserved}|>"
      reserved += 1


def _read_ranks(path: str, data: bytes) -> dict[bytes, int]:
  ranks: dict[bytes, int] = {}
  for number, line in enumerate(data.splitlines(), 1):
    if not line.strip():
      continue
    try:
      token, rank = line.split()
      ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
      hint = kind_hint(data, "tiktoken")
      raise TokenizerError(f"tokenizer {path}, line {number}: not base64 bytes and a rank{hint}") from error
  if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes((byte,)) not in ranks for byte in range(256)):
    raise TokenizerError(
      f"tokenizer {path}: the ranks are not 0 to {len(ranks) - 1}, or a single byte has none; the file is incomplete"
    )
  return ranks


def _short_runs(text: str) -> Iterator[str]:
  """Cuts text where a run of white space, or of anything else, exceeds the longest allowed."""
  start = length = 0
  space = False
  for position, character in enumerate(text):
    if character.isspace() == space:
      length += 1
      if length > _LONGEST_RUN:
        yield text[start:position]
        start, length = position, 1
    else:
      space, length = not space, 1
  yield text[start:]
