"""Generation here against Tunix's vanilla sampler and transformers' `generate`: tokens per second.

  python benchmarks/generate.py --rounds 7

All sides generate greedily, without a stop token, with a Llama of the same sizes in float32 and random weights: ours a
MaxText model, Tunix's its own, transformers' on PyTorch (in an interpreter that has it). Each side is a process that
stays; in each round every side generates once, and the order turns from round to round. Ours computes log-probabilities
too, the others none. Printed are medians with the smallest and largest value, and the ratio of tokens per second to
ours round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from _common import Spread

_SIDE = Path(__file__).resolve().with_name("_generate_side.py")
_REPOSITORY = _SIDE.parents[1]
_OURS = "ours"


@dataclass(frozen=True)
class Run:
  """One call: how long it took and how many tokens came of it."""

  seconds: float
  tokens: int

  @property
  def rate(self) -> float:
    """Tokens per second."""
    return self.tokens / self.seconds


class Side:
  """A contender's process."""

  def __init__(self, name: str, python: str, shape: Mapping[str, int], cache: Path):
    self.name = name
    environment = {
      **os.environ,
      "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
      "JAX_COMPILATION_CACHE_DIR": str(cache),
      "HF_HUB_OFFLINE": "1",
      "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
    self._process = subprocess.Popen(
      [python, str(_SIDE), name, json.dumps(shape)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._log,
      text=True,
      env=environment,
    )
    if self._answer() != "ready":
      sys.exit(f"{name} did not start")

  def run(self, batch: int) -> Run:
    """Generates once."""
    assert self._process.stdin is not None
    self._process.stdin.write(f"{batch}\n")
    self._process.stdin.flush()
    return Run(**json.loads(self._answer()))

  def close(self) -> None:
    """Ends the process."""
    self._process.communicate()

  def _answer(self) -> str:
    assert self._process.stdout is not None
    line = self._process.stdout.readline()
    if not line:
      self._process.wait()
      self._log.seek(0)
      print(*self._log.read().splitlines()[-20:], sep="\n", file=sys.stderr)
      sys.exit(f"{self.name} ended with exit code {self._process.returncode}")
    return line.strip()


def main(arguments: Sequence[str] | None = None) -> None:
  options = _parse(arguments)
  shape = {
    key: getattr(options, key)
    for key in ("layers", "emb", "mlp", "heads", "kv_heads", "head_dim", "vocab", "prompt", "new")
  }
  print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; {json.dumps(shape)}")
  with tempfile.TemporaryDirectory(prefix="generate-") as folder:
    sides = []
    for name, python in _interpreters(options):
      if Path(python).is_file():
        sides.append(Side(name, python, shape, Path(folder)))
      else:
        print(f"{name} is left out: {python} does not exist (--torch-python names an interpreter with torch)")
    raw = {}
    for batch in options.batch:
      first = {side.name: side.run(batch) for side in sides}
      rounds = [_round(sides, batch, number) for number in range(options.rounds)]
      for line in report(batch, first, rounds):
        print(line, flush=True)
      raw[batch] = [{name: vars(run) for name, run in runs.items()} for runs in (first, *rounds)]
    for side in sides:
      side.close()
  if options.output:
    options.output.write_text(json.dumps(raw, indent=1), encoding="utf-8")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description="Generation here against Tunix's sampler and transformers' generate.")
  parser.add_argument("--rounds", type=int, default=7, help="calls of each side and batch size that count (default 7)")
  parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="sequences (default 1 8 32)")
  parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt (default 64)")
  parser.add_argument("--new", type=int, default=64, help="new tokens (default 64)")
  for name, default in (("layers", 4), ("emb", 256), ("mlp", 1024), ("heads", 8), ("kv-heads", 4), ("head-dim", 32)):
    parser.add_argument(f"--{name}", type=int, default=default, help=f"of the model (default {default})")
  parser.add_argument("--vocab", type=int, default=32000, help="tokens of the vocabulary (default 32000)")
  parser.add_argument(
    "--torch-python",
    default=str(_REPOSITORY / ".venv-torch" / "bin" / "python"),
    metavar="PATH",
    help="an interpreter with torch and transformers (default .venv-torch/bin/python)",
  )
  parser.add_argument("--without", nargs="+", choices=("tunix", "transformers"), default=[], help="sides to leave out")
  parser.add_argument("--output", type=Path, metavar="FILE", help="write every call's figures as JSON")
  return parser.parse_args(arguments)


def _interpreters(options: argparse.Namespace) -> list[tuple[str, str]]:
  sides = [(_OURS, sys.executable), ("tunix", sys.executable), ("transformers", options.torch_python)]
  return [(name, python) for name, python in sides if name not in options.without]


def _round(sides: Sequence[Side], batch: int, number: int) -> dict[str, Run]:
  turn = number % len(sides)
  return {side.name: side.run(batch) for side in (*sides[turn:], *sides[:turn])}


def report(batch: int, first: Mapping[str, Run], rounds: Sequence[Mapping[str, Run]]) -> Iterator[str]:
  """The table of a batch size: the first call of each side, and the rounds after it.

  Raises:
    SystemExit: the sides did not generate the same number of tokens.
  """
  if len({run.tokens for runs in (first, *rounds) for run in runs.values()}) != 1:
    sys.exit("not the same work: the sides generated different numbers of tokens")
  yield ""
  yield f"batch {batch}: {first[_OURS].tokens} tokens a call"
  columns = "{:<14} {:>30} {:>26} {:>16}"
  yield columns.format("median [least .. most]", "tokens per second", "ratio to ours", "first call, s")
  for name, call in first.items():
    rates = Spread.of([runs[name].rate for runs in rounds])
    ratio = Spread.of([runs[name].rate / runs[_OURS].rate for runs in rounds])
    yield columns.format(name, rates.text(0), "" if name == _OURS else ratio.text(2), f"{call.seconds:.2f}")


if __name__ == "__main__":
  main()
