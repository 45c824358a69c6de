"""Chat templates: where they come from, and what they make of a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from importlib import resources
from itertools import chain, islice, pairwise
from pathlib import Path
from traceback import walk_tb
from typing import Any

import jinja2

from maxtext_posttrain.errors import ChatTemplateError
from maxtext_posttrain.tokenizers.sandbox import MeteredSandbox, RenderLimits
from maxtext_posttrain.tokenizers.special_tokens import (
  MarkerClashError,
  Markers,
  RenderedText,
  SpecialTokenMatcher,
  marker_choices,
  unmark,
)

_ALIASES = {"qwen": "chatml"}
_TEXT_SUFFIXES = (".jinja", ".j2", ".jinja2", ".txt")
_FOLDER_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
_MAX_SOURCE = 256 * 1024
_FILENAME = "<template>"  # what Jinja calls a template without a file in tracebacks


@dataclass(frozen=True)
class TemplateSource:
  """Jinja text and where it is from.

  Attributes:
    name: for messages: a built-in name, a path, or `inline`.
    text: the template.
    tool_text: the template for conversations with tools, where there is one of its own.
  """

  name: str
  text: str
  tool_text: str | None = None


def builtin_names() -> list[str]:
  """Names of the templates that come with this package."""
  folder = resources.files(__package__).joinpath("templates")
  return sorted([entry.name.removesuffix(".jinja") for entry in folder.iterdir()] + list(_ALIASES))


def load_template(spec: str) -> TemplateSource:
  """Finds a chat template.

  Args:
    spec: a built-in name; a `.jinja`, `.j2` or `.txt` file; a HuggingFace `tokenizer_config.json` or
      `chat_template.json`, or a folder with one; or the Jinja text itself.

  Raises:
    ChatTemplateError: there is no such name or file, or no template in the file.
  """
  if "{{" in spec or "{%" in spec:
    return TemplateSource("inline", spec)
  names = builtin_names()
  if spec in names:
    file = resources.files(__package__).joinpath("templates", f"{_ALIASES.get(spec, spec)}.jinja")
    return TemplateSource(spec, file.read_text("utf-8"))
  path = Path(spec).expanduser()
  if path.is_dir():
    for name in _FOLDER_FILES:
      if (path / name).is_file():
        return _load_file(path / name)
    raise ChatTemplateError(f"chat template {spec}: the folder has none of {', '.join(_FOLDER_FILES)}")
  if path.is_file():
    return _load_file(path)
  known = f"the built-in ones are {', '.join(names)}"
  if "/" in spec or path.suffix:
    raise ChatTemplateError(f"chat template {spec}: no such file; {known}")
  nearest = get_close_matches(spec, names, n=1)
  hint = f"did you mean {nearest[0]}? " if nearest else ""
  raise ChatTemplateError(f"chat template {spec!r} is no file, no Jinja text and no known name; {hint}{known}")


def _load_file(path: Path) -> TemplateSource:
  try:
    text = path.read_bytes().decode("utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise ChatTemplateError(f"chat template {path}: cannot be read as UTF-8 text: {one_line(error)}") from error
  if path.suffix != ".json":
    if path.suffix not in _TEXT_SUFFIXES:
      raise ChatTemplateError(f"chat template {path}: expected {', '.join(_TEXT_SUFFIXES)} or .json")
    return TemplateSource(str(path), text)
  try:
    content = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ChatTemplateError(f"chat template {path}: not JSON: {one_line(error)}") from error
  found = content.get("chat_template") if isinstance(content, dict) else None
  if found is None:
    raise ChatTemplateError(f"chat template {path}: the file has no key chat_template")
  return named_templates(str(path), found)


def named_templates(name: str, found: Any) -> TemplateSource:
  """Reads HuggingFace's value of `chat_template`: one template, or several with names.

  Raises:
    ChatTemplateError: it is neither, or several without one called `default`.
  """
  if isinstance(found, str):
    return TemplateSource(name, found)
  if isinstance(found, list) and all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in found):
    found = {item["name"]: item.get("template") for item in found}
  if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
    raise ChatTemplateError(f"chat template {name}: chat_template must be a string or a list of named templates")
  if "default" not in found:
    raise ChatTemplateError(f"chat template {name}: no template is named default, only {', '.join(map(str, found))}")
  return TemplateSource(name, found["default"], found.get("tool_use"))


class ChatTemplate:
  """A compiled chat template.

  Attributes:
    name: for messages.
    source: the Jinja text.
  """

  def __init__(self, name: str, source: str, limits: RenderLimits | None = None):
    """Compiles a template.

    Raises:
      ChatTemplateError: it is not Jinja, or far too long.
    """
    self.name = name
    self.source = source
    self._limits = limits or RenderLimits()
    if len(source) > _MAX_SOURCE:
      raise ChatTemplateError(f"chat template {name}: longer than {_MAX_SOURCE:,} characters")
    self._environment = MeteredSandbox(self._limits)
    try:
      self._template = self._environment.from_string(source)
      # Each rendering copies them; Jinja's chain of mappings takes long to copy.
      self._template.globals = dict(self._template.globals)
    except jinja2.TemplateSyntaxError as error:
      raise ChatTemplateError(f"chat template {name}, line {error.lineno}: {one_line(error.message)}") from error
    except (RecursionError, MemoryError, SyntaxError) as error:
      raise ChatTemplateError(f"chat template {name}: nested too deeply to compile") from error
    except ValueError as error:
      raise ChatTemplateError(f"chat template {name}: {one_line(error)}") from error

  def __reduce__(self) -> tuple[Any, ...]:
    return ChatTemplate, (self.name, self.source, self._limits)

  @cached_property
  def marks_generation(self) -> bool:
    """Whether the template says with `{% generation %}` which text is the assistant's."""
    tokens = [(kind, value) for _, kind, value in self._environment.lex(self.source) if kind != "whitespace"]
    return any(first[0] == "block_begin" and second == ("name", "generation") for first, second in pairwise(tokens))

  @cached_property
  def takes_parts(self) -> bool:
    """Whether the template itself reads content given as a list of parts."""
    text = "a few words"
    variables = {"bos_token": "", "eos_token": "", "add_generation_prompt": False}
    try:
      whole, parts = (
        self._render([{"role": "user", "content": content}], variables, None, mark_generation=False).text
        for content in (text, [{"type": "text", "text": text}])
      )
    except ChatTemplateError:
      return False
    return whole == parts and text in whole

  def _marker_choices(self) -> Iterator[Markers]:
    return (markers for markers in marker_choices() if not markers.occur_in(self.source))

  @cached_property
  def _usual_markers(self) -> list[Markers]:
    """The first choice, which nearly every conversation leaves free; empty if the source leaves none."""
    return list(islice(self._marker_choices(), 1))

  def render(
    self,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    matcher: SpecialTokenMatcher | None,
    *,
    mark_generation: bool = False,
  ) -> RenderedText:
    """Renders a conversation.

    Args:
      messages: dicts with `role` and `content`; content that is a list of text parts is joined for a template that
        reads only strings.
      variables: what else the template sees (`tools`, `documents`, `add_generation_prompt`, `bos_token`, ...).
      matcher: the special tokens that messages and variables must not form; None lets them. Variables called
        `..._token` may.
      mark_generation: also return where `{% generation %}` blocks are.

    Raises:
      ChatTemplateError: the template fails, refuses the conversation, or takes too long.
    """
    if not self.takes_parts:
      messages = [_with_joined_parts(self.name, message) for message in messages]
    return self._render(messages, variables, matcher, mark_generation=mark_generation)

  def _render(
    self,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    matcher: SpecialTokenMatcher | None,
    *,
    mark_generation: bool,
  ) -> RenderedText:
    scanner = matcher or SpecialTokenMatcher({})
    protect = matcher is not None
    for markers in chain(self._usual_markers, self._marker_choices()):
      try:
        marked: dict[str, Any] = {
          key: scanner.mark(value, markers, protect=protect and not key.endswith("_token"))
          for key, value in variables.items()
        }
        marked["messages"] = scanner.mark(list(messages), markers, protect=protect)
      except MarkerClashError:
        continue
      return self._render_marked(marked, markers, messages, mark_generation=mark_generation)
    raise ChatTemplateError(f"chat template {self.name}: the conversation uses every private Unicode character")

  def _render_marked(
    self, variables: dict[str, Any], markers: Markers, messages: Sequence[Any], *, mark_generation: bool
  ) -> RenderedText:
    with self._environment.rendering(markers, mark_generation=mark_generation):
      try:
        return unmark(self._template.render(variables), markers)
      except Exception as error:
        raise ChatTemplateError(self._describe(error, messages, markers)) from error

  def _describe(self, error: Exception, messages: Sequence[Any], markers: Markers) -> str:
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == _FILENAME]
    where = f", line {lines[-1]}" if lines else ""
    if isinstance(error, RecursionError):
      reason = "calls itself without end"
    elif isinstance(error, jinja2.TemplateError | ValueError):
      reason = one_line(error)
    else:
      reason = f"{type(error).__name__}: {one_line(error)}"
    roles = [str(message.get("role")) for message in messages if isinstance(message, Mapping)]
    shown = ", ".join(roles[:8]) + (f", ... ({len(roles)} in all)" if len(roles) > 8 else "")
    return one_line(f"chat template {self.name}{where}: {reason} (roles: {shown})".replace(markers.content, ""))


def one_line(text: object, limit: int = 500) -> str:
  """Text on a single line, cut at `limit` characters."""
  line = " ".join(str(text).split())
  return line if len(line) <= limit else line[: limit - 3] + "..."


def _with_joined_parts(name: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
  content = message.get("content")
  if not isinstance(content, list | tuple):
    return message
  texts = []
  for part in content:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
      kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
      raise ChatTemplateError(f"chat template {name}: takes text only, not a content part of type {kind!r}")
    texts.append(text)
  return {**message, "content": "".join(texts)}
