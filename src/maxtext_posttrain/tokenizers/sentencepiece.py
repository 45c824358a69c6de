"""SentencePiece models.

SentencePiece reads no control pieces in text, and puts a space before every text it encodes if the model says so.
So rendered text is split at its special tokens here, and only a text's own beginning gets that space, as transformers
has it: not when a special token or white space is there already.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Any

import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2 as model_pb2

from maxtext_posttrain.errors import TokenizerError
from maxtext_posttrain.tokenizers.base import MISSING, TokenId, TokenizerOptions
from maxtext_posttrain.tokenizers.chat_template import one_line
from maxtext_posttrain.tokenizers.files import kind_hint, vocabulary_file
from maxtext_posttrain.tokenizers.special_tokens import RenderedText, Segment, SpecialTokenMatcher
from maxtext_posttrain.tokenizers.token_mask import SegmentingTokenizer

_SPACE = "\u2581"
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
# HTML elements that Gemma's vocabularies have as pieces: ordinary text, unlike <start_of_turn> and its kind.
# fmt: off
_HTML = frozenset((
  "a", "b", "blockquote", "body", "caption", "code", "div", "em", "footer", "h1", "h2", "h3", "h4", "h5", "h6",
  "html", "i", "iframe", "img", "li", "ol", "p", "pre", "s", "span", "strong", "sub", "sup", "table", "tbody", "td",
  "tfoot", "th", "thead", "tr", "u", "ul",
))
# fmt: on


class SentencePieceTokenizer(SegmentingTokenizer):
  """A SentencePiece model file.

  Special tokens are its control pieces and the unknown piece, and those user-defined pieces that are markers: not
  white space and not HTML elements.
  """

  def __init__(self, path: str, options: TokenizerOptions):
    """Loads a model file, or the one `*.model` file of a folder.

    Raises:
      TokenizerError: there is no such file, or it is not a SentencePiece model.
    """
    file = vocabulary_file(path, ("*.model",))
    data = file.read_bytes()
    model = model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
      model.ParseFromString(data)
      self._processor = _load(data)
    except Exception as error:
      raise TokenizerError(
        f"tokenizer {path}: not a SentencePiece model ({one_line(error, 120)}){kind_hint(data, 'sentencepiece')}"
      ) from error
    self._digest = hashlib.sha256(data).hexdigest()
    # Text that does not begin a sequence gets no space before it.
    self._adds_space = model.normalizer_spec.add_dummy_prefix
    # Then the pieces, put together, are the text, but for what the unknown piece stands for.
    self._keeps_text = (
      not model.normalizer_spec.precompiled_charsmap
      and not model.normalizer_spec.remove_extra_whitespaces
      and model.normalizer_spec.escape_whitespaces
      and not model.trainer_spec.treat_whitespace_as_suffix
    )
    self._continuation = self._processor
    if self._adds_space:
      model.normalizer_spec.add_dummy_prefix = False
      self._continuation = _load(model.SerializeToString())
    self.vocab_size = self._processor.get_piece_size()
    self._pieces = {index: piece.piece for index, piece in enumerate(model.pieces) if _is_special(piece)}
    ids = {
      name: TokenId(index)
      for name in ("bos", "eos", "unk", "pad")
      if 0 <= (index := getattr(self._processor, f"{name}_id")()) < self.vocab_size
    }
    self._pieces |= {int(index): model.pieces[index].piece for index in ids.values()}
    self.bos_id = ids.get("bos", MISSING)
    self.eos_id = ids.get("eos", MISSING)
    self.pad_id = ids.get("pad") or ids.get("eos") or ids.get("unk") or TokenId(0)
    named = {f"{name}_token": model.pieces[index].piece for name, index in ids.items()}
    super().__init__(path, options, {piece: index for index, piece in self._pieces.items()}, named)
    self._user_defined = SpecialTokenMatcher(
      {piece: index for index, piece in self._pieces.items() if model.pieces[index].type == _USER_DEFINED}
    )

  def _encode_text(self, text: str) -> list[int]:
    breaks = [start + 1 for start in self._user_defined.starts(text)]
    return self._encode_pieces(text, breaks, self._processor)

  def _encode_segment(self, rendered: RenderedText, segment: Segment) -> list[int]:
    text = rendered.text[segment.start : segment.end]
    return self._encode_pieces(text, self._breaks(rendered, segment, text), self._processor_for(segment, text))

  def _token_bounds(self, rendered: RenderedText, segment: Segment, ids: list[int]) -> tuple[list[int], list[int]]:
    text = rendered.text[segment.start : segment.end]
    processor = self._processor_for(segment, text)
    if self._keeps_text:
      # The space that SentencePiece puts in front is not in the text.
      edges = self._edges(ids, before=int(self._adds_space and processor is self._processor))
      if edges[-1] == len(text.encode()):
        return edges[:-1], edges[1:]
    offsets: list[tuple[int, int]] = []
    base = 0
    for position, part in enumerate(_cut(text, self._breaks(rendered, segment, text))):
      encoded = (self._continuation if position else processor).encode(part, return_type="proto")
      offsets += [(base + piece.begin, base + piece.end) for piece in encoded.pieces]
      base += len(part.encode())
    if len(offsets) != len(ids):
      raise TokenizerError(f"tokenizer {self.name}: SentencePiece encodes the same text in two ways")
    return [start for start, _ in offsets], [end for _, end in offsets]

  def _byte_length(self, index: int) -> int:
    if self._processor.is_byte(index):
      return 1
    if self._processor.is_unknown(index):
      return -1  # It may stand for any text: this way the sum is never the text's length.
    return len(self._processor.id_to_piece(index).replace(_SPACE, " ").encode())

  def _processor_for(self, segment: Segment, text: str) -> Any:
    begins = segment.start == 0 and not text.startswith((" ", _SPACE))
    return self._processor if begins else self._continuation

  def _breaks(self, rendered: RenderedText, segment: Segment, text: str) -> list[int]:
    """Where user-defined pieces must be cut, so that SentencePiece does not find them: behind marked characters."""
    marked = {mark - segment.start for mark in rendered.content_marks if segment.start < mark < segment.end}
    return [start + 1 for start in self._user_defined.starts(text) if start + 1 in marked] if marked else []

  def _encode_pieces(self, text: str, breaks: list[int], processor: Any) -> list[int]:
    if not breaks:
      return _encode(processor, text)
    ids: list[int] = []
    for position, part in enumerate(_cut(text, breaks)):
      ids += _encode(self._continuation if position else processor, part)
    return ids

  def _decode(self, ids: list[int]) -> str:
    texts: list[str] = []
    run: list[int] = []
    for index in ids:
      if index in self._pieces:
        texts += (self._continuation.decode(run), self._pieces[index])
        run = []
      else:
        run.append(index)
    text = "".join((*texts, self._continuation.decode(run)))
    return text.removeprefix(" ") if self._adds_space else text

  def _vocabulary_digest(self) -> str:
    return self._digest


def _load(data: bytes) -> Any:
  processor = spm.SentencePieceProcessor()
  processor.LoadFromSerializedProto(data)
  return processor


def _encode(processor: Any, text: str) -> list[int]:
  # A list made of an array comes sooner than the list that SentencePiece makes itself.
  return processor.encode(text, return_type="numpy").tolist()


def _is_special(piece: Any) -> bool:
  if piece.type in (_UNKNOWN, _CONTROL):
    return True
  text = piece.piece
  if piece.type != _USER_DEFINED or not text.replace(_SPACE, " ").strip():
    return False
  return text.strip("</>").lower() not in _HTML


def _cut(text: str, breaks: list[int]) -> list[str]:
  edges = [0, *breaks, len(text)]
  return [text[start:end] for start, end in pairwise(edges) if start < end]
