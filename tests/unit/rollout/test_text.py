"""An end of turn that is ordinary text to the vocabulary ends an answer as one token would."""

from __future__ import annotations

import pytest

from maxtext_posttrain.rollout.options import Completion
from maxtext_posttrain.rollout.text import chat_stops, completion_text, written_end
from maxtext_posttrain.tokenizers import Tokenizer, build_tokenizer

_LLAMA2 = "maxtext://tokenizers/tokenizer.llama2"


@pytest.fixture(scope="module")
def chatml() -> Tokenizer:
  return build_tokenizer(_LLAMA2, "sentencepiece", chat_template="chatml")


def test_an_end_of_turn_in_several_tokens_is_told_by_what_no_answer_changes(chatml: Tokenizer):
  end, sequences = chat_stops(chatml)
  assert end is not None
  assert end.text == "<|im_end|>"
  assert sequences == (end.token_ids,)
  for answer in ("It is Paris.", "x = 3", "(see above)"):
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    rendered = chatml.render_conversation(messages)
    said = [token for token, trained in zip(rendered.input_ids, rendered.assistant_mask, strict=True) if trained]
    assert tuple(said[-len(end.token_ids) :]) == end.token_ids
    assert completion_text(chatml, Completion(said, [0.0] * len(said), "stop"), end).strip() == answer


@pytest.mark.parametrize("template", ["llama2", "plain"])
def test_no_written_end_where_a_special_token_ends_the_turn(template: str):
  assert written_end(build_tokenizer(_LLAMA2, "sentencepiece", chat_template=template)) is None
