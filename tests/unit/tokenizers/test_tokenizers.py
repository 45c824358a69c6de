"""The interface that the three kinds of tokenizers share."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import time

import numpy as np
import pytest

from maxtext_posttrain.errors import ChatTemplateError, TokenizerError
from maxtext_posttrain.tokenizers import TokenId, build_tokenizer
from tests.support.chat_samples import asset

KINDS = {"llama2": "sentencepiece", "llama3": "tiktoken", "gemma": "sentencepiece", "qwen": "huggingface"}
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(params=KINDS)
def tokenizer(request):
  return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def default():
  """MaxText's own vocabulary: no byte pieces, text is normalized."""
  return build_tokenizer("maxtext://tokenizers/tokenizer.default", "sentencepiece", chat_template="plain")


def test_ids_read_as_attributes_and_by_calls(llama2, llama3, gemma, qwen):
  # From the vocabularies' own files and documentation.
  assert (llama2.bos_id, llama2.eos_id, llama2.pad_id, llama2.vocab_size) == (1, 2, 2, 32000)
  assert (llama3.bos_id, llama3.eos_id, llama3.pad_id, llama3.vocab_size) == (128000, 128001, 128001, 128256)
  assert (gemma.bos_id, gemma.eos_id, gemma.pad_id, gemma.vocab_size) == (2, 1, 0, 256000)
  assert (qwen.bos_id, qwen.eos_id, qwen.pad_id, qwen.vocab_size) == (-1, 151645, 151643, 151669)
  for tokenizer in (llama2, llama3, gemma, qwen):
    for name in ("bos_id", "eos_id", "pad_id"):
      value = getattr(tokenizer, name)
      assert value() == value
      assert isinstance(value, int)
      assert np.asarray([value]).dtype == np.asarray([1]).dtype
      assert json.dumps(value) == str(int(value))


def test_a_missing_id_is_false_and_zero_is_not(gemma, qwen):
  assert not qwen.bos_id
  assert not qwen.bos_id()
  assert gemma.pad_id == 0
  assert gemma.pad_id
  assert TokenId(0)


def test_special_token_ids(llama3, qwen):
  assert llama3.special_tokens["<|eot_id|>"] == 128009
  assert llama3.special_tokens["<|start_header_id|>"] == 128006
  assert llama3.special_tokens["<|reserved_special_token_250|>"] == 128255
  assert len(llama3.special_tokens) == 256
  assert qwen.special_tokens["<|im_end|>"] == 151645
  assert "<think>" not in qwen.special_tokens


def test_text_is_encoded_as_in_pretraining(llama2, llama3, default):
  """As MaxText's own tokenizers do it, which are these libraries' plain calls."""
  for text in ("Hello world", " x", "a  b\n\nc", "</s> <|eot_id|>", "", "naïve 😀"):
    assert llama2.encode(text) == llama2._processor.EncodeAsIds(text)
    assert default.encode(text) == default._processor.EncodeAsIds(text)
    assert llama3.encode(text) == llama3._encoding.encode_ordinary(text)


def test_bos_and_eos_are_added_once(tokenizer):
  plain = tokenizer.encode("hi")
  bos = [int(tokenizer.bos_id)] if tokenizer.bos_id else []
  assert tokenizer.encode("hi", add_bos=True, add_eos=True) == [*bos, *plain, tokenizer.eos_id]
  assert all(type(index) is int for index in tokenizer.encode("hi", add_bos=True, add_eos=True))
  spelled = {index: token for token, index in tokenizer.special_tokens.items()}
  text = f"{spelled.get(tokenizer.bos_id, '')}hi{spelled[tokenizer.eos_id]}"
  ids = tokenizer.encode(text, add_bos=True, add_eos=True, parse_special_tokens=True)
  assert ids.count(tokenizer.eos_id) == 1
  assert ids.count(tokenizer.bos_id) == len(bos)
  assert ids[-1] == tokenizer.eos_id


