"""What MaxText, Tunix, Orbax and JAX print and log, turned on or off; imports none of them."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any


def quiet_logs(show: bool) -> None:
  """Turns what MaxText, Tunix and Orbax log on or off.

  Off, their errors show, but not those that go through absl and asyncio: Orbax logs a traceback for each thread of a
  save that fails and each array that can't be read, beside what it raises.
  """
  from absl import logging as absl_logging

  level = logging.INFO if show else logging.ERROR
  for name in ("maxtext", "tunix", "orbax", "jax"):
    logging.getLogger(name).setLevel(level)
  logging.getLogger("asyncio").setLevel(logging.INFO if show else logging.CRITICAL)
  absl_logging.set_verbosity(absl_logging.INFO if show else absl_logging.FATAL)


@contextlib.contextmanager
def quiet_imports(*, show: bool) -> Iterator[None]:
  """Keeps off the screen what MaxText and transformers print of absent optional parts while they are imported.

  In a notebook without ipywidgets tqdm warns of them, although it draws its bars as text then.
  """
  if show:
    yield
    return
  os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="IProgress not found")
    yield


@contextlib.contextmanager
def quiet_late_writes(*, show: bool) -> Iterator[None]:
  """Keeps off the screen what tensorstore prints of writes that end after a save has failed.

  Orbax closes its event loop at the first write that fails; for each of the others tensorstore would print a traceback
  beside the error that says which checkpoint it was.
  """
  if show:
    yield
    return
  before = sys.unraisablehook

  def hook(unraisable: Any) -> None:
    error = unraisable.exc_value
    if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
      before(unraisable)

  sys.unraisablehook = hook
  try:
    yield
  finally:
    sys.unraisablehook = before
