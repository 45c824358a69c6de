"""The assistant's tokens: by `{% generation %}`, and where a template has none."""

from __future__ import annotations

import re

import pytest

from maxtext_posttrain.errors import ChatTemplateError
from maxtext_posttrain.tokenizers.chat_template import load_template
from maxtext_posttrain.tokenizers.token_mask import mask_from_offsets
from tests.support.chat_samples import SPECIAL_TEXTS, TEMPLATES, TEXTS, conversations

TURNS = [
  {"role": "system", "content": "be kind"},
  {"role": "user", "content": "hi"},
  {"role": "assistant", "content": "Hello 😀"},
  {"role": "user", "content": "more"},
  {"role": "assistant", "content": "Sure\n"},
]


def trained(tokenizer, messages, **kwargs):
  """The text of each run of trained tokens."""
  result = tokenizer.render_conversation(messages, **kwargs)
  assert len(result.input_ids) == len(result.assistant_mask)
  runs, run = [], []
  for index, flag in zip(result.input_ids, [*result.assistant_mask, False], strict=False):
    if flag:
      run.append(index)
    elif run:
      runs.append(tokenizer.decode(run))
      run = []
  return [*runs, tokenizer.decode(run)] if run else runs


@pytest.mark.parametrize(
  ("name", "fixture", "expected"),
  [
    ("llama3", "llama3", ["Hello 😀<|eot_id|>", "Sure<|eot_id|>"]),
    ("chatml", "qwen", ["Hello 😀<|im_end|>", "Sure\n<|im_end|>"]),
    ("gemma", "gemma", ["Hello 😀<end_of_turn>", "Sure<end_of_turn>"]),
    ("llama2", "llama2", ["Hello 😀 </s>", "Sure </s>"]),
    ("mistral", "llama2", ["Hello 😀</s>", "Sure\n</s>"]),
    ("plain", "llama2", ["Hello 😀</s>", "Sure\n</s>"]),
    ("plain", "llama3", [" Hello 😀<|end_of_text|>", " Sure\n<|end_of_text|>"]),
  ],
)
def test_exactly_the_answers_and_their_ends_are_trained(name, fixture, expected, request):
  tokenizer = request.getfixturevalue(fixture)
  assert trained(tokenizer, TURNS, chat_template=name) == expected
  # Without the blocks the template says nothing; the fallback must come to the same.
  bare = re.sub(r"\{%-? (end)?generation -?%\}", "", load_template(name).text)
  assert "generation -%}" not in bare
  assert trained(tokenizer, TURNS, chat_template=bare) == expected


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("fixture", ["llama2", "llama3"])
def test_the_fallback_equals_the_blocks(name, fixture, request):
  """On generated conversations, but for Mistral's with tools; see the test below."""
  tokenizer = request.getfixturevalue(fixture)
  source = load_template(name).text
  bare = re.sub(r"\{%-? (end)?generation -?%\}", "", source)
  compared = 0
  for sample in conversations(60, seed=30, texts=TEXTS + SPECIAL_TEXTS):
    options = {"messages": sample["messages"], "tools": sample["tools"]}
    try:
      expected = tokenizer.render_conversation(**options, chat_template=source)
    except ChatTemplateError:
      continue
    if name == "mistral" and sample["tools"]:
      continue
    assert tokenizer.render_conversation(**options, chat_template=bare) == expected
    compared += 1
  assert compared >= 40


def test_qwens_own_template_trains_the_thinking_block_that_the_model_writes(qwen):
  # Qwen writes an empty thinking block into the last answer only, so the text before is not a prefix of the whole.
  assert trained(qwen, TURNS) == ["Hello 😀<|im_end|>", "<think>\n\n</think>\n\nSure\n<|im_end|>"]
  # Here the block is part of the generation prompt: the model does not write it.
  assert trained(qwen, TURNS, enable_thinking=False) == ["Hello 😀<|im_end|>", "Sure\n<|im_end|>"]


def test_the_trained_part_follows_the_generation_prompt(qwen, llama3):
  for tokenizer, options in ((qwen, {"enable_thinking": False}), (qwen, {"chat_template": "chatml"}), (llama3, {})):
    messages = TURNS[:3]
    result = tokenizer.render_conversation(messages, **options)
    prompt = tokenizer.apply_chat_template(messages[:2], add_generation_prompt=True, **options)
    if options.get("enable_thinking") is False:
      prompt = prompt[:-4]  # the block, which this template leaves out of the whole conversation's first line
    start = result.assistant_mask.index(True)
    assert result.input_ids[:start][: len(prompt)] == prompt
    assert not any(result.assistant_mask[:start])


