"""The scripts of end_to_end: without a complaint of shellcheck, planned for a TPU host, and run whole on the CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

SCRIPTS = REPOSITORY / "end_to_end"
TRAINERS = ("sft", "dpo", "grpo", "distill")
MODELS = ("qwen3-0.6b", "qwen2.5-1.5b", "gemma3-4b", "llama3.1-8b")
CIRCLE = ("pretrain", "sft", "dpo", "grpo", "distill", "resume", "export")

RECORDER = """\
#!{python}
import json, os, sys
with open({log!r}, "a") as log:
  print(json.dumps(sys.argv[1:]), file=log)
"""
# What it trains it writes as a file of facts, which its `inspect` compares with what is required.
STAND_IN = """\
#!{python}
import json, os, pathlib, sys
verb, path = sys.argv[1:3]
keys = dict(word.split("=", 1) for word in sys.argv[3:] if "=" in word)
if verb == "inspect":
  facts = json.loads((pathlib.Path(path) / "facts").read_text())
  wrong = [key for key in keys if str(facts.get(key, keys[key])) != keys[key]]
  print("\\n".join(f"error: {{key}}" for key in wrong), file=sys.stderr)
  sys.exit(bool(wrong))
run = pathlib.Path(keys["base_output_directory"]) / keys["run_name"]
run.mkdir(parents=True, exist_ok=True)
(run / "facts").write_text(json.dumps({{"step": int(keys["steps"]) - (verb == os.environ.get("SHORT"))}}))
sys.exit(verb == os.environ.get("FAILS"))
"""
# Runs many command lines in one process, and says of each its exit code and what it printed.
MANY = """\
import contextlib, io, json, sys
from maxtext_posttrain.cli import main
for line in sys.stdin:
  with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
    code = main(json.loads(line))
  print("RESULT", json.dumps([code, out.getvalue()]), flush=True)
"""


def run_script(script: str, *arguments: str, **environment: object) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [SCRIPTS / script, *arguments],
    env={
      **os.environ,
      "PYTHON": sys.executable,
      "POSTTRAIN": str(Path(sys.executable).with_name("posttrain")),
      "PYTHONPATH": str(REPOSITORY / "src"),
      **{name: str(value) for name, value in environment.items()},
    },
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
  )


def executable(path: Path, text: str, **places: str) -> Path:
  path.write_text(text.format(python=sys.executable, **places), encoding="utf-8")
  path.chmod(0o755)
  return path


def table(output: str) -> dict[str, str]:
  """The outcome of each step, from the table at the end."""
  lines = output[output.index("step         outcome") :].splitlines()[1:]
  return {line[:12].strip(): line[13:37].strip() for line in lines if line and not line.startswith("error")}


def test_shellcheck():
  program = shutil.which("shellcheck") or Path(sys.executable).with_name("shellcheck")
  found = subprocess.run(["git", "ls-files", "*.sh"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
  scripts = found.stdout.split()
  assert "end_to_end/cpu/circle.sh" in scripts
  result = subprocess.run([program, "-x", *scripts], cwd=REPOSITORY, capture_output=True, text=True, check=False)
  assert result.returncode == 0, result.stdout


def test_every_machine_has_every_script():
  for machine in ("cpu", "v6e-8"):
    assert {path.stem for path in (SCRIPTS / machine).glob("*.sh")} == {*TRAINERS, "circle", "settings"}


def test_a_wrong_model_or_option_is_told():
  for script, argument, line in (
    ("v6e-8/sft.sh", "qwen3-7b", "qwen3-7b: no such model; there are qwen3-0.6b, qwen2.5-1.5b"),
    ("cpu/sft.sh", "--dryrun", "--dryrun: no such option; there is --dry-run"),
  ):
    result = run_script(script, argument)
    assert result.returncode == 2
    assert line in result.stdout


@pytest.fixture
def stand_in(tmp_path: Path) -> dict[str, object]:
  """The environment in which a script's `posttrain` only notes what it was to train."""
  program = executable(tmp_path / "posttrain", STAND_IN)
  # Pre-training is called as `python end_to_end/pretrain.py CONFIG key=value ... --run-name NAME`.
  python = executable(
    tmp_path / "python",
    "#!/bin/bash\n"
    'shift 2; for key in "$@"; do [[ "$key" == *=* ]] && keys+=("$key"); done\n'
    'exec {program} pretrain config "${{keys[@]}}" run_name="$(sed \'s/.*--run-name \\([a-z]*\\).*/\\1/\' <<<"$*")"\n',
    program=str(program),
  )
  return {"POSTTRAIN": program, "PYTHON": python, "OUTPUT": tmp_path / "out"}


def test_a_failed_step_ends_it_and_the_next_call_goes_on(stand_in: dict[str, object]):
  failed = run_script("cpu/sft.sh", FAILS="sft", **stand_in)
  assert failed.returncode == 1
  assert table(failed.stdout) == {"pretrain": "passed", "sft": "FAILED"}
  # It wrote what was asked of it all the same: what lies there decides.
  again = run_script("cpu/sft.sh", **stand_in)
  assert again.returncode == 0
  assert table(again.stdout) == dict.fromkeys(("pretrain", "sft"), "passed over, was done")
  assert "passed over: " in again.stdout


