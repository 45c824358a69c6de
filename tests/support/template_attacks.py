"""Templates that try to get out of the sandbox, or to use up time or memory."""

from __future__ import annotations

ESCAPES = {
  "class of a string": "{{ ''.__class__ }}",
  "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
  "class by subscript": "{{ ''['__class__'] }}",
  "class by attr filter": "{{ ''|attr('__class__') }}",
  "class by map": "{{ ['']|map(attribute='__class__')|list }}",
  "class by format": "{{ '{0.__class__.__mro__}'.format('') }}",
  "class by format_map": "{{ '{x.__class__}'.format_map({'x': ''}) }}",
  "format got by attr filter": "{{ ('{0.__class__}'|attr('format'))('') }}",
  "format in a map": "{{ (['{0.__class__}']|map('attr', 'format')|list)[0]('') }}",
  "globals of a macro": "{% macro m() %}{% endmacro %}{{ m.__globals__ }}",
  "function of a macro": "{% macro m() %}{% endmacro %}{{ m._func.__code__ }}",
  "globals of raise_exception": "{{ raise_exception.__globals__ }}",
  "globals of range": "{{ range.__init__.__globals__ }}",
  "cycler": "{{ cycler.__init__.__globals__.os }}",
  "namespace": "{{ namespace.__init__.__globals__ }}",
  "self": "{{ self.__init__.__globals__ }}",
  "self's blocks": "{{ self._TemplateReference__context.environment }}",
  "the context": "{{ self._context }}",
  "undefined": "{{ nothing.__init__.__globals__ }}",
  "undefined's class": "{{ nothing.__class__.__init__ }}",
  "the loop": "{% for m in messages %}{{ loop.__class__ }}{% endfor %}",
  "the caller": "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
  "append": "{{ messages.append({}) }}",
  "clear": "{{ messages[0].clear() }}",
  "update": "{{ messages[0].update(role='system') }}",
  "pop by attr filter": "{{ (messages|attr('pop'))() }}",
  "include": "{% include '/etc/passwd' %}",
  "import": "{% import 'os' as os %}{{ os }}",
  "extends": "{% extends '/etc/passwd' %}",
  "generator frame": "{{ (messages|map('upper')).gi_frame }}",
  "code of a filter": "{{ (messages|map('upper')).gi_code }}",
  "encode": "{{ 'x'.encode('idna') }}",
  "set attribute": "{% set messages.x = 1 %}",
}


def grown(step: str, start: str = "'x'", end: str = "") -> str:
  """A template that applies `step`, an expression over ns.s, sixty times."""
  return (
    "{% set ns = namespace(s=START) %}{% for i in range(60) %}{% set ns.s = STEP %}{% endfor %}END".replace(
      "START", start
    )
    .replace("STEP", step)
    .replace("END", end)
  )


