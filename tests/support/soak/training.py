"""Tiny runs of every trainer, each with the run that nothing disturbed to be compared with."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxtext_posttrain.report import read_metrics
from tests.support import runs
from tests.support.grpo import REWARD
from tests.support.soak.cases import Bench, FaultFoundError, require

STEPS = 6
TIME_LIMIT = 3600.0
"""Seconds after which a run hangs; the machine may be busy with something else for long."""
_SIZES = """\
base_emb_dim: 16
base_mlp_dim: 32
base_num_decoder_layers: 1
base_num_query_heads: 2
base_num_kv_heads: 1
head_dim: 8
"""
_COMMON = f"""\
steps: {STEPS}
checkpoint_period: 1
max_num_checkpoints_to_keep: 3
enable_tensorboard: false
log_every: 1
"""
_BATCH = """\
per_device_batch_size: 2
gradient_accumulation_steps: 2
dropout_rate: 0.1
enable_dropout: true
"""
_EVALUATION = "eval_interval: 2\neval_steps: 2\n"
_SFT = f"base_config: [quickstart/sft.yml]\n{_SIZES}{_COMMON}{_BATCH}{_EVALUATION}"
CONFIGS = {
  "sft": _SFT,
  "lora": f"""{_SFT}\
lora:
  enable_lora: true
  lora_rank: 2
  lora_alpha: 4
lora_fresh_base: true
learning_rate: 1.e-2
""",
  "dpo": f"base_config: [quickstart/dpo.yml]\n{_SIZES}{_COMMON}{_BATCH}{_EVALUATION}",
  "distill": f"""base_config: [quickstart/distillation.yml]
{_SIZES}{_COMMON}{_BATCH}{_EVALUATION}\
teacher_overrides:
  load_parameters_path: {{teacher}}
student_overrides:
  base_num_decoder_layers: 1
student_init_from_teacher_layers: [0]
distill_alpha: 0.8
distill_alpha_end: 0.2
distill_alpha_schedule: linear
""",
  # Two updates of two micro-batches a rollout, made twice: a rollout is four updates.
  "grpo": f"""base_config: [quickstart/grpo.yml]
{_SIZES}{_COMMON}\
per_device_batch_size: 4
gradient_accumulation_steps: 2
batch_size: 4
eval_interval: -1
matmul_precision: highest
rl:
  num_iterations: 2
  use_rollout_logps: false
  grpo_beta: 0.05
reward_weights: {{{{"{{reward}}:even": 1.0, finished: 0.1}}}}
""",
}
"""Our configurations by trainer, with the places of other files to be filled in."""
TRAINERS = tuple(CONFIGS)
_COMMANDS = {"lora": "sft"}
_PROCESSES = {
  "sft": runs.SftProcess,
  "dpo": runs.DpoProcess,
  "distill": runs.DistillProcess,
  "grpo": runs.GrpoProcess,
}
_CLOCKED = ("_seconds", "_per_second", "_per_device", "mfu")


def command(trainer: str) -> str:
  """The command line's name of a trainer."""
  return _COMMANDS.get(trainer, trainer)


@dataclasses.dataclass(frozen=True)
class Reference:
  """The run that nothing disturbed.

  Attributes:
    steps: each checkpoint's leaves by path, as their digests.
    metrics: the run's, without what depends on the clock.
    samples: completions it wrote down.
    seconds: it took.
    size: bytes of a checkpoint.
  """

  steps: Mapping[str, Mapping[str, str]]
  metrics: list[dict[str, Any]]
  samples: str
  seconds: float
  size: int


def write_config(folder: Path, trainer: str, shared: Path) -> Path:
  """Writes a trainer's configuration and what it names; returns the configuration's file."""
  text = CONFIGS[trainer]
  if "{" in text:
    teacher = shared / "sft" / "run" / "checkpoints" / str(STEPS) / "items"
    # Samples name the file: it is one for all runs that are compared.
    reward = shared / "reward.py"
    reward.write_text(REWARD)
    text = text.format(teacher=teacher, reward=reward)
  path = folder / f"{trainer}.yml"
  path.write_text(text, encoding="utf-8")
  return path


def start(trainer: str, argv: list[str], log: Path) -> runs.SftProcess:
  """A trainer in a process of its own."""
  return _PROCESSES[command(trainer)](argv, log)


def wait(process: runs.SftProcess) -> int:
  """The exit code.

  Raises:
    FaultFoundError: the process does not end.
  """
  code = process.wait_at_most(TIME_LIMIT)
  if code is None:
    process.kill()
    raise FaultFoundError(f"the process did not end within {TIME_LIMIT:g} s: {_tail(process)}")
  return code


