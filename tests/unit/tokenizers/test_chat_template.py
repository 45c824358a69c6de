"""Chat templates: the formats we ship, by hand, and what a template may use."""

from __future__ import annotations

import json
import threading

import pytest

from maxtext_posttrain.errors import ChatTemplateError
from maxtext_posttrain.tokenizers.chat_template import ChatTemplate, builtin_names, load_template
from maxtext_posttrain.tokenizers.special_tokens import SpecialTokenMatcher
from tests.support.chat_samples import TEMPLATES

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [
  {"role": "system", "content": "be kind"},
  {"role": "user", "content": " hi\n"},
  {"role": "assistant", "content": "Hello"},
  {"role": "user", "content": "more"},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
TOOL_MESSAGES = [
  {"role": "user", "content": "q"},
  {"role": "assistant", "content": "", "tool_calls": [CALL]},
  {"role": "tool", "content": "42", "tool_call_id": "c1"},
  {"role": "tool", "content": "43"},
  {"role": "assistant", "content": "a"},
]


def render(name, messages, **variables):
  source = load_template(name)
  variables = {**TOKENS, "add_generation_prompt": False, "tools": None, **variables}
  return ChatTemplate(source.name, source.text).render(messages, variables, None).text


@pytest.mark.parametrize(
  ("name", "expected"),
  [
    (
      "llama3",
      "<s><|start_header_id|>system<|end_header_id|>\n\nbe kind<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
      "hi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
      "<|start_header_id|>user<|end_header_id|>\n\nmore<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    (
      "chatml",
      "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\n hi\n<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>"
      "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n",
    ),
    (
      "gemma",
      "<s><start_of_turn>user\nbe kind\n\nhi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
      "<start_of_turn>user\nmore<end_of_turn>\n<start_of_turn>model\n",
    ),
    ("llama2", "<s>[INST] <<SYS>>\nbe kind\n<</SYS>>\n\n hi [/INST] Hello </s><s>[INST] more [/INST]"),
    ("mistral", "<s>[INST] be kind\n\n hi\n[/INST] Hello</s>[INST] more[/INST]"),
    ("plain", "<s>System: be kind\n\nUser:  hi\n\n\nAssistant: Hello</s>\n\nUser: more\n\nAssistant:"),
  ],
)
def test_formats(name, expected):
  assert render(name, MESSAGES, add_generation_prompt=True) == expected


@pytest.mark.parametrize(
  ("name", "expected"),
  [
    (
      "chatml",
      "<|im_start|>user\nq<|im_end|>\n"
      '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call><|im_end|>\n'
      "<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\n43\n</tool_response><|im_end|>\n"
      "<|im_start|>assistant\na<|im_end|>\n",
    ),
    (
      "llama3",
      "<|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
      '{"name": "f", "parameters": {"x": "é"}}<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n42<|eot_id|>'
      "<|start_header_id|>ipython<|end_header_id|>\n\n43<|eot_id|>"
      "<|start_header_id|>assistant<|end_header_id|>\n\na<|eot_id|>",
    ),
    (
      "mistral",
      '[INST] q[/INST][TOOL_CALLS] [{"name": "f", "arguments": {"x": "é"}, "id": "c1"}]</s>'
      '[TOOL_RESULTS] {"content": "42", "call_id": "c1"}[/TOOL_RESULTS][TOOL_RESULTS] {"content": "43"}[/TOOL_RESULTS]'
      " a</s>",
    ),
  ],
)
def test_tool_calls(name, expected):
  assert render(name, TOOL_MESSAGES, bos_token="") == expected
  with_tools = render(name, TOOL_MESSAGES, bos_token="", tools=[TOOL])
  assert with_tools != expected
  assert '"name": "f"' in with_tools
  # Arguments given as JSON text, as OpenAI's interface has them, are written as they are.
  as_text = json.loads(json.dumps(TOOL_MESSAGES))
  as_text[1]["tool_calls"][0]["function"]["arguments"] = '{"x": "é"}'
  assert render(name, as_text, bos_token="") == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_content_in_one_part_is_content_as_a_string(name):
  in_parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in MESSAGES]
  assert render(name, in_parts) == render(name, MESSAGES)
  with pytest.raises(ChatTemplateError, match="image"):
    render(name, [{"role": "user", "content": [{"type": "image", "url": "x"}]}])


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
@pytest.mark.parametrize("name", TEMPLATES)
def test_empty_content(name, content):
  messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]
  empty = [{"role": "user", "content": ""}, {"role": "assistant", "content": "a"}]
  assert render(name, messages) == render(name, empty)
  assert "None" not in render(name, messages)


