"""A loaded model that answers in text: prompts through its chat template, into the native engine and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from maxtext_posttrain.errors import ConfigError
from maxtext_posttrain.models.loading import LoadedModel
from maxtext_posttrain.rollout.native import NativeEngine
from maxtext_posttrain.rollout.options import Completion, SamplingOptions
from maxtext_posttrain.rollout.text import (
  Message,
  chat_prompt,
  completion_ends,
  completion_text,
  raw_prompt,
  turn,
)
from maxtext_posttrain.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class Answer:
  """A completion, and what it says without what ends it."""

  text: str
  completion: Completion


class ChatModel:
  """A model with its tokenizer and engine."""

  def __init__(self, loaded: LoadedModel, *, raw: bool = False, stops: Sequence[str] = ()):
    """Builds the engine.

    Args:
      loaded: from `models.loading.load_model`.
      raw: prompts are plain text; else each is a user's turn in the chat template.
      stops: spellings of tokens that end an answer too.

    Raises:
      ConfigError: its configuration names no tokenizer.
      GenerationError: a stop is not one token.
    """
    if loaded.tokenizer is None:
      raise ConfigError(
        f"{loaded.source.config} names no tokenizer: prompts need one; give tokenizer_path=… and tokenizer_type=…,"
        " and dataset_type=hf hf_path=json where it says synthetic"
      )
    self._tokenizer: Tokenizer = loaded.tokenizer
    self._raw = raw
    self._ends = completion_ends(self._tokenizer, loaded.maxtext.vocab_size, stops, chat=not raw)
    self._engine = NativeEngine(loaded.maxtext, loaded.mesh, loaded.model)

  def answer(self, texts: Sequence[str], sampling: SamplingOptions, *, system: str | None = None) -> list[Answer]:
    """Answers each text by itself: `sampling.n` answers of the first, then of the second.

    Raises:
      GenerationError: a prompt leaves no room in the model's context.
    """
    if self._raw:
      return self._complete([raw_prompt(self._tokenizer, text) for text in texts], sampling)
    before = [] if system is None else [turn("system", system)]
    return self._complete([chat_prompt(self._tokenizer, [*before, turn("user", text)]) for text in texts], sampling)

  def reply(self, messages: Sequence[Message], sampling: SamplingOptions) -> Answer:
    """The assistant's next turn in a conversation; raises as `answer`."""
    return self._complete([chat_prompt(self._tokenizer, messages)], sampling)[0]

  def _complete(self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions) -> list[Answer]:
    completions = self._engine.generate(prompts, self._ends.on(sampling))
    return [Answer(completion_text(self._tokenizer, each, self._ends.written), each) for each in completions]