BOMBS = {
  "repeated string": "{{ 'x' * 10**10 }}",
  "repeated string, reversed": "{{ 10**10 * 'x' }}",
  "repeated variable": "{% set n = 10**9 %}{{ messages[0].content * n }}",
  "repeated list": "{% set l = [1] * 10**10 %}",
  "power": "{{ 9**(9**9) }}",
  "power of powers": grown("ns.s * ns.s", "3", "{{ ns.s }}"),
  "huge range": "{% for i in range(10**9) %}{% endfor %}",
  "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
  "nested ranges with output": "{% for a in range(99999) %}{% for b in range(99999) %}text{% endfor %}{% endfor %}",
  "nested ranges in a macro": (
    "{% macro m() %}{% for a in range(99999) %}{% for b in range(99999) %}text{% endfor %}{% endfor %}{% endmacro %}"
    "{{ m()|length }}"
  ),
  "recursive loop": (
    "{% for a in range(99) recursive %}{% if loop.depth < 20 %}{{ loop(range(99)) }}{% endif %}{% endfor %}"
  ),
  "endless macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
  "branching macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
  "doubling with ~": grown("ns.s ~ ns.s"),
  "doubling with +": grown("ns.s + ns.s"),
  "doubling with a set block": (
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}"
    "{% set ns.s = t %}{% endfor %}"
  ),
  "doubling with join": grown("[ns.s, ns.s]|join"),
  "doubling with str.join": grown("ns.s.join(['', ns.s, ''])"),
  "doubling with replace": grown("ns.s|replace('x', ns.s ~ 'x')"),
  "doubling with %": grown("'%s%s' % (ns.s, ns.s)"),
  "doubling with format": grown("'{0}{0}'.format(ns.s)"),
  "doubling lists": grown("ns.s + ns.s", "[1]"),
  "shared nested lists": grown("[ns.s, ns.s]", "[1]", "{{ ns.s }}"),
  "shared nested dicts": grown("{'a': ns.s, 'b': ns.s}", "{}", "{{ ns.s|tojson }}"),
  "shared nested dict() calls": grown("dict(a=ns.s, b=ns.s)", "{}", "{{ ns.s }}"),
  "shared nested lists by default": grown("[0, 0]|map('default', ns.s, true)|list", "[1]", "{{ ns.s|string }}"),
  "namespaces in lists": (
    "{% set a = namespace() %}{% set b = namespace() %}{% set a.x = [b, b] %}{% set b.x = [a, a] %}{{ a.x }}"
  ),
  "printed namespaces": "{% set a = namespace() %}{% set b = namespace(x=a, y=a) %}{{ b ~ '' }}",
  "center filter": "{{ 'x'|center(10**10) }}",
  "center method": "{{ 'x'.center(10**10) }}",
  "center of marked text": "{{ ('x'|safe).center(10**10) }}",
  "replace in marked text": "{{ ('x'|safe * 10000).replace('x', 'x' * 100000) }}",
  "endless digits": "{{ " + "9" * 5000 + " }}",
  "surrogate in the source": "\ud800{{ 'x' * 10**10 }}",
  "ljust": "{{ 'x'.ljust(10**10) }}",
  "zfill": "{{ 'x'.zfill(10**10) }}",
  "indent": "{{ 'a\nb'|indent(10**10) }}",
  "indented JSON": "{{ [1]|tojson(indent=10**10) }}",
  "deeply indented JSON": (
    "{% set ns = namespace(l=[1]) %}{% for i in range(200) %}{% set ns.l = [ns.l, 1] %}{% endfor %}"
    "{{ ns.l|tojson(indent=100000) }}"
  ),
  "JSON separators": "{{ [1, 2]|tojson(separators=('x' * 100000, ':')) }}",
  "batch": "{{ [1]|batch(10**10, 'x')|list }}",
  "slice": "{{ [1]|slice(10**10)|list }}",
  "width of %": "{{ '%1000000000d' % 1 }}",
  "precision of %": "{{ '%.1000000000f' % 1 }}",
  "computed width of %": "{{ '%*d' % (10**9, 1) }}",
  "many wide fields": "{{ ('%9999d' * 5000) % range(5000)|list }}",
  "width in format": "{{ '{:1000000000}'.format(1) }}",
  "computed width in format": "{{ '{:{}}'.format(1, 10**9) }}",
  "width in the format filter": "{{ '%1000000000d'|format(1) }}",
  "round": "{{ 1.5|round(10**10, 'ceil') }}",
  "strftime": "{{ strftime_now('%999999999d') }}",
  "constants printed in a loop": "{% for i in range(3000) %}{{ '" + "x" * 1000 + "' }}{% endfor %}",
  "list of characters": "{% set s = 'x' * 1000000 %}{{ s|list|length }}",
  "many slices": "{% set s = 'x' * 1000000 %}{% for i in range(1000) %}{% set t = s[i:] %}{% endfor %}",
  "long source": "x" * 300_000,
  "deep parentheses": "{{ " + "(" * 50_000 + ")" * 50_000 + " }}",
  "long sum": "{{ " + "+".join(["1"] * 50_000) + " }}",
}
