"""Text in, text out: prompts through the chat template, and the tokens that end an answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from maxtext_posttrain.errors import ChatTemplateError, GenerationError
from maxtext_posttrain.rollout.options import Completion, SamplingOptions
from maxtext_posttrain.tokenizers import Tokenizer

Message = Mapping[str, str]
_WORDS = ("Yes.", "so it is", "(17)")
"""Answers that end with a mark, a letter and a bracket: what follows may share a token with each."""


def turn(role: str, content: str) -> dict[str, str]:
  """One message of a conversation."""
  return {"role": role, "content": content}


def chat_prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
  """The ids of a conversation, up to where the assistant answers."""
  return tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def raw_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
  """The ids of plain text, after the vocabulary's bos where it has one; special tokens' spellings are read."""
  return tokenizer.encode(text, add_bos=True, parse_special_tokens=True)


def stop_tokens(tokenizer: Tokenizer, named: Sequence[str], *, chat: bool) -> tuple[int, ...]:
  """The tokens that end a completion: eos, the special token that ends an assistant's turn, and those that are named.

  Args:
    tokenizer: with its template.
    named: spellings, each of one token.
    chat: whether the template is used.

  Raises:
    GenerationError: a spelling is not one token.
  """
  stops = {int(tokenizer.eos_id)} if tokenizer.eos_id else set()
  if chat:
    stops |= _end_ofturn(tokenizer)
  for text in named:
    ids = tokenizer.encode(text, parse_special_tokens=True)
    if len(ids) != 1:
      raise GenerationError(f"stop token {text!r} is {len(ids)} tokens of {tokenizer.name}: name one, as it is spelled")
    stops.add(ids[0])
  return tuple(sorted(stops))


def _end_ofturn(tokenizer: Tokenizer) -> set[int]:
  """The special token that the template puts after an assistant's words; none where it puts no such token."""
  turns = [turn("user", "."), turn("assistant", ".")]
  try:
    rendered = tokenizer.render_conversation(turns)
  except ChatTemplateError:
    return set()
  said = [token for token, trained in zip(rendered.input_ids, rendered.assistant_mask, strict=True) if trained]
  return {token for token in said[-1:] if token in tokenizer.special_tokens.values()}


@dataclasses.dataclass(frozen=True)
class WrittenEnd:
  """An end of turn that is ordinary text to the vocabulary, as `<|im_end|>` is to Llama 2's.

  Attributes:
    text: as it is spelled.
    token_ids: with which it ends whatever stands before it; its first characters may share a token with that.
  """

  text: str
  token_ids: tuple[int, ...]


def written_end(tokenizer: Tokenizer) -> WrittenEnd | None:
  """The text that the template puts after an assistant's words; None where it is a special token, or none is."""
  said: list[list[int]] = []
  ends: set[str] = set()
  for words in _WORDS:
    try:
      rendered = tokenizer.render_conversation([turn("user", "."), turn("assistant", words)])
    except ChatTemplateError:
      return None
    trained = [token for token, is_said in zip(rendered.input_ids, rendered.assistant_mask, strict=True) if is_said]
    said.append(trained)
    ends.add(tokenizer.decode(trained).rpartition(words)[2].strip())
  if len(ends) != 1 or not (text := ends.pop()) or {ids[-1] for ids in said} & set(tokenizer.special_tokens.values()):
    return None
  shared = 0
  while shared < min(map(len, said)) and len({ids[-shared - 1] for ids in said}) == 1:
    shared += 1
  token_ids = tuple(said[0][-shared:]) if shared else ()
  # A few last characters of it, as >, may stand in any answer.
  whole = len(tokenizer.decode(list(token_ids)).strip()) >= len(text) - 1
  return WrittenEnd(text, token_ids if whole else ())


def chat_stops(tokenizer: Tokenizer) -> tuple[WrittenEnd | None, tuple[tuple[int, ...], ...]]:
  """The written end of turn, and the stop sequences that it means to an engine."""
  end = written_end(tokenizer)
  return end, () if end is None or not end.token_ids else (end.token_ids,)


@dataclasses.dataclass(frozen=True)
class CompletionEnds:
  """All that ends a completion.

  Attributes:
    stop_token_ids: each of which ends it.
    stop_sequences: each of which ends it.
    written: the end of turn that its text goes up to.
  """

  stop_token_ids: tuple[int, ...]
  stop_sequences: tuple[tuple[int, ...], ...]
  written: WrittenEnd | None

  def on(self, sampling: SamplingOptions) -> SamplingOptions:
    """`sampling` with these in the place of its own."""
    return dataclasses.replace(sampling, stop_token_ids=self.stop_token_ids, stop_sequences=self.stop_sequences)


def completion_ends(
  tokenizer: Tokenizer, vocab_size: int, named: Sequence[str] = (), *, chat: bool = True
) -> CompletionEnds:
  """What ends the completions of a model whose vocabulary may be smaller than its tokenizer's.

  Args:
    tokenizer: with its template.
    vocab_size: the model's.
    named: spellings of stop tokens, each of one token.
    chat: whether the template is used.

  Raises:
    GenerationError: a spelling is not one token.
  """
  stops = tuple(token for token in stop_tokens(tokenizer, named, chat=chat) if token < vocab_size)
  written, sequences = chat_stops(tokenizer) if chat else (None, ())
  return CompletionEnds(stops, sequences, written)


def completion_text(tokenizer: Tokenizer, completion: Completion, end: WrittenEnd | None = None) -> str:
  """What a completion says, up to a written end of turn.

  Ids above the tokenizer's, which a padded vocabulary has, say nothing.
  """
  known = [token for token in completion.token_ids if token < tokenizer.vocab_size]
  text = tokenizer.decode(known, skip_special_tokens=True)
  return text if end is None else text.partition(end.text)[0]
