"""Text in, text out: prompts through the chat template, and the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from maxtext_posttrain.errors import ChatTemplateError, GenerationError
from maxtext_posttrain.rollout.options import Completion
from maxtext_posttrain.tokenizers import Tokenizer

Message = Mapping[str, str]


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
    stops |= _end_of_turn(tokenizer)
  for text in named:
    ids = tokenizer.encode(text, parse_special_tokens=True)
    if len(ids) != 1:
      raise GenerationError(f"stop token {text!r} is {len(ids)} tokens of {tokenizer.name}: name one, as it is spelled")
    stops.add(ids[0])
  return tuple(sorted(stops))


def _end_of_turn(tokenizer: Tokenizer) -> set[int]:
  """The special token that the template puts after an assistant's words; none where it puts no such token."""
  turns = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]
  try:
    rendered = tokenizer.render_conversation(turns)
  except ChatTemplateError:
    return set()
  said = [token for token, trained in zip(rendered.input_ids, rendered.assistant_mask, strict=True) if trained]
  return {token for token in said[-1:] if token in tokenizer.special_tokens.values()}


def completion_text(tokenizer: Tokenizer, completion: Completion) -> str:
  """What a completion says; ids above the tokenizer's, which a padded vocabulary has, say nothing."""
  known = [token for token in completion.token_ids if token < tokenizer.vocab_size]
  return tokenizer.decode(known, skip_special_tokens=True)