def test_a_template_that_reads_only_strings_gets_parts_joined():
  source = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %};{% endfor %}"
  parts = [{"type": "text", "text": "\n a "}, {"type": "text", "text": "\n"}, "x"]
  template = ChatTemplate("t", source)
  assert template.render([{"role": "user", "content": parts}], {}, None).text == "\n a \nx;"
  with pytest.raises(ChatTemplateError, match="text only, not a content part of type 'image'"):
    template.render([{"role": "user", "content": [{"type": "image"}]}], {}, None)


@pytest.mark.parametrize(
  ("name", "roles", "reason"),
  [
    ("gemma", ["user", "user"], "in turn"),
    ("gemma", ["assistant"], "in turn"),
    ("gemma", ["user", "system"], "only before the first user message"),
    ("gemma", ["system"], "needs a user message"),
    ("llama2", ["user", "assistant", "assistant"], "in turn"),
    ("llama2", ["user", "tool"], "in turn"),
    ("llama2", ["system"], "needs a user message"),
    ("mistral", ["user", "tool"], "only after an assistant message with tool calls"),
    ("mistral", ["user", "user"], "in turn"),
    ("mistral", ["system"], "needs a user message"),
  ],
)
def test_a_refused_conversation_is_one_line_with_its_roles(name, roles, reason):
  with pytest.raises(ChatTemplateError) as caught:
    render(name, [{"role": role, "content": "x"} for role in roles])
  message = str(caught.value)
  assert message.startswith(f"chat template {name}, line ")
  assert reason in message
  assert message.endswith(f"(roles: {', '.join(roles)})")
  assert "\n" not in message


def test_a_template_that_does_not_compile_names_its_line():
  with pytest.raises(ChatTemplateError, match=r"chat template t, line 2: .*endfor"):
    ChatTemplate("t", "x\n{% for m in messages %}")
  with pytest.raises(ChatTemplateError, match=r"chat template t, line 1: No filter named 'nope'"):
    ChatTemplate("t", "{{ 1 | nope }}")


def test_errors_name_the_line_and_the_type():
  template = ChatTemplate("t", "{{ 1 }}\n\n{{ messages[0].content + 1 }}")
  with pytest.raises(ChatTemplateError, match=r"t, line 3: TypeError: .*\(roles: user\)"):
    template.render([{"role": "user", "content": "x"}], {}, None)


@pytest.mark.parametrize(
  ("source", "expected"),
  [
    ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% continue %}{% endif %}{{ m }}{% endfor %}", "13"),
    ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
    ("{% for m in [1, 2] %}\n  {% if true %}\n  {{ m }}\n  {% endif %}\n{% endfor %}\n", "  1\n  2\n"),
    ("{{ {'a': '<é>', 'b': [1, none, true]} | tojson }}", '{"a": "<é>", "b": [1, null, true]}'),
    ("{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}", '{\n  "a": 2,\n  "b": 1\n}'),
    ("{{ [1, 'é'] | tojson(separators=(',', ':'), ensure_ascii=true) }}", '[1,"\\u00e9"]'),
    ("{{ strftime_now('%Y') | length }}", "4"),
    ("{{ nothing }}{{ nothing is defined }}{% if nothing %}x{% endif %}", "False"),
    ("{% for x in nothing %}x{% endfor %}{{ nothing | length }}", "0"),
    ("{{ messages[0].nothing is none }} {{ messages[0]['nothing'] is defined }}", "False False"),
    ("{{ '%s is %02d' % ('x', 3) }} {{ '{} {a}'.format(1, a=2) }} {{ '%s' | format('y') }}", "x is 03 1 2 y"),
    (
      "{{ 'a-b-c'.split('-') | join('+') }} {{ '-'.join(['a', 'b']) }} {{ 'x' * 3 }} {{ [1] * 2 + [3] }}",
      "a+b+c a-b xxx [1, 1, 3]",
    ),
    ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}", "['c']"),
    (
      "{{ messages[::-1][0].role ~ messages | length }}{{ 'abc'[1:] }}{{ 7 // 2 }}{{ 7 % 2 }}{{ 2 ** 3 }}",
      "user1bc318",
    ),
    ("{% macro m(x) %}<{{ x }}{{ caller() }}>{% endmacro %}{% call m(1) %}y{% endcall %}", "<1y>"),
    ("{% set x %}a{{ 1 }}{% endset %}{% filter upper %}{{ x }}{% endfilter %}{{ 'x\ny' | indent(2) }}", "A1x\n  y"),
    ("{% for g in [{'k': 1}, {'k': 1}] | groupby('k') %}{{ g.grouper }}{{ g.list | length }}{% endfor %}", "12"),
    ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{{ loop.length }}{{ loop.last }}{% endfor %}", "a11True"),
    ("{% for m in [[1, [2]], 3] recursive %}{{ loop(m) if m is iterable else m }}{% endfor %}", "123"),
    ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
    ("{{ messages[0].get('role') ~ messages[0].items() | list | length }}", "user2"),
    (
      "{{ 'x' if messages[0].content in ('c', messages[0].role) else 'y' }}{{ '1' | int + 1 }}{{ 2.567 | round(1) }}",
      "x22.6",
    ),
  ],
)
def test_what_templates_may_use(source, expected):
  from transformers.utils.chat_template_utils import render_jinja_template

  messages = [{"role": "user", "content": "c"}]
  assert ChatTemplate("t", source).render(messages, {}, None).text == expected
  assert render_jinja_template([messages], chat_template=source)[0] == [expected]


