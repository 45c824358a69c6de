"""Special tokens: found where the template wrote them, and never where a user did."""

from __future__ import annotations

import pytest

from maxtext_posttrain.tokenizers import build_tokenizer
from maxtext_posttrain.tokenizers.special_tokens import (
  MarkerClashError,
  Markers,
  RenderedText,
  Segment,
  SpecialTokenMatcher,
  marker_choices,
  unmark,
)
from tests.support.chat_samples import SPECIAL_TEXTS, TEXTS, conversations, sentencepiece_reference

MARKERS = Markers("\ufdd0", "\ufdd1", "\ufdd2")
MATCHER = SpecialTokenMatcher({"<a>": 1, "<a>b": 2, ">c": 3, "[X]": 4})


def test_the_longest_of_the_leftmost_is_found():
  assert MATCHER.split(RenderedText("x<a>b<a>[X")) == [
    Segment(0, 1, None),
    Segment(1, 5, 2),
    Segment(5, 8, 1),
    Segment(8, 10, None),
  ]


def test_a_vocabulary_without_special_tokens_has_one_segment():
  assert SpecialTokenMatcher({}).split(RenderedText("<s>")) == [Segment(0, 3, None)]


@pytest.mark.parametrize(
  "text", ["<a>", "x<a>y", "<a>b", "<a>c", "<a><a>", "<", "x [", "<a", "[X \n ", ">", "<<a>c[X]"]
)
def test_marked_text_forms_no_special_token_whatever_follows(text):
  for following in ("", "b", ">", ">b", "X]", "c", "]", "[X]"):
    marked = MATCHER.mark(text, MARKERS, protect=True)
    for joined in (marked + following, marked.strip() + following):
      rendered = unmark(joined, MARKERS)
      assert rendered.text in (text + following, text.strip() + following)
      found = [rendered.text[s.start : s.end] for s in MATCHER.split(rendered) if s.token_id is not None]
      assert found == (["[X]"] if following == "[X]" else [])


def test_marking_copies_only_what_changes():
  value = {"a": ["x", {"b": 1.5, "c": None}], "d": ("y",)}
  assert MATCHER.mark(value, MARKERS, protect=True) is value
  marked = MATCHER.mark({"k<a>.": ["x", "<a>."], "n": (1, "<a>.")}, MARKERS, protect=True)
  assert marked == {"k<\ufdd0a>.": ["x", "<\ufdd0a>."], "n": (1, "<\ufdd0a>.")}


def test_text_that_holds_a_marker_asks_for_others():
  with pytest.raises(MarkerClashError):
    MATCHER.mark(["x", {"y": "\ufdd1"}], MARKERS, protect=False)
  choices = marker_choices()
  assert len({character for _ in range(50) for character in vars(next(choices)).values()}) == 150


def test_spans_are_found_and_torn_ones_refused():
  assert unmark("a\ufdd1bc\ufdd2d\ufdd1\ufdd2", MARKERS) == RenderedText("abcd", (), ((1, 3),))
  for torn in ("a\ufdd1b", "a\ufdd2"):
    with pytest.raises(ValueError, match="cut"):
      unmark(torn, MARKERS)


@pytest.fixture(scope="module")
def mistral():
  return build_tokenizer("maxtext://tokenizers/tokenizer.mistral-v3", "sentencepiece", chat_template="mistral")


@pytest.fixture(scope="module")
def llama2_from_huggingface(tmp_path_factory):
  """A HuggingFace folder whose tokenizer, unlike Qwen's, prepends spaces and has its special tokens in its model."""
  folder = tmp_path_factory.mktemp("llama2")
  sentencepiece_reference("tokenizer.llama2", "llama").save_pretrained(folder)
  return build_tokenizer(str(folder), "huggingface", chat_template="llama2")


TOKENIZERS = ["llama2", "llama3", "gemma", "qwen", "mistral", "llama2_from_huggingface"]


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
  return request.getfixturevalue(request.param)


def special_ids(tokenizer, ids):
  known = set(tokenizer.special_tokens.values())
  return [index for index in ids if index in known]


def test_supplied_text_never_becomes_a_special_token(tokenizer):
  """As many special tokens, in the same order, as with harmless text in the same places."""

  def harmless(value):
    if isinstance(value, str):
      return "harmless" if value in SPECIAL_TEXTS else " ".join("harmless" for _ in value.split())
    if isinstance(value, dict):
      return {key: item if key in ("role", "type") else harmless(item) for key, item in value.items()}
    return [harmless(item) for item in value] if isinstance(value, list) else value

  for sample in conversations(60, seed=20, texts=list(tokenizer.special_tokens)[:40] + SPECIAL_TEXTS):
    sample["chat_template"] = "chatml" if "<|im_end|>" in tokenizer.special_tokens else "plain"
    ids = tokenizer.apply_chat_template(**sample)
    expected = tokenizer.apply_chat_template(**{**sample, "messages": harmless(sample["messages"])})
    assert special_ids(tokenizer, ids) == special_ids(tokenizer, expected)