def reference(trainer: str, shared: Path) -> Reference:
  """A trainer's undisturbed run, made at the first call and kept in `shared`."""
  folder = shared / trainer
  path = folder / "reference.json"
  if not path.exists():
    if trainer == "distill":
      reference("sft", shared)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    argv = arguments(write_config(folder, trainer, shared), folder, "run", "max_num_checkpoints_to_keep=99")
    process = start(trainer, argv, folder / "log")
    require(wait(process) == 0, f"the undisturbed run failed: {_tail(process)}")
    run = folder / "run"
    found = Reference(
      steps={str(step): leaf_digests(checkpoints(run) / str(step)) for step in committed(run)},
      metrics=metrics(run),
      samples=samples(run),
      seconds=run_seconds(run),
      size=sum(file.stat().st_size for file in (checkpoints(run) / str(STEPS)).rglob("*") if file.is_file()),
    )
    require(list(found.steps) == [str(step + 1) for step in range(STEPS)], f"checkpoints {list(found.steps)}")
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(dataclasses.asdict(found)))
    partial.rename(path)
  return Reference(**json.loads(path.read_text()))


def arguments(config: Path, output: Path, name: str, *extra: str) -> list[str]:
  """A run's command line."""
  return [str(config), f"base_output_directory={output}", f"run_name={name}", *extra]


def checkpoints(run: Path) -> Path:
  """Where a run's steps lie."""
  actor = run / "checkpoints" / "actor"
  return actor if actor.exists() else run / "checkpoints"


def committed(run: Path) -> list[int]:
  """The steps whose checkpoints are complete: Orbax gives them their name last."""
  folder = checkpoints(run)
  return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.exists() else []


def newest(run: Path) -> int:
  """The newest complete checkpoint; 0 where there is none."""
  return max(committed(run), default=0)


def leaf_digests(step: Path) -> dict[str, str]:
  """Every leaf of a checkpoint's `items` by its path: a digest of its type, shape and bits."""
  digests = {}
  with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Sharding info not provided")
    items = runs.items(step)
  for path, leaf in items.items():
    head = f"{leaf.dtype} {leaf.shape} ".encode()
    digests["/".join(map(str, path))] = hashlib.sha256(head + leaf.tobytes()).hexdigest()[:16]
  return digests


def metrics(run: Path) -> list[dict[str, Any]]:
  """A run's metrics without what depends on the clock."""
  path = run / "metrics.jsonl"
  if not path.exists():
    return []
  return [{key: value for key, value in record.items() if not key.endswith(_CLOCKED)} for record in read_metrics(path)]


def samples(run: Path) -> str:
  """What a run wrote down of its completions."""
  path = run / "samples.jsonl"
  return path.read_text(encoding="utf-8") if path.exists() else ""


def run_seconds(run: Path) -> float:
  """How long a run's files were written: from the configuration to the last metrics."""
  times = [path.stat().st_mtime for path in run.rglob("*")]
  return max(times) - min(times)


def require_whole(run: Path, expected: Reference) -> None:
  """Every complete checkpoint is the undisturbed run's of that step, to the bit."""
  for step in committed(run):
    have, want = leaf_digests(checkpoints(run) / str(step)), expected.steps[str(step)]
    wrong = sorted(path for path in {*have, *want} if have.get(path) != want.get(path))
    require(not wrong, f"checkpoint {step}: {len(wrong)} of {len(want)} leaves differ, first {wrong[:2]}")


def require_same_end(run: Path, expected: Reference) -> None:
  """The run is at its last step, and its checkpoints, metrics and samples are the undisturbed run's."""
  require(newest(run) == STEPS, f"the newest checkpoint is {newest(run)}, not {STEPS}")
  require_whole(run, expected)
  have = metrics(run)
  if have != expected.metrics:
    index = next((i for i, pair in enumerate(zip(have, expected.metrics, strict=False)) if pair[0] != pair[1]), -1)
    raise FaultFoundError(
      f"{len(have)} records of metrics for {len(expected.metrics)}, the first that differs: {index}"
    )
  require(samples(run) == expected.samples, "samples.jsonl differs")


def require_honest(process: runs.SftProcess, run: Path) -> None:
  """A run that says it ended, or names a checkpoint, has that checkpoint."""
  said = process.output()
  require("Traceback" not in said, f"a traceback: {_tail(process)}")
  for match in re.finditer(r"^checkpoint: (\S+)/items$", said, re.MULTILINE):
    require(Path(match[1]).is_dir(), f"{match[1]} was reported and is not there")
  if match := re.search(r" ended at step (\d+) of ", said):
    require(newest(run) >= int(match[1]), f"ended at step {match[1]}, and checkpoint {newest(run)} is the newest")


def started_at(process: runs.SftProcess) -> int | None:
  """The step that a run said it goes on from; None before it said so."""
  match = re.search(r": step (\d+) of \d+, ready", process.output())
  return None if match is None else int(match[1])


def finish(bench: Bench, trainer: str, argv: list[str], run: Path, expected: Reference) -> None:
  """Runs to the end: from the newest complete checkpoint, to the undisturbed run's bits."""
  before = newest(run)
  process = start(trainer, argv, bench.folder / "last.log")
  require(wait(process) == 0, f"the last resume failed: {_tail(process)}")
  require(started_at(process) == before, f"resumed at step {started_at(process)}, and checkpoint {before} was there")
  require_honest(process, run)
  require_same_end(run, expected)


def errors(process: runs.SftProcess) -> list[str]:
  """The error lines that a run printed."""
  return [line for line in process.output().splitlines() if line.startswith("error: ")]


def _tail(process: runs.SftProcess) -> str:
  lines = process.output().strip().splitlines()
  return " | ".join(lines[-4:])[-600:]