def test_tool_calls_are_trained(qwen):
  call = {"function": {"name": "f", "arguments": {"x": 1}}}
  messages = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [call]},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "It is 42."},
  ]
  expected = ['<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>', "It is 42.<|im_end|>"]
  assert trained(qwen, messages, chat_template="chatml") == expected
  assert trained(qwen, messages)[1].endswith("It is 42.<|im_end|>")
  assert trained(qwen, messages)[0].endswith(expected[0])


def test_mistrals_moving_tools_are_found_or_refused(llama2):
  """Mistral writes the tools before the last user message, so the text of earlier turns is no prefix of the whole."""
  source = load_template("mistral").text
  bare = re.sub(r"\{%-? (end)?generation -?%\}", "", source)
  outcomes = {"found": 0, "refused": 0}
  for sample in conversations(60, seed=31, texts=TEXTS):
    options = {"messages": sample["messages"], "tools": sample["tools"]}
    expected = llama2.render_conversation(**options, chat_template=source)
    try:
      found = llama2.render_conversation(**options, chat_template=bare)
    except ChatTemplateError:
      outcomes["refused"] += 1
    else:
      assert found == expected
      outcomes["found"] += 1
  assert outcomes["found"] > 40
  assert 0 < outcomes["refused"] < 15


def test_a_template_that_shuffles_turns_is_an_error(qwen):
  source = "{% for m in messages | reverse %}{{ m.role ~ m.content ~ (messages | tojson | length) }}{% endfor %}"
  with pytest.raises(ChatTemplateError, match=r"cannot tell which text is the assistant's in message 2"):
    qwen.render_conversation(TURNS, chat_template=source)


def test_no_assistant_message_trains_nothing(qwen):
  assert trained(qwen, TURNS[:2]) == []


def test_the_mask_of_a_prompted_conversation_leaves_the_prompt_out(qwen):
  options = {"add_generation_prompt": True, "return_dict": True, "return_assistant_tokens_mask": True}
  result = qwen.apply_chat_template(TURNS[:3] + TURNS[3:4], **options)
  assert sum(result["assistant_masks"]) == len(qwen.encode("Hello 😀")) + 1
  assert result["assistant_masks"][-4:] == [0] * 4


def test_generation_blocks_in_macros_and_set_blocks_are_found(qwen):
  # Where transformers counts what was printed so far, and so takes these blocks to be at the text's beginning.
  source = (
    "{% macro turn(m) %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %};{% endmacro %}"
    "{% for m in messages %}{% set text %}{{ turn(m) }}{% endset %}{{ text }}{% endfor %}"
  )
  assert trained(qwen, TURNS[2:3], chat_template=source) == [" Hello 😀"]


@pytest.mark.parametrize(
  ("offsets", "spans", "expected"),
  [
    ([(0, 2), (2, 5), (5, 6)], [(2, 5)], [False, True, False]),
    ([(0, 2), (2, 5), (5, 6)], [(1, 3)], [True, True, False]),
    # SentencePiece: the bytes of a character, of which only the last has the character's range.
    ([(0, 1), (1, 1), (1, 1), (1, 5), (5, 6)], [(1, 5)], [False, True, True, True, False]),
    ([(0, 1), (1, 1), (1, 1), (1, 5), (5, 6)], [(5, 6)], [False, False, False, False, True]),
    # Byte-level BPE: each byte's token has the character's range.
    ([(0, 1), (1, 2), (1, 2), (2, 3)], [(1, 2)], [False, True, True, False]),
    # White space that was trimmed off its token.
    ([(0, 2), (3, 5)], [(2, 5)], [False, True]),
    ([(0, 2), (2, 4), (4, 6), (6, 8)], [(4, 5), (0, 1), (0, 2), (3, 3)], [True, False, True, False]),
    ([(0, 2)], [], [False]),
    ([], [(0, 1)], []),
  ],
)
def test_masks_from_offsets(offsets, spans, expected):
  assert mask_from_offsets(offsets, spans) == expected
