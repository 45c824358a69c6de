#!/usr/bin/env bash
# Pins requirements/*.txt from pyproject.toml, requirements/dev.in and docs.in, without any index's address.
set -euo pipefail
cd "$(dirname "$0")/.."
compile() { .venv/bin/uv pip compile --quiet --no-header --no-annotate --no-emit-index-url --python-version 3.12 "$@"; }
compile pyproject.toml --output-file requirements/base.txt
compile requirements/dev.in --constraint requirements/base.txt --output-file requirements/dev.txt
compile requirements/docs.in --constraint requirements/base.txt --constraint requirements/dev.txt \
  --output-file requirements/docs.txt
# As near to base.txt as vLLM allows: what lies in the output file is what the resolver tries first.
cp requirements/base.txt requirements/vllm.txt
compile pyproject.toml requirements/vllm.in --override requirements/vllm-overrides.txt \
  --output-file requirements/vllm.txt
compile requirements/vllm-test.in --constraint requirements/vllm.txt --output-file requirements/vllm-test.txt
