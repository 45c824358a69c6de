#!/usr/bin/env bash
# Makes .venv-torch, apart from .venv: PyTorch, transformers and TRL, to load exports with and to measure against.
set -euo pipefail
cd "$(dirname "$0")/.."

# Outside the repository, where .python-version does not decide.
find_python() {
  for candidate in python3.11 python3.12 python3.13 python3; do
    if (cd / && "$candidate" -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))') \
      >/dev/null 2>&1; then
      (cd / && "$candidate" -c 'import sys; print(sys.executable)')
      return
    fi
  done
}

python=$(find_python)
if [ -z "$python" ]; then
  echo "error: .venv-torch: no Python 3.11 to 3.13 with ensurepip found; install one (pyenv install 3.11)" >&2
  exit 1
fi
rm -rf .venv-torch
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { "$python" -m venv .venv-torch &&
  .venv-torch/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/torch.txt; } >"$log" 2>&1; then
  echo "error: .venv-torch could not be made: $(grep -iE 'error' "$log" | tail -n 1)" >&2
  exit 1
fi
echo "environment ready: .venv-torch ($(.venv-torch/bin/python --version))"