def test_a_step_that_ends_well_and_wrote_too_little_has_failed(stand_in: dict[str, object]):
  short = run_script("cpu/dpo.sh", SHORT="dpo", **stand_in)
  assert short.returncode == 1
  assert table(short.stdout) == {"pretrain": "passed", "dpo": "FAILED"}
  assert "error: step" in short.stdout
  mended = run_script("cpu/dpo.sh", **stand_in)
  assert mended.returncode == 0
  assert table(mended.stdout) == {"pretrain": "passed over, was done", "dpo": "passed"}


def test_steps_after_a_failed_one_are_not_run(stand_in: dict[str, object]):
  result = run_script("cpu/circle.sh", FAILS="pretrain", **stand_in)
  assert result.returncode == 1
  assert table(result.stdout) == {**dict.fromkeys(CIRCLE, "not run"), "pretrain": "FAILED"}


def plan_of(script: str, model: str, folder: Path) -> list[list[str]]:
  """The command lines that a script's dry run makes of `posttrain`."""
  log = folder / "commands.jsonl"
  log.unlink(missing_ok=True)
  program = executable(folder / "recorder", RECORDER, log=str(log))
  result = run_script(f"v6e-8/{script}.sh", model, "--dry-run", POSTTRAIN=program, WORK=folder / model)
  assert result.returncode == 0, result.stdout
  outcomes = table(result.stdout)
  assert all(outcomes[name] == ("planned" if name in TRAINERS else "left out of a dry run") for name in outcomes)
  return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_dry_runs_for_a_tpu_host(tmp_path: Path):
  commands: dict[tuple[str, str], list[str]] = {}
  for model in MODELS:
    for trainer in TRAINERS:
      (commands[model, trainer],) = plan_of(trainer, model, tmp_path)
  # The circle plans the same, so that it need not be planned twice.
  assert plan_of("circle", MODELS[0], tmp_path) == [commands[MODELS[0], trainer] for trainer in TRAINERS]
  batch = "per_device_batch_size="
  too_large = [
    *(word for word in commands["llama3.1-8b", "grpo"] if not word.startswith((batch, "num_vocab_tiling="))),
    f"{batch}8",
    "rl.grpo_beta=0.04",
  ]
  environment = {
    **os.environ,
    "PYTHONPATH": str(REPOSITORY / "src"),
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
  }
  process = subprocess.run(
    [sys.executable, "-c", MANY],
    input="\n".join(map(json.dumps, [*commands.values(), too_large])),
    env=environment,
    cwd=REPOSITORY,
    capture_output=True,
    text=True,
    check=False,
  )
  results = [json.loads(line[7:]) for line in process.stdout.splitlines() if line.startswith("RESULT ")]
  assert len(results) == len(commands) + 1, process.stderr
  for (model, trainer), (code, out) in zip(commands, results[:-1], strict=True):
    assert code == 0, out
    assert f"run         {trainer} " in out
    assert f"model       {model}: " in out
    assert "on 8 device(s)" in out
    assert "GiB a device, estimated, of 31.2 GiB" in out
    assert ("keys and values" in out) == (trainer == "grpo")
  code, out = results[-1]
  assert code == 2
  assert "error: memory: the run needs about " in out
  assert "which has 31.2 GiB" in out


@pytest.mark.slow
def test_a_dry_run_by_itself(tmp_path: Path):
  result = run_script("v6e-8/sft.sh", "qwen3-0.6b", "--dry-run", "max_target_length=1024", WORK=tmp_path)
  assert result.returncode == 0, result.stdout
  assert "sequences of 1024 tokens" in result.stdout
  assert "GiB a device, estimated, of 31.2 GiB" in result.stdout
  assert table(result.stdout) == {"pretrain": "left out of a dry run", "sft": "planned"}
  assert [path.name for path in tmp_path.iterdir()] == ["sft.yml"]


@pytest.mark.slow
def test_the_circle_on_the_cpu(tmp_path: Path):
  output = tmp_path / "tiny"
  whole = run_script("cpu/circle.sh", OUTPUT=output)
  assert whole.returncode == 0, whole.stdout[-3000:]
  assert table(whole.stdout) == dict.fromkeys(CIRCLE, "passed")
  assert (output / "export" / "huggingface" / "config.json").is_file()
  # One file of what SFT wrote is cut off: nothing after it is touched, and nothing is called passed.
  (metadata,) = output.glob("sft/checkpoints/*/items/_METADATA")
  metadata.write_bytes(metadata.read_bytes()[:20])
  damaged = run_script("cpu/circle.sh", OUTPUT=output)
  assert damaged.returncode == 1, damaged.stdout[-3000:]
  assert table(damaged.stdout) == {
    **dict.fromkeys(CIRCLE, "not run"),
    "pretrain": "passed over, was done",
    "sft": "FAILED",
  }