@pytest.mark.parametrize("add_bos", [True, False, None])
def test_a_tokenizer_that_adds_bos_adds_it_once(add_bos):
  tokenizer = build_tokenizer("maxtext://tokenizers/tokenizer.llama2", "sentencepiece", add_bos=add_bos)
  ids = tokenizer.apply_chat_template(USER, chat_template="llama2")
  assert ids[0] == 1
  assert ids[1] != 1
  result = tokenizer.render_conversation([*USER, {"role": "assistant", "content": "x"}], chat_template="chatml")
  assert result.input_ids.count(1) == (1 if add_bos else 0)
  assert (result.input_ids[0] == 1) == bool(add_bos)
  assert not result.assistant_mask[0]
  assert len(result.assistant_mask) == len(result.input_ids)
  assert tokenizer.encode("hi").count(1) == (1 if add_bos else 0)


def test_no_end_token_to_add_is_an_error(qwen):
  lacking = copy.copy(qwen)
  lacking.eos_id = TokenId(-1)
  with pytest.raises(TokenizerError, match="no end-of-sequence token"):
    lacking.encode("x", add_eos=True)


def test_decoding_returns_the_text(tokenizer):
  for text in ("Hello world", " leading", "a  b\n\nc ", "日本 😀", "", "<|eot_id|></s>"):
    ids = tokenizer.encode(text, add_bos=True, add_eos=True)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode(np.asarray(ids), skip_special_tokens=True) == text
  text = tokenizer.apply_chat_template(USER, tokenize=False)
  assert tokenizer.decode(tokenizer.apply_chat_template(USER)) == text


def test_ids_outside_the_vocabulary_are_errors(tokenizer):
  for index in (-1, tokenizer.vocab_size):
    with pytest.raises(TokenizerError, match=f"id {index} is not in 0"):
      tokenizer.decode([1, index])


def test_lone_surrogates_become_replacement_characters(tokenizer):
  text = "a\ud83d \udc00<\udfff"
  expected = text.translate({0xD83D: 0xFFFD, 0xDC00: 0xFFFD, 0xDFFF: 0xFFFD})
  assert tokenizer.encode(text) == tokenizer.encode(expected)
  messages, clean = ([{"role": "user", "content": t + "<|eot_id|>"}] for t in (text, expected))
  assert tokenizer.apply_chat_template(messages) == tokenizer.apply_chat_template(clean)


def test_long_runs_do_not_overflow(llama3):
  for text in (" " * 60_000, "x" * 60_000, "a b" * 30_000):
    assert llama3.decode(llama3.encode(text)) == text


def test_normalizing_vocabularies_keep_their_special_tokens(default):
  messages = [*USER, {"role": "assistant", "content": "a ﬁne </s> day"}]
  result = default.render_conversation(messages)
  assert result.input_ids[0] == default.bos_id
  assert result.input_ids.count(default.eos_id) == 1
  masked = [index for index, flag in zip(result.input_ids, result.assistant_mask, strict=True) if flag]
  assert default.decode(masked).strip() == "a fine </s> day</s>"


def test_results_by_option(tokenizer):
  text = tokenizer.apply_chat_template(USER, tokenize=False)
  ids = tokenizer.apply_chat_template(USER)
  assert isinstance(text, str)
  assert ids == tokenizer.encode(text, parse_special_tokens=True)
  assert tokenizer.apply_chat_template(USER, return_dict=True) == {
    "input_ids": ids,
    "attention_mask": [1] * len(ids),
  }
  marked = tokenizer.apply_chat_template(USER, return_dict=True, return_assistant_tokens_mask=True)
  assert marked["assistant_masks"] == [0] * len(ids)
  with pytest.raises(TokenizerError, match="needs tokenize=True and return_dict=True"):
    tokenizer.apply_chat_template(USER, return_assistant_tokens_mask=True)


@pytest.mark.parametrize("option", ["padding", "truncation", "max_length", "return_tensors", "continue_final_message"])
def test_options_that_are_not_supported_are_refused(llama2, option):
  with pytest.raises(TokenizerError, match=f"does not take {option}"):
    llama2.apply_chat_template(USER, **{option: True})
  assert llama2.apply_chat_template(USER, **{option: False}) == llama2.apply_chat_template(USER)


