"""A headless Chromium, for pages opened from disk."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_FLAGS = (
  "--headless",
  "--no-sandbox",
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
  "--disable-default-apps",
  "--disable-extensions",
  "--disable-dev-shm-usage",
  "--host-resolver-rules=MAP * ~NOTFOUND",
  "--enable-logging=stderr",
  "--virtual-time-budget=20000",
)
_TIMEOUT = 180.0


@dataclass(frozen=True)
class Opened:
  """A page after its scripts ran.

  Attributes:
    dom: its document.
    console: what it wrote to the console, errors included.
    requests: the addresses it asked for; what the browser asks for on its own account is left out.
  """

  dom: str
  console: list[str]
  requests: list[str]


def open_page(path: Path, *, size: str = "1200,1000") -> Opened:
  """Opens a file in a new profile and waits until it is quiet."""
  with tempfile.TemporaryDirectory() as profile:
    log = Path(profile) / "net.json"
    command = [
      str(CHROMIUM),
      *_FLAGS,
      f"--window-size={size}",
      f"--user-data-dir={profile}/profile",
      f"--log-net-log={log}",
      "--dump-dom",
      path.resolve().as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    requests = list(_requests(json.loads(log.read_text(encoding="utf-8"))))
  console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
  return Opened(done.stdout, console, requests)


def _requests(net_log: dict[str, Any]) -> Iterator[str]:
  """Each address of the net log that a page asked for: the browser's own requests have no origin as initiator."""
  for address in dict.fromkeys(
    params["url"]
    for event in net_log["events"]
    if "url" in (params := event.get("params", {})) and params.get("initiator", "not an origin") != "not an origin"
  ):
    if re.match(r"(https?|wss?|ftp):", address):
      yield address
