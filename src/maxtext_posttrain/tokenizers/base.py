"""What the three kinds of tokenizers have in common."""

from __future__ import annotations

import abc
import copy
import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Self

from maxtext_posttrain.errors import ChatTemplateError, TokenizerError
from maxtext_posttrain.tokenizers.assistant_span import find_assistant_spans
from maxtext_posttrain.tokenizers.chat_template import ChatTemplate, TemplateSource, builtin_names, load_template
from maxtext_posttrain.tokenizers.special_tokens import RenderedText, SpecialTokenMatcher

_TEMPLATES_KEPT = 8
_SURROGATE = re.compile("[\ud800-\udfff]")
_FOREIGN_OPTIONS = (
  "continue_final_message",
  "max_length",
  "padding",
  "return_tensors",
  "tokenizer_kwargs",
  "truncation",
)


class TokenId(int):
  """The id of a special token, readable as an attribute or by a call: `tokenizer.eos_id == tokenizer.eos_id()`.

  A token that the vocabulary lacks has the id -1, as in SentencePiece, and is false; any other, 0 included, is true.
  So `[t.bos_id()] if t.bos_id() else []` is right for every vocabulary, and -1 equals no id in a sequence.
  """

  def __call__(self) -> int:
    """The id itself."""
    return self

  def __bool__(self) -> bool:
    return self >= 0


MISSING = TokenId(-1)


@dataclass(frozen=True)
class RenderedConversation:
  """A conversation as tokens.

  Attributes:
    input_ids: token ids, length T.
    assistant_mask: length T; true for the assistant's tokens and the ones that end its turns.
  """

  input_ids: list[int]
  assistant_mask: list[bool]


@dataclass(frozen=True)
class TokenizerOptions:
  """How a tokenizer treats text; see `build_tokenizer`."""

  chat_template: TemplateSource | None = None
  parse_special_tokens_in_content: bool = False
  add_bos: bool | None = None


