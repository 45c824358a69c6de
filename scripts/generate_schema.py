"""Writes `src/maxtext_posttrain/config/maxtext_schema.json` from the installed MaxText.

  python scripts/generate_schema.py [--check]

The static check of a configuration must be fast, and importing MaxText's configuration classes imports JAX. So their
JSON schema is taken once, here, and committed: one key a line with type, choices, limits, default and description.
`--check` writes nothing and exits 1 where the committed file is not in step with the installed MaxText.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA_PATH = Path(__file__).parents[1] / "src" / "maxtext_posttrain" / "config" / "maxtext_schema.json"

_KEPT = ("enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def main(argv: list[str]) -> int:
  """Writes the schema, or with `--check` compares it; the exit code."""
  text = schema_text()
  if argv == ["--check"]:
    in_step = SCHEMA_PATH.is_file() and SCHEMA_PATH.read_text(encoding="utf-8") == text
    print(f"{SCHEMA_PATH.name} is {'in' if in_step else 'NOT in'} step with the installed maxtext")
    return 0 if in_step else 1
  SCHEMA_PATH.write_text(text, encoding="utf-8")
  print(f"wrote {SCHEMA_PATH}")
  return 0


def schema_text() -> str:
  """The schema file's text for the installed MaxText."""
  from maxtext.configs import types

  ours = types.MaxTextConfig.model_json_schema()
  rl = types.RLConfig.model_json_schema()
  derived = set(types.DerivedValues.model_fields)
  keys = {name: _simplify(spec, ours["$defs"]) for name, spec in ours["properties"].items()}
  for name in derived & keys.keys():
    keys[name]["derived"] = True
  for name, spec in rl["properties"].items():
    if name not in keys:
      keys[name] = _simplify(spec, rl["$defs"]) | {"trainer": "grpo"}
  lines = [f'"maxtext_version": {json.dumps(importlib.metadata.version("maxtext"))},', '"keys": {']
  lines.append(",\n".join(f"{json.dumps(name)}: {json.dumps(keys[name], ensure_ascii=False)}" for name in sorted(keys)))
  return "{\n" + "\n".join(lines) + "\n}\n}\n"


def _simplify(spec: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
  """One key's JSON schema with its references put in place and all that the checker does not read left out."""
  reference = spec.get("$ref")
  if reference is not None:
    target = definitions[reference.rsplit("/", 1)[-1]]
    return _simplify({**target, **{name: value for name, value in spec.items() if name != "$ref"}}, definitions)
  simple: dict[str, Any] = {}
  if "anyOf" in spec:
    simple["anyOf"] = [_simplify(choice, definitions) for choice in spec["anyOf"]]
  if "type" in spec:
    simple["type"] = spec["type"]
  if "const" in spec:
    simple["enum"] = [spec["const"]]
  if spec.get("items"):
    simple["items"] = _simplify(spec["items"], definitions)
  if "properties" in spec:
    simple["properties"] = {name: _simplify(child, definitions) for name, child in spec["properties"].items()}
  simple.update({name: spec[name] for name in _KEPT if name in spec})
  if "default" in spec and "properties" not in spec:
    simple["default"] = spec["default"]
  if "description" in spec:
    simple["description"] = " ".join(spec["description"].split())
  return simple


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