def test_a_template_renders_in_several_threads():
  template = ChatTemplate("t", "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")
  matcher = SpecialTokenMatcher({"<s>": 1})
  wrong = []

  def work(number):
    for _ in range(100):
      content = f"<s>{number}" * (number + 1)
      rendered = template.render([{"role": "user", "content": content}], {}, matcher, mark_generation=True)
      if rendered.text != content or rendered.spans != ((0, len(content)),):
        wrong.append(number)

  threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not wrong


def test_names():
  assert builtin_names() == sorted([*TEMPLATES, "qwen"])
  assert load_template("qwen").text == load_template("chatml").text


def test_files(tmp_path):
  text = "{{ messages[0].content }}"
  for name in ("a.jinja", "a.j2", "a.txt"):
    (tmp_path / name).write_text(text)
    assert load_template(str(tmp_path / name)).text == text
  named = [{"name": "default", "template": text}, {"name": "tool_use", "template": "{{ tools }}"}]
  for name, value in (("tokenizer_config.json", text), ("b.json", named), ("c.json", {"default": text})):
    (tmp_path / name).write_text(json.dumps({"chat_template": value, "other": 1}))
    assert load_template(str(tmp_path / name)).text == text
  assert load_template(str(tmp_path / "b.json")).tool_text == "{{ tools }}"
  assert load_template(str(tmp_path)).text == text
  assert load_template(text).text == text


@pytest.mark.parametrize(
  ("name", "content", "expected"),
  [
    ("missing.jinja", None, "no such file"),
    ("lama3", None, "did you mean llama3"),
    ("zzz", None, "built-in ones are chatml, gemma, llama2, llama3, mistral, plain, qwen"),
    ("a.json", b"{", "not JSON"),
    ("a.json", b"[" * 100_000, "not JSON"),
    ("a.json", b'{"x": 1}', "no key chat_template"),
    ("a.json", b"[1]", "no key chat_template"),
    ("a.json", b'{"chat_template": 3}', "must be a string or a list of named templates"),
    ("a.json", b'{"chat_template": [{"name": [], "template": "y"}]}', "must be a string or a list of named templates"),
    ("a.json", b'{"chat_template": [{"name": "x", "template": "y"}]}', "no template is named default, only x"),
    ("a.yaml", b"x", "expected .jinja"),
    ("a.jinja", b"\xff\xfe", "UTF-8"),
  ],
)
def test_what_is_no_template(tmp_path, monkeypatch, name, content, expected):
  monkeypatch.chdir(tmp_path)
  if content is not None:
    (tmp_path / name).write_bytes(content)
  with pytest.raises(ChatTemplateError) as caught:
    load_template(name)
  assert expected in str(caught.value)
  assert name in str(caught.value)
  assert "\n" not in str(caught.value)


def test_an_empty_folder_is_no_template(tmp_path):
  with pytest.raises(ChatTemplateError, match=r"has none of chat_template.jinja"):
    load_template(str(tmp_path))