@pytest.mark.parametrize(
  ("messages", "reason"),
  [
    ("hi", "must be a list of dicts"),
    ({"role": "user"}, "must be a list of dicts"),
    (["hi"], "message 0 must be a dict with a role"),
    ([USER], "message 0 must be a dict with a role"),
    ([{"content": "x"}], "message 0 must be a dict with a role"),
    ([{"role": 1, "content": "x"}], "message 0 must be a dict with a role"),
  ],
)
def test_what_is_no_conversation(llama2, messages, reason):
  with pytest.raises(ChatTemplateError, match=reason):
    llama2.render_conversation(messages)


def test_what_is_no_tool(llama2):
  for tool, reason in (("f", "not str"), (lambda x: x, "no JSON schema")):
    with pytest.raises(ChatTemplateError, match=reason):
      llama2.apply_chat_template(USER, tools=[tool])


def test_no_template_is_an_error_that_names_the_built_in_ones():
  tokenizer = build_tokenizer("maxtext://tokenizers/tokenizer.llama2", "sentencepiece")
  assert tokenizer.chat_template is None
  with pytest.raises(ChatTemplateError, match=r"has no chat template; .*chatml, gemma, llama2, llama3, mistral, plain"):
    tokenizer.render_conversation(USER)


def test_a_conversation_with_tools_uses_the_template_for_tools(tmp_path):
  named = [{"name": "default", "template": "d{{ 1 }}"}, {"name": "tool_use", "template": "t{{ 1 }}"}]
  (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": named}))
  tokenizer = build_tokenizer(
    "maxtext://tokenizers/tokenizer.llama2", "sentencepiece", chat_template=str(tmp_path / "chat_template.json")
  )
  assert tokenizer.apply_chat_template(USER, tokenize=False) == "d1"
  assert tokenizer.apply_chat_template(USER, tools=[{"name": "f"}], tokenize=False) == "t1"


def test_fingerprints_tell_what_changes_ids_apart(tmp_path):
  path = "maxtext://tokenizers/tokenizer.llama2"
  options = [{}, {"chat_template": "plain"}, {"add_bos": True}, {"parse_special_tokens_in_content": True}]
  tokenizers = [build_tokenizer(path, "sentencepiece", **option) for option in options]
  shutil.copy(asset("tokenizer.llama2"), tmp_path / "copy.model")
  others = [
    tokenizers[0].parsing_special_tokens(),
    build_tokenizer(str(asset("tokenizer.mistral-v1")), "sentencepiece"),
  ]
  assert len({tokenizer.fingerprint for tokenizer in (*tokenizers, *others)}) == len(options) + len(others)
  same = build_tokenizer(str(tmp_path), "sentencepiece")
  assert same.fingerprint == tokenizers[0].fingerprint


def test_a_tokenizer_can_be_sent_to_another_process(tokenizer):
  messages = [*USER, {"role": "assistant", "content": "x <|eot_id|></s><|im_end|>"}]
  before = tokenizer.render_conversation(messages)
  other = pickle.loads(pickle.dumps(tokenizer))
  assert other.render_conversation(messages) == before
  assert other.fingerprint == tokenizer.fingerprint


def test_a_long_conversation_is_no_attack(llama3):
  messages = [{"role": "user", "content": "hello <|eot_id|> world " * 900}, {"role": "assistant", "content": "ok"}] * 50
  for name in ("llama3", "chatml"):
    result = llama3.render_conversation(messages, chat_template=name)
    assert len(result.input_ids) > 300_000
    assert 50 <= sum(result.assistant_mask) < 500


def test_rendering_is_fast_enough(llama3):
  """A guard against work that grows with the vocabulary, not a benchmark: about a millisecond is usual."""
  messages = [*USER, {"role": "assistant", "content": "x <|eot_id|>"}] * 2
  llama3.render_conversation(messages)
  started = time.process_time()
  for _ in range(50):
    llama3.render_conversation(messages)
  assert (time.process_time() - started) / 50 < 0.01