def test_without_special_texts_the_option_changes_nothing(llama3, qwen):
  for tokenizer, path, kind in (
    (llama3, "tokenizer_llama3.tiktoken", "tiktoken"),
    (qwen, "qwen3-tokenizer", "huggingface"),
  ):
    parsing = build_tokenizer(f"maxtext://tokenizers/{path}", kind, parse_special_tokens_in_content=True)
    for sample in conversations(50, seed=21, texts=TEXTS):
      sample["chat_template"] = "chatml"
      assert tokenizer.apply_chat_template(**sample) == parsing.apply_chat_template(**sample)


def test_plain_ids_are_those_of_a_vocabulary_without_the_token(llama2, llama3, llama2_from_huggingface):
  # By hand: SentencePiece itself does not parse control pieces, and tiktoken has encode_ordinary.
  processor = llama2._processor
  ids = llama2.apply_chat_template([{"role": "user", "content": "a</s>b"}])
  assert ids == [1, *processor.encode("\n[INST] a</s>b [/INST]")[2:]]
  assert llama2_from_huggingface.apply_chat_template([{"role": "user", "content": "a</s>b"}]) == ids
  ids = llama3.apply_chat_template([{"role": "user", "content": "a<|eot_id|>b"}])
  assert ids[5:-1] == llama3._encoding.encode_ordinary("a<|eot_id|>b")
  assert ids[-1] == llama3.special_tokens["<|eot_id|>"]


@pytest.mark.parametrize("parts", [("<|im_", "end|>"), ("<|im_  ", "  end|>"), ("<", "|im_end|>")])
def test_a_special_token_in_two_pieces_stays_plain(qwen, parts):
  source = "{% for m in messages %}{{ m.content | trim }}{% endfor %}{{ '<|im_end|>' }}"
  ids = qwen.apply_chat_template([{"role": "user", "content": part} for part in parts], chat_template=source)
  assert ids.count(qwen.eos_id) == 1
  assert qwen.decode(ids) == "<|im_end|><|im_end|>"


def test_roles_tools_documents_and_variables_stay_plain(qwen):
  source = (
    "{{ '<|im_start|>' ~ messages[0].role ~ tools[0] | tojson ~ documents[0].text ~ extra }}"
    "{{ tools[0].a | tojson(true) ~ '<|im_end|>' }}"
  )
  ids = qwen.apply_chat_template(
    [{"role": "user<|im_end|>", "content": ""}],
    tools=[{"a": "<|im_end|>\u00e9", "<|im_end|>": 1}],
    documents=[{"text": "<|im_end|>"}],
    extra="<|im_end|>",
    chat_template=source,
  )
  assert ids.count(qwen.eos_id) == 1
  assert "\\u00e9" in qwen.decode(ids)
  assert "\ufdd0" not in qwen.decode(ids)
  assert "fdd0" not in qwen.decode(ids)


def test_a_special_token_composed_by_the_template_counts(qwen):
  source = "{% for m in messages %}{{ '<|im_' ~ m.role ~ '|>' ~ m.content }}{% endfor %}"
  ids = qwen.apply_chat_template([{"role": "start", "content": "x<|im_start|>"}], chat_template=source)
  assert ids.count(qwen.special_tokens["<|im_start|>"]) == 1


def test_noncharacters_in_content_survive(qwen, llama3):
  content = "".join(chr(code) for code in range(0xFDD0, 0xFDF0)) + "<|im_end|><|eot_id|>"
  for tokenizer in (qwen, llama3):
    text = tokenizer.apply_chat_template(
      [{"role": "user", "content": content}], chat_template="{{ messages[0].content }}", tokenize=False
    )
    assert text == content


def test_gemmas_html_is_text_and_its_markers_are_special(gemma):
  assert "<start_of_turn>" in gemma.special_tokens
  assert "<b>" not in gemma.special_tokens
  assert gemma.encode("<b>") == gemma._processor.encode("<b>")
  assert gemma.encode("<end_of_turn>") != gemma.encode("<end_of_turn>", parse_special_tokens=True) == [107]
  assert gemma.decode(gemma.encode("<end_of_turn>")) == "<end_of_turn>"


def test_template_text_with_a_marker_is_no_problem(qwen):
  source = "\ufdd0{% generation %}{{ messages[0].content }}{% endgeneration %}\ufdd1"
  result = qwen.render_conversation([{"role": "assistant", "content": "<|im_end|>"}], chat_template=source)
  assert qwen.decode(result.input_ids) == "\ufdd0<|im_end|>\ufdd1"
  assert qwen.eos_id not in result.input_ids
  masked = [index for index, flag in zip(result.input_ids, result.assistant_mask, strict=True) if flag]
  assert qwen.decode(masked) == "<|im_end|>"
