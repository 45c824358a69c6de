"""Configurations, data files and templates with something wrong: a success, or lines that say what is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.support.chat_samples import TEMPLATES
from tests.support.grpo import DATA
from tests.support.soak import mutate, training
from tests.support.soak.cases import Bench, Outcome, Part, require
from tests.support.soak.worker import Worker, WorkerHangsError

_KINDS = ("configuration", "data", "configuration", "template")
_MEMORY = 6 << 30
_ROWS = {
  "sft": ("quickstart_chat.jsonl", "quickstart_chat_eval.jsonl"),
  "dpo": ("quickstart_pairs.jsonl", "quickstart_pairs_eval.jsonl"),
  "grpo": ("sums.jsonl", "sums_eval.jsonl"),
}
_ROWS |= {"lora": _ROWS["sft"], "distill": _ROWS["sft"]}


class Mutations:
  """Makes the cases in one process, one after another."""

  def __init__(self) -> None:
    self._worker = Worker()

  @property
  def part(self) -> Part:
    """The part of the soak."""
    return Part("mutations", 300, 100, self.run)

  def close(self) -> None:
    """Ends the process."""
    self._worker.close()

  def run(self, bench: Bench) -> Outcome:
    """Writes valid files, changes one of them, and runs the trainer that reads it."""
    chance = bench.random()
    kind = _KINDS[bench.case % len(_KINDS)]
    trainer = chance.choice(training.TRAINERS)
    if trainer == "distill":
      training.reference("sft", bench.shared)
    argv = _prepare(bench.folder, bench.shared, trainer, kind, chance)
    before = _contents(bench.folder)
    log = bench.folder.with_suffix(".log")
    try:
      code = self._worker.call(run_command, argv, str(bench.folder), str(log))
    except WorkerHangsError:
      if list(bench.folder.glob("out/*/metrics.jsonl")):
        return Outcome(f"{kind}: trains on and on")
      raise
    said = log.read_text(encoding="utf-8", errors="replace")
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    shown = f"{' '.join(argv)}: {errors[:3] or said[-500:]}"
    require("Traceback (most" not in said, f"a traceback: {shown}")
    require(not any("internal:" in line for line in errors), shown)
    require(code in (0, 1, 2), f"exit code {code}: {shown}")
    require(bool(errors) == (code != 0), f"exit code {code} with {len(errors)} error lines: {shown}")
    require(code != 1 or len(errors) == 1, f"{len(errors)} error lines: {shown}")
    require(code == 0 or " ended at step " not in said, f"it says that it ended, and leaves with {code}: {shown}")
    after = _contents(bench.folder)
    changed = [name for name, data in before.items() if after.get(name) != data]
    require(not changed, f"written over: {changed}")
    if "--dry-run" in argv:
      require(not [name for name in after if name.startswith("out/") and name not in before], "a dry run wrote files")
    log.unlink()
    return Outcome(f"{kind}: {'runs' if code == 0 else f'refused with {code}'}")


def run_command(argv: list[str], folder: str, log: str) -> int:
  """One command line in this process, its output in a file, its memory bounded."""
  from maxtext_posttrain import cli

  with _output_in(Path(log)), _bounded_memory():
    os.chdir(folder)
    try:
      return cli.main(argv)
    except SystemExit as left:
      return left.code if isinstance(left.code, int) else 1


@contextlib.contextmanager
def _output_in(log: Path) -> Iterator[None]:
  """Standard output and error into a file, those of native code too."""
  saved = [os.dup(number) for number in (1, 2)]
  descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
  try:
    for number in (1, 2):
      os.dup2(descriptor, number)
    yield
  finally:
    sys.stdout.flush()
    sys.stderr.flush()
    for number, old in zip((1, 2), saved, strict=True):
      os.dup2(old, number)
      os.close(old)
    os.close(descriptor)


@contextlib.contextmanager
def _bounded_memory() -> Iterator[None]:
  """What a wrong size asks for is refused here, and not taken from the rest of the machine."""
  used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
  before = resource.getrlimit(resource.RLIMIT_AS)
  resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_AS, before)


def _prepare(folder: Path, shared: Path, trainer: str, kind: str, chance: random.Random) -> list[str]:
  """Writes a run's files, one of them changed; returns its command line."""
  path = training.write_config(folder, trainer, shared)
  rows = [json.loads(line) for line in (DATA / _ROWS[trainer][0]).read_text().splitlines()[:12]]
  name, data = "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode()
  (folder / "eval.jsonl").write_bytes((DATA / _ROWS[trainer][1]).read_bytes())
  template = resources.files("maxtext_posttrain.tokenizers").joinpath("templates", f"{chance.choice(TEMPLATES)}.jinja")
  source = template.read_text(encoding="utf-8")
  if kind == "data":
    name, data = mutate.rows(chance, rows)
  (folder / name).write_bytes(data)
  (folder / "t.jinja").write_bytes(mutate.template(chance, source) if kind == "template" else source.encode())
  text = path.read_text()
  if kind == "configuration":
    text = text.replace(f"steps: {training.STEPS}\n", "steps: 1\n")
  else:
    # Where the data say how many steps there are, they are read before anything is compiled.
    text = text.replace(f"steps: {training.STEPS}\n", "num_epoch: 1\n")
    text = re.sub(r"quickstart/(\w+)\.yml", lambda found: _without_steps(folder, found[1]), text)
  text += f"run_name: r\nbase_output_directory: out\nhf_train_files: {name}\nhf_eval_files: eval.jsonl\n"
  text += "chat_template: t.jinja\n" if kind == "template" else ""
  text += "max_bad_rows: 0.9\n" if kind == "data" and chance.random() < 0.5 else ""
  content = mutate.configuration(chance, text, _known_keys(chance)) if kind == "configuration" else text.encode()
  path.unlink()
  (folder / "own.yml").write_bytes(content)
  kept = folder / "out" / "mine" / "metrics.jsonl"
  kept.parent.mkdir(parents=True)
  kept.write_text("mine\n")
  return [training.command(trainer), "own.yml", *(["--dry-run"] if chance.random() < 0.6 else [])]


def _without_steps(folder: Path, name: str) -> str:
  """Writes a quickstart's configuration without how long it trains; returns its name."""
  text = (REPOSITORY / "configs" / "quickstart" / f"{name}.yml").read_text(encoding="utf-8")
  text = re.sub(r"^steps:.*\n", "", text, flags=re.MULTILINE).replace("../", "")
  (folder / "quickstart.yml").write_text(text, encoding="utf-8")
  return "quickstart.yml"


def _known_keys(chance: random.Random) -> mutate.Keys:
  from maxtext_posttrain.config import OUR_KEYS
  from maxtext_posttrain.config.schema import Schema

  # Ours are few beside MaxText's: they come as often.
  keys = {name: key.spec for name, key in Schema.load().keys.items()}
  return keys if chance.random() < 0.5 else {name: keys[name] for name in OUR_KEYS}


def _contents(folder: Path) -> dict[str, bytes]:
  return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
