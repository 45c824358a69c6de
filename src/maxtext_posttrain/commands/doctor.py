"""`posttrain doctor`: what is installed, on which devices, and what each generation engine would do here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator, Sequence
from typing import Any

from maxtext_posttrain import __version__
from maxtext_posttrain.commands.arguments import ArgumentParser
from maxtext_posttrain.config.reinforcement import VLLM_MISSING
from maxtext_posttrain.errors import first_line
from maxtext_posttrain.logs import quiet_imports
from maxtext_posttrain.rollout.vllm_settings import DISTRIBUTIONS, MAXTEXT_ARGUMENTS, installed_version, quiet_vllm

_DESCRIPTION = """\
Lists the versions that matter, the devices, what would be patched in vLLM, and what each engine would do here. Looks at
vLLM and starts nothing.
"""
_PACKAGES = (
  "maxtext",
  "google-tunix",
  "jax",
  "jaxlib",
  "libtpu",
  "flax",
  "optax",
  "orbax-checkpoint",
  "qwix",
  "transformers",
  "safetensors",
  "numpy",
  "torch",
  *DISTRIBUTIONS,
  "tpu-inference",
)
_WIDTH = 18


def run(arguments: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  parser = ArgumentParser("doctor", _DESCRIPTION)
  options = parser.parse_args(arguments)
  with quiet_imports(show=options.debug):
    devices = _devices()
    vllm = _Vllm.look()
  for title, lines in (
    ("versions", _versions()),
    ("devices", devices.lines()),
    ("patches of vLLM", _patches(vllm)),
    ("engines", _engines(devices, vllm)),
  ):
    print(title)
    for line in lines:
      print(f"  {line}")
  return 0


def _versions() -> Iterator[str]:
  yield f"{'maxtext-posttrain':<{_WIDTH}} {__version__}"
  yield f"{'python':<{_WIDTH}} {platform.python_version()}"
  for name in _PACKAGES:
    try:
      yield f"{name:<{_WIDTH}} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
      if name not in DISTRIBUTIONS:
        yield f"{name:<{_WIDTH}} -"
  if installed_version() is None:
    yield f"{'vllm':<{_WIDTH}} -"


class _Devices:
  """What JAX sees, or why it sees nothing."""

  def __init__(self, devices: Sequence[Any], trouble: str | None = None):
    self.trouble = trouble
    self.platform = devices[0].platform if devices else None
    self._devices = devices

  @property
  def text(self) -> str:
    """As `2 cpu devices`."""
    count = len(self._devices)
    return f"{count} {self.platform} device{'s' if count != 1 else ''}"

  def lines(self) -> Iterator[str]:
    """One line on the machine, and one on what JAX runs on."""
    yield f"{platform.machine()}, {os.cpu_count()} CPUs"
    if self.trouble is not None:
      yield f"JAX sees none: {self.trouble}"
      return
    yield f"JAX: {self.text} ({self._devices[0].device_kind})"


def _devices() -> _Devices:
  try:
    import jax

    return _Devices(jax.devices())
  except Exception as error:  # A broken installation or a busy accelerator: what a doctor is asked about.
    return _Devices((), first_line(error))


class _Vllm:
  """What the installed vLLM is, without starting it."""

  def __init__(self, *, device: str | None = None, dropped: Sequence[str] = (), trouble: str | None = None):
    self.device = device
    self.dropped = dropped
    self.trouble = trouble
    self.patches: list[tuple[str, str | None]] = []

  @classmethod
  def look(cls) -> _Vllm | None:
    """Imports vLLM and looks; None where there is none."""
    if installed_version() is None:
      return None
    from maxtext_posttrain.rollout.vllm_compat import argument_names, known_patches

    quiet_vllm()
    try:
      from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
      from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

      names = argument_names(EngineArgs)
      found = cls(
        device=current_platform.device_type or "no device that it knows",
        dropped=[f"{key} ({name})" for key, name in MAXTEXT_ARGUMENTS.items() if name not in names],
      )
      found.patches = [(patch.name, patch.fault()) for patch in known_patches()]
      return found
    except Exception as error:  # Of whatever kind: an installation that does not work is what is asked about.
      return cls(trouble=first_line(error))


def _patches(vllm: _Vllm | None) -> Iterator[str]:
  if vllm is None:
    yield "none: vLLM is not installed"
    return
  if vllm.trouble is not None:
    yield f"unknown: vLLM can't be imported: {vllm.trouble}"
    return
  if vllm.dropped:
    yield f"engine arguments that it has no more: {', '.join(vllm.dropped)}: left out, refused where a run sets them"
  if importlib.util.find_spec("tpu_inference") is None:
    yield "none: tpu-inference is not installed, whose releases they are for"
    return
  for name, fault in vllm.patches:
    yield f"{name}: not needed" if fault is None else f"{name}: applied while vLLM starts: it {fault}"


def _engines(devices: _Devices, vllm: _Vllm | None) -> Iterator[str]:
  if devices.trouble is not None:
    yield f"native: can't run: JAX sees no devices: {devices.trouble}"
  else:
    yield f"native: MaxText's own model on {devices.text}, with the trainer's weights where they lie"
  if vllm is None:
    yield f"vllm: can't run: {VLLM_MISSING}"
  elif vllm.trouble is not None:
    yield f"vllm: can't run: vLLM {installed_version()} can't be imported: {vllm.trouble}"
  elif devices.platform == "tpu" or vllm.device == "tpu":
    yield f"vllm: vLLM {installed_version()} on TPUs runs MaxText's own model through tpu_inference"
  else:
    yield f"vllm: vLLM {installed_version()} on {vllm.device} in the trainer's process, which hands it its weights"