class Tokenizer(abc.ABC):
  """A vocabulary with its chat template.

  Attributes:
    name: where it is from, for messages.
    bos_id: begin-of-sequence id; -1 (and false) where there is none. Readable as `t.bos_id` and `t.bos_id()`.
    eos_id: end-of-sequence id, likewise.
    pad_id: the padding id, or else eos, or else unk, or else 0: never negative. It may equal `eos_id`, so padding is
      to be told by its position, not by its id.
    vocab_size: one more than the largest id.
  """

  name: str
  bos_id: TokenId
  eos_id: TokenId
  pad_id: TokenId
  vocab_size: int

  def __init__(
    self,
    name: str,
    options: TokenizerOptions,
    special_tokens: Mapping[str, int],
    named_tokens: Mapping[str, str],
  ):
    """Sets up what the kinds share.

    Args:
      name: for messages.
      options: see `build_tokenizer`.
      special_tokens: spelling to id.
      named_tokens: what templates see as `bos_token`, `eos_token`, ...
    """
    self.name = name
    self._options = options
    self._special_tokens = dict(special_tokens)
    self._special_ids = frozenset(self._special_tokens.values())
    self._named_tokens = dict(named_tokens)
    self._matcher = SpecialTokenMatcher(self._special_tokens)
    self._compiled: OrderedDict[str, ChatTemplate] = OrderedDict()
    self._parse_by_default = False
    self._fingerprint: str | None = None
    if options.chat_template is not None:
      # Compiled now, so that a broken template is found when a run starts.
      self._compile(options.chat_template.name, options.chat_template.text)

  @property
  def special_tokens(self) -> Mapping[str, int]:
    """Spelling to id of the tokens that supplied text never becomes."""
    return MappingProxyType(self._special_tokens)

  @property
  def chat_template(self) -> str | None:
    """The default chat template's Jinja text."""
    source = self._options.chat_template
    return None if source is None else source.text

  @property
  def fingerprint(self) -> str:
    """A hexadecimal digest of the vocabulary, the template and the options: equal ones give equal ids."""
    if self._fingerprint is None:
      self._fingerprint = self._digest_all()
    return self._fingerprint

  @property
  def vocabulary_fingerprint(self) -> str:
    """A hexadecimal digest of the vocabulary alone: with equal ones, an id stands for the same text."""
    digest = hashlib.sha256(self._vocabulary_digest().encode("utf-8", "surrogatepass"))
    digest.update(repr(sorted(self._special_tokens.items())).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()

  def _digest_all(self) -> str:
    source = self._options.chat_template
    digest = hashlib.sha256()
    for part in (
      type(self).__name__,
      self._vocabulary_digest(),
      repr(sorted(self._special_tokens.items())),
      repr(sorted(self._named_tokens.items())),
      repr(source and (source.text, source.tool_text)),
      repr((self._options.parse_special_tokens_in_content, self._options.add_bos, self._parse_by_default)),
    ):
      digest.update(hashlib.sha256(part.encode("utf-8", "surrogatepass")).digest())
    return digest.hexdigest()

  def parsing_special_tokens(self) -> Self:
    """This tokenizer, but `encode` reads special tokens in its text unless told otherwise.

    For callers such as Tunix, which render a conversation to text first and encode the text later.
    """
    other = copy.copy(self)
    other._fingerprint = None
    other._parse_by_default = True
    return other

  def encode(
    self, text: str, *, add_bos: bool = False, add_eos: bool = False, parse_special_tokens: bool | None = None
  ) -> list[int]:
    """Encodes text.

    Args:
      text: any text; lone surrogates become U+FFFD.
      add_bos: put bos in front, unless the text's first token is bos already. A vocabulary without bos adds none. A
        tokenizer built with `add_bos=True` always does this.
      add_eos: put eos at the end, unless the text's last token is eos already.
      parse_special_tokens: whether the spelling of a special token becomes that token, rather than plain text.
        The default is no; see `parsing_special_tokens`.

    Raises:
      TokenizerError: `add_eos` for a vocabulary without eos.
    """
    parse = self._parse_by_default if parse_special_tokens is None else parse_special_tokens
    text = _without_surrogates(text)
    if parse:
      ids, _ = self._tokenize(RenderedText(text), with_mask=False)
    else:
      ids = self._encode_text(text)
    if add_bos or self._options.add_bos:
      ids = self._with_bos(ids)
    if add_eos:
      if not self.eos_id:
        raise TokenizerError(f"tokenizer {self.name}: has no end-of-sequence token to add")
      if not ids or ids[-1] != self.eos_id:
        ids.append(int(self.eos_id))
    return ids

  def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
    """Decodes ids; special tokens are spelled out unless skipped.

    Raises:
      TokenizerError: an id is not in the vocabulary.
    """
    plain = [int(index) for index in ids]
    for index in plain:
      if not 0 <= index < self.vocab_size:
        raise TokenizerError(f"tokenizer {self.name}: id {index} is not in 0..{self.vocab_size - 1}")
    if skip_special_tokens:
      plain = [index for index in plain if index not in self._special_ids]
    return self._decode(plain)

  def apply_chat_template(
    self,
    messages: Sequence[Mapping[str, Any]],
    tokenize: bool = True,
    add_generation_prompt: bool = False,
    return_dict: bool = False,
    return_assistant_tokens_mask: bool = False,
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    **kwargs: Any,
  ) -> Any:
    """Renders a conversation with a chat template, as transformers' method of this name does.

    Args:
      messages: dicts with `role` and `content`, and what else the template reads.
      tokenize: return token ids rather than text.
      add_generation_prompt: end with what asks the assistant for an answer.
      return_dict: return `{"input_ids", "attention_mask"}`, each a list of length T.
      return_assistant_tokens_mask: add `assistant_masks`, 1 for the assistant's tokens; needs `return_dict`.
      tools: JSON schemas, or functions to make schemas of.
      documents: dicts for templates that read documents.
      chat_template: instead of the tokenizer's own; anything `load_template` takes.
      **kwargs: variables for the template.

    Returns:
      Text, a list of ids, or a dict of lists.

    Raises:
      ChatTemplateError: there is no template, it fails, or it refuses the conversation.
      TokenizerError: an option of transformers' that is not supported here.
    """
    if return_assistant_tokens_mask and not (tokenize and return_dict):
      raise TokenizerError("return_assistant_tokens_mask needs tokenize=True and return_dict=True")
    template, messages, variables = self._prepare(messages, tools, documents, chat_template, kwargs)
    rendered = self._render(
      template, messages, {**variables, "add_generation_prompt": add_generation_prompt}, return_assistant_tokens_mask
    )
    if not tokenize:
      return rendered.text
    ids, mask = self._tokenize_conversation(rendered, with_mask=return_assistant_tokens_mask)
    if not return_dict:
      return ids
    result: dict[str, list[int]] = {"input_ids": ids, "attention_mask": [1] * len(ids)}
    if return_assistant_tokens_mask:
      result["assistant_masks"] = [int(flag) for flag in mask]
    return result

  def render_conversation(
    self,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    **kwargs: Any,
  ) -> RenderedConversation:
    """Renders a whole conversation for training: ids and which of them are the assistant's.

    Where the template has `{% generation %}` blocks they say which; elsewhere see `assistant_span`. The arguments are
    those of `apply_chat_template`.

    Raises:
      ChatTemplateError: there is no template, it fails, or it refuses the conversation.
    """
    template, messages, variables = self._prepare(messages, tools, documents, chat_template, kwargs)
    rendered = self._render(template, messages, {**variables, "add_generation_prompt": False}, True)
    ids, mask = self._tokenize_conversation(rendered, with_mask=True)
    return RenderedConversation(ids, mask)

  # What each kind of tokenizer does in its own way.

  @abc.abstractmethod
  def _encode_text(self, text: str) -> list[int]:
    """Encodes text that stands alone, special tokens' spellings as plain text."""

  @abc.abstractmethod
  def _decode(self, ids: list[int]) -> str:
    """Decodes valid ids, special tokens spelled out."""

  @abc.abstractmethod
  def _tokenize(self, rendered: RenderedText, *, with_mask: bool) -> tuple[list[int], list[bool]]:
    """Encodes rendered text, special tokens outside its content marks as such; the mask covers its spans."""

  @abc.abstractmethod
  def _vocabulary_digest(self) -> str:
    """A digest of the vocabulary."""

  # Shared steps.

  def _prepare(
    self,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None,
    documents: Sequence[Mapping[str, Any]] | None,
    chat_template: str | None,
    kwargs: Mapping[str, Any],
  ) -> tuple[ChatTemplate, list[Mapping[str, Any]], dict[str, Any]]:
    for option, value in kwargs.items():
      if value and option in _FOREIGN_OPTIONS:
        raise TokenizerError(f"apply_chat_template does not take {option}; it pads, cuts and continues nothing")
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
      raise ChatTemplateError(f"messages must be a list of dicts with role and content, not {type(messages).__name__}")
    checked: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
      if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ChatTemplateError(f"message {index} must be a dict with a role, which is a string")
      checked.append(message)
    variables = {
      **self._named_tokens,
      **{key: value for key, value in kwargs.items() if key not in _FOREIGN_OPTIONS},
      "tools": None if tools is None else [_tool_schema(tool) for tool in tools],
      "documents": None if documents is None else list(documents),
    }
    return self._choose_template(chat_template, tools is not None), checked, variables

  def _choose_template(self, chat_template: str | None, with_tools: bool) -> ChatTemplate:
    source = self._options.chat_template if chat_template is None else load_template(chat_template)
    if source is None:
      raise ChatTemplateError(
        f"tokenizer {self.name} has no chat template; set chat_template to a file or to one of "
        f"{', '.join(builtin_names())}"
      )
    text = source.tool_text if with_tools and source.tool_text is not None else source.text
    return self._compile(source.name, text)

  def _compile(self, name: str, text: str) -> ChatTemplate:
    template = self._compiled.get(text)
    if template is None:
      template = self._compiled[text] = ChatTemplate(name, text)
      if len(self._compiled) > _TEMPLATES_KEPT:
        self._compiled.popitem(last=False)
    return template

  def _render(
    self, template: ChatTemplate, messages: list[Mapping[str, Any]], variables: dict[str, Any], find_assistant: bool
  ) -> RenderedText:
    matcher = None if self._options.parse_special_tokens_in_content else self._matcher
    if not find_assistant or template.marks_generation:
      return template.render(messages, variables, matcher, mark_generation=find_assistant)
    rendered = template.render(messages, variables, matcher)

    def render(part: Sequence[Mapping[str, Any]], prompt: bool) -> str:
      return template.render(part, {**variables, "add_generation_prompt": prompt}, matcher).text

    bare = rendered.text
    if variables["add_generation_prompt"]:
      bare = render(messages, False)
      if not rendered.text.startswith(bare):
        raise ChatTemplateError(f"chat template {template.name}: its generation prompt changes the text before it")
    spans = find_assistant_spans(template.name, messages, bare, render)
    return RenderedText(rendered.text, rendered.content_marks, spans)

  def _tokenize_conversation(self, rendered: RenderedText, *, with_mask: bool) -> tuple[list[int], list[bool]]:
    text = _without_surrogates(rendered.text)
    if text is not rendered.text:
      rendered = replace(rendered, text=text)
    ids, mask = self._tokenize(rendered, with_mask=with_mask)
    if self._options.add_bos and self.bos_id and (not ids or ids[0] != self.bos_id):
      return [int(self.bos_id), *ids], [False, *mask] if with_mask else mask
    return ids, mask

  def _with_bos(self, ids: list[int]) -> list[int]:
    if self.bos_id and (not ids or ids[0] != self.bos_id):
      return [int(self.bos_id), *ids]
    return ids


def _tool_schema(tool: Any) -> Mapping[str, Any]:
  if isinstance(tool, Mapping):
    return tool
  if callable(tool):
    from transformers.utils.chat_template_utils import get_json_schema

    try:
      return get_json_schema(tool)
    except Exception as error:
      raise ChatTemplateError(f"no JSON schema can be made of tool {tool!r}: {error}") from error
  raise ChatTemplateError(f"a tool must be a JSON schema or a function, not {type(tool).__name__}")


def _without_surrogates(text: str) -> str:
  """Text that UTF-8 can hold: lone surrogates, one character for one, become U+FFFD."""
  try:
    text.encode("utf-8")
  except UnicodeEncodeError:
    return _SURROGATE.sub("\ufffd", text)
  return text
