"""A Jinja sandbox whose templates can neither get out nor use up the machine.

Jinja's immutable sandbox keeps templates from attributes they must not see. It does not bound time or memory, and one
expression (`'x' * 10**10`) is enough to use up either. So every operation that makes text or containers, and every loop
step, reports to a meter first: the meter counts the characters a rendering has created and looks at its processor
time. What can create much from little (repetition, powers, widths in format strings, padding, `replace`, `join`) is
priced before it runs. Nested containers are priced by what printing them would take.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_eval_context
from jinja2.visitor import NodeTransformer

from maxtext_posttrain.tokenizers.metering import Meter, RenderLimits, TemplateLimitError
from maxtext_posttrain.tokenizers.special_tokens import Markers

# fmt: off
# Filters of Jinja's that a chat template has use for. Left out: those for HTML and URLs, which search text in
# quadratic time, and `random`, which would make token ids differ from run to run.
_FILTERS = frozenset((
  "abs", "attr", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "e", "escape", "first",
  "float", "format", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max",
  "min", "reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "slice", "sort",
  "string", "sum", "title", "tojson", "trim", "truncate", "unique", "upper", "wordcount",
))
_PRINTING_FILTERS = frozenset((
  "capitalize", "center", "e", "escape", "format", "indent", "lower", "replace", "safe", "string", "title", "trim",
  "truncate", "upper", "wordcount",
))
_STRING_METHODS = frozenset((
  "capitalize", "casefold", "center", "count", "endswith", "find", "format", "format_map", "index", "isalnum",
  "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace",
  "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace",
  "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
  "swapcase", "title", "upper", "zfill",
))
# fmt: on
# Those that Jinja does not put a method of its own in place of.
_PLAIN_STRING_METHODS = _STRING_METHODS - {"format", "format_map"}
_LOOP_COUNTERS = frozenset(("index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"))
_PLAIN_VALUES = frozenset((str, bool, int, list, dict))
_DICT_ATTRIBUTES = frozenset(dir(dict))
_METHODS: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = (
  (str, _STRING_METHODS),
  (bytes, frozenset()),
  ((int, float, complex), frozenset(("is_integer", "real", "imag", "bit_length"))),
  (dict, frozenset(("get", "items", "keys", "values", "copy"))),
  ((list, tuple), frozenset(("index", "count", "copy", "grouper", "list"))),
)
_WEIGHED = (str, list, tuple, dict)
_BOUND = (BuiltinMethodType, MethodType)
_MAX_WIDTH = 9_999
_MAX_INTEGER_BITS = 20_000
_PERCENT_FIELD = re.compile(r"%[^a-zA-Z%]*[a-zA-Z%]")
_WIDE = re.compile(r"\d{5,}|\*")


class _Instrument(NodeTransformer):
  """Rewrites a template's syntax tree so that each costly node reports to the meter."""

  def visit_Output(self, node: nodes.Output) -> nodes.Output:
    """Makes text of constants, which Jinja then prints as cheaply as what stands between tags."""
    node.nodes = [
      nodes.TemplateData(part.value, lineno=part.lineno)
      if isinstance(part, nodes.Const) and isinstance(part.value, str)
      else part
      for part in node.nodes
    ]
    self.generic_visit(node)
    return node

  def visit_For(self, node: nodes.For) -> nodes.For:
    self.generic_visit(node)
    static = sum(len(data.data) for statement in node.body for data in statement.find_all(nodes.TemplateData))
    node.iter = _filter(
      "guard:iterate", node.iter, nodes.Const(static, lineno=node.lineno, environment=node.environment)
    )
    return node

  def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
    self.generic_visit(node)
    return _filter("guard:concat", node.nodes[0], *node.nodes[1:])

  def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
    self.generic_visit(node)
    # Whether something equals a constant is told in no time; other comparisons may have long texts on both sides.
    if not _compares_constant(node):
      node.expr = _filter("guard:tick", node.expr)
    return node

  def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:
    self.generic_visit(node)
    if isinstance(node.arg, nodes.Slice):
      node.node = _filter("guard:slice", node.node)
    return node

  def visit_List(self, node: nodes.List) -> nodes.Expr:
    return self._container(node, node.items)

  def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
    return self._container(node, node.items) if node.ctx == "load" else node

  def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
    return self._container(node, [part for pair in node.items for part in (pair.key, pair.value)])

  def _container(self, node: nodes.Expr, parts: list[nodes.Expr]) -> nodes.Expr:
    if all(isinstance(part, nodes.Const) for part in parts):
      return node
    self.generic_visit(node)
    return _filter("guard:container", node)


def _compares_constant(node: nodes.Compare) -> bool:
  if len(node.ops) > 1 or node.ops[0].op not in ("eq", "ne"):
    return False
  return isinstance(node.expr, nodes.Const) or isinstance(node.ops[0].expr, nodes.Const)


def _filter(name: str, node: Any, *arguments: nodes.Expr) -> nodes.Filter:
  return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno, environment=node.environment)


class Generation(Extension):
  """`{% generation %}` ... `{% endgeneration %}`: the text between them is the assistant's."""

  tags = {"generation"}  # noqa: RUF012

  def parse(self, parser: Parser) -> nodes.Node:
    """Turns the block into a call whose result is marked at both ends."""
    lineno = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(lineno)

  def _mark(self, caller: Macro) -> str:
    text = caller()
    environment = self.environment
    assert isinstance(environment, MeteredSandbox)
    markers = environment.generation_markers
    return text if markers is None else f"{markers.start}{text}{markers.end}"


class MeteredSandbox(ImmutableSandboxedEnvironment):
  """The environment chat templates are compiled and rendered in; see the module's text.

  One environment may render in several threads at once: what belongs to one rendering is kept per thread.
  """

  intercepted_binops = frozenset(("+", "*", "%", "**"))

  def __init__(self, limits: RenderLimits):
    super().__init__(
      trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[Generation, loopcontrols], cache_size=0
    )
    self._limits = limits
    self._thread = threading.local()
    self.finalize = self._print
    self.filters = {name: self._metered(name, self.filters[name]) for name in _FILTERS if name != "tojson"}
    self.filters |= {
      "tojson": self._tojson,
      "guard:iterate": self._iterate,
      "guard:concat": self._concat,
      "guard:tick": self._tick,
      "guard:slice": self._slice,
      "guard:container": self._container,
    }
    del self.globals["lipsum"]  # random text
    self.globals["raise_exception"] = _raise_exception
    self.globals["strftime_now"] = _strftime_now

  @contextmanager
  def rendering(self, markers: Markers, *, mark_generation: bool) -> Iterator[None]:
    """Meters what is rendered inside; `{% generation %}` blocks are marked if `mark_generation`."""
    self._thread.meter = Meter(self._limits)
    self._thread.markers = markers
    self._thread.mark_generation = mark_generation
    try:
      yield
    finally:
      del self._thread.meter, self._thread.markers, self._thread.mark_generation

  @property
  def generation_markers(self) -> Markers | None:
    """The markers for `{% generation %}` blocks of the rendering under way; None where it wants none."""
    return self._thread.markers if self._thread.mark_generation else None

  def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
    return super()._generate(_Instrument().visit(source), *args, **kwargs)

  # What the instrumented nodes call.

  def _iterate(self, values: Any, static: int) -> Any:
    return values if values is None or isinstance(values, jinja2.Undefined) else _Steps(values, static, self._meter)

  def _concat(self, *parts: Any) -> str:
    texts = [part if type(part) is str else self._text(part) for part in parts]
    self._meter.step(sum(map(len, texts)))
    return "".join(texts)

  def _tick(self, value: Any) -> Any:
    self._meter.step()
    return value

  def _slice(self, value: Any) -> Any:
    self._meter.step(len(value) if isinstance(value, _WEIGHED) else 0)
    return value

  def _container(self, value: Any) -> Any:
    meter = self._meter
    meter.step(meter.weigh(value))
    return value

  @pass_eval_context
  def _print(self, _: Any, value: Any) -> Any:
    meter = self._meter
    meter.step(len(value) if type(value) is str else meter.weigh(value))
    return value

  # What the sandbox asks of its environment.

  def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
    """Prices +, *, % and ** before they run."""
    meter = self._meter
    if operator == "+" and type(left) is str and type(right) is str:
      meter.step(len(left) + len(right))
      return left + right
    meter.step()
    if operator == "+":
      if isinstance(left, str) or not isinstance(left, (int, float)):
        meter.charge(meter.weigh(left) + meter.weigh(right))
    elif operator == "*":
      for value, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(value, (str, bytes, list, tuple)):
          meter.charge(meter.weigh(value) * max(count, 0))
      if isinstance(left, int) and isinstance(right, int):
        _check_integer(left.bit_length() + right.bit_length())
    elif operator == "**":
      if isinstance(left, int) and isinstance(right, int):
        _check_integer(left.bit_length() * max(right, 0))
    elif isinstance(left, str):
      self._check_format(left, right)
    return super().call_binop(context, operator, left, right)

  def getattr(self, obj: Any, attribute: str) -> Any:
    """What Jinja's sandbox gives, sooner where templates ask most."""
    kind = type(obj)
    if kind is dict and attribute not in _DICT_ATTRIBUTES:
      return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
    if kind is str and attribute in _PLAIN_STRING_METHODS:
      return getattr(obj, attribute)
    if kind is LoopContext and attribute in _LOOP_COUNTERS:
      return getattr(obj, attribute)
    if kind is Namespace and not attribute.startswith("_"):
      value = getattr(obj, attribute, None)
      if type(value) in _PLAIN_VALUES:
        return value
    return super().getattr(obj, attribute)

  def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
    """Allows of Python's own types only methods that are priced or cheap."""
    if not super().is_safe_attribute(obj, attr, value):
      return False
    for kind, names in _METHODS:
      if isinstance(obj, kind):
        return attr in names
    return True

  def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
    """Jinja's sandboxed `str.format`, priced."""
    wrapped = super().wrap_str_format(value)
    if wrapped is None:
      return None

    def priced(*args: Any, **kwargs: Any) -> str:
      self._check_format(value.__self__, (args, kwargs), braces=True)
      return wrapped(*args, **kwargs)

    return priced

  def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a method, macro or global; prices methods of strings first and results afterwards."""
    meter = self._meter
    meter.step()
    if isinstance(obj, _BOUND) and isinstance(obj.__self__, str):
      args = self._price_string_method(obj.__name__, obj.__self__, args)
    kind = type(obj)
    if kind is BuiltinMethodType and type(obj.__self__) is str and obj.__name__ in _PLAIN_STRING_METHODS:
      result = obj(*args, **_without_variables(kwargs))
    elif kind is Macro:
      result = obj(context.eval_ctx, *args, **_without_variables(kwargs))
    else:
      result = super().call(context, obj, *args, **kwargs)
    if isinstance(result, _WEIGHED):
      meter.charge(meter.weigh(result))
    return result

  # Prices.

  @property
  def _meter(self) -> Meter:
    return self._thread.meter

  def _text(self, value: Any) -> str:
    if isinstance(value, str):
      return value
    self._meter.charge(self._meter.weigh(value))
    return str(value)

  def _price_string_method(self, name: str, text: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    meter = self._meter
    if name in ("center", "ljust", "rjust", "zfill"):
      if args and isinstance(args[0], int):
        meter.charge(max(args[0], 0))
    elif name == "replace":
      self._price_replace(text, *args[:2])
    elif name == "join" and args:
      args = (self._price_join(args[0], text), *args[1:])
    else:
      meter.charge(len(text))
    return args

  def _price_replace(self, text: str, old: Any = None, new: Any = None) -> None:
    if isinstance(old, str) and isinstance(new, str):
      self._meter.charge(len(text) + text.count(old) * len(new))

  def _price_join(self, values: Any, separator: str) -> list[Any]:
    items = list(values)
    self._meter.charge(sum(self._meter.weigh(item) for item in items) + len(separator) * len(items))
    return items

  def _check_format(self, template: str, values: Any, *, braces: bool = False) -> None:
    """Prices a %-format, or with `braces` a `str.format`; refuses huge and computed field widths."""
    if braces:
      fields = template.count("{")
      specifications = [part for part in template.split("{")[1:] if ":" in part]
      nested = any("}" not in part for part in specifications)
      if nested or any(_WIDE.search(part.partition("}")[0]) for part in specifications):
        raise TemplateLimitError(f"a field of str.format is wider than {_MAX_WIDTH:,}, or its width is computed")
    else:
      specifications = _PERCENT_FIELD.findall(template)
      fields = len(specifications)
      if any(_WIDE.search(part) for part in specifications):
        raise TemplateLimitError(f"a field of a % format is wider than {_MAX_WIDTH:,}, or its width is computed")
    wide = sum(any(character.isdigit() for character in part) for part in specifications)
    self._meter.charge(len(template) + wide * _MAX_WIDTH + fields * self._meter.weigh(values))

  def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps one of Jinja's filters: a step, its price where it can create much, and the weight of its result."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0
    price = getattr(self, f"_price_{name}_filter", None)

    def metered(*args: Any, **kwargs: Any) -> Any:
      meter = self._meter
      meter.step()
      value = args[first]
      if name in _PRINTING_FILTERS and not isinstance(value, str):
        meter.charge(meter.weigh(value))
      if price is not None:
        args = (*args[:first], price(value, *args[first + 1 :], **kwargs), *args[first + 1 :])
      result = function(*args, **kwargs)
      if isinstance(result, _WEIGHED):
        meter.charge(meter.weigh(result))
      return result

    metered.__dict__.update(getattr(function, "__dict__", {}))
    return metered

  def _price_center_filter(self, value: Any, width: Any = 80) -> Any:
    if isinstance(width, int):
      self._meter.charge(max(width, 0))
    return value

  def _price_indent_filter(self, value: Any, width: Any = 4, *_: Any, **__: Any) -> Any:
    text = str(value)
    each = len(width) if isinstance(width, str) else max(int(width), 0)
    self._meter.charge(each * (len(text.splitlines()) + 1))
    return value

  def _price_replace_filter(self, value: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> Any:
    self._price_replace(str(value), str(old), str(new))
    return value

  def _price_join_filter(self, value: Any, d: Any = "", *_: Any, **__: Any) -> Any:
    return self._price_join(value, str(d))

  def _price_format_filter(self, value: Any, *args: Any, **kwargs: Any) -> Any:
    self._check_format(str(value), (args, kwargs))
    return value

  def _price_batch_filter(self, value: Any, linecount: Any = 0, *_: Any, **__: Any) -> Any:
    self._meter.charge(max(int(linecount), 0))
    return value

  def _price_slice_filter(self, value: Any, slices: Any = 0, *_: Any, **__: Any) -> Any:
    self._meter.charge(max(int(slices), 0) * 8)
    return value

  def _price_round_filter(self, value: Any, precision: Any = 0, *_: Any, **__: Any) -> Any:
    _check_integer(abs(int(precision)) * 4)
    return value

  def _tojson(
    self,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
  ) -> str:
    """JSON as HuggingFace gives it to templates: characters stay as they are, nothing is escaped for HTML."""
    meter = self._meter
    meter.step(meter.weigh(value))
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
      if any(len(separator) > 16 for separator in separators or ()):
        raise TemplateLimitError("a separator of tojson is longer than 16 characters")
      text = encoder.encode(value)
    else:
      meter.charge(len(indent) if isinstance(indent, str) else max(int(indent), 0))
      chunks = []
      for chunk in encoder.iterencode(value):
        meter.step(len(chunk))
        chunks.append(chunk)
      text = "".join(chunks)
    meter.charge(len(text))
    if ensure_ascii:
      marker = self._thread.markers.content
      text = text.replace(json.dumps(marker)[1:-1], marker)
    return text


class _Steps:
  """The values a `{% for %}` runs over, each step metered."""

  def __init__(self, values: Any, static: int, meter: Meter):
    self._values = values
    self._static = static
    self._meter = meter

  def __iter__(self) -> Iterator[Any]:
    meter, static = self._meter, self._static
    for value in self._values:
      meter.step(static)
      yield value

  def __len__(self) -> int:
    return len(self._values)


def _without_variables(kwargs: dict[str, Any]) -> dict[str, Any]:
  """Arguments without those that compiled templates add for functions that take the context."""
  kwargs.pop("_loop_vars", None)
  kwargs.pop("_block_vars", None)
  return kwargs


def _check_integer(bits: int) -> None:
  if bits > _MAX_INTEGER_BITS:
    raise TemplateLimitError("a number becomes too large")


def _raise_exception(message: Any) -> None:
  raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
  if len(format) > 200 or re.search(r"\d{3,}", format):
    raise TemplateLimitError("the format of strftime_now is longer than 200 characters, or has a wide field")
  return datetime.now().strftime(format)
