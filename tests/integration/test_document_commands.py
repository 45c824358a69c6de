"""Every command of README.md and docs is run: page by page, in a folder that has what the page takes for granted.

A command runs with its own words in this process, by the function that its program calls. What a page leaves to the
reader is filled in: `<run>`, SOURCE, their YAML and data. A model of a real size is made tiny by keys that follow the
command, and its `steps` are few. What is not run at all stands in `NOT_RUN`, with the reason.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

import pytest

from maxtext_posttrain import cli
from tests.conftest import REPOSITORY
from tests.support import runs, toys
from tests.support.cli import run_cli
from tests.support.commands import PRETRAINING, Command
from tests.support.devices import environment
from tests.support.documents import PAGES, blocks, name_of, shell_commands

pytestmark = pytest.mark.slow

NOT_RUN = {
  "it runs this test, or stands for it": ("make setup", "make test", "make test-fast", "make lint"),
  "takes hours, its slice ten minutes; tests/end_to_end/test_soak_slice.py runs some of it": (
    "make soak",
    "make soak-slice",
  ),
  "tests/end_to_end/test_scripts.py runs it, or the script that it calls": (
    "make end-to-end",
    "make end-to-end-plans",
    "end_to_end/cpu/circle.sh smollm2",
    "STEPS=20 end_to_end/cpu/sft.sh tiny learning_rate=3e-3",
    "end_to_end/v6e-8/circle.sh llama3.1-8b --dry-run",
  ),
  "needs a TPU host": ("SOURCE=models/my-hf-model STEPS=100 end_to_end/v6e-8/circle.sh llama3.1-8b",),
  "needs a second process; tests/integration/test_two_processes.py starts both": (
    "JAX_COORDINATOR_ADDRESS=10.0.0.1:8476 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0"
    " python -m train_sft my_sft.yml skip_jax_distributed_system=false",
  ),
}

STEPS = 2
HERE = {
  "hardware": "cpu",
  "attention": "dot_product",
  "dtype": "float32",
  "skip_jax_distributed_system": "true",
  "enable_goodput_recording": "false",
  "enable_tensorboard": "false",
  "async_checkpointing": "false",
}
"""What the machine of the tests wants."""

SMALL = HERE | {
  "override_model_config": "true",
  "base_emb_dim": "16",
  "base_mlp_dim": "32",
  "base_num_query_heads": "4",
  "base_num_kv_heads": "2",
  "head_dim": "8",
  "base_num_decoder_layers": "4",
  "max_target_length": "96",
  "per_device_batch_size": "1",
}
"""Of a command that names a model; the model's vocabulary stays, for the tokenizer's sake."""

SHORT = {"steps": str(STEPS), "student_overrides.base_num_decoder_layers": "2"}
"""In place of the same keys of such a command."""

LLAMA3 = (
  "model_name=llama3.1-8b tokenizer_type=tiktoken tokenizer_path=maxtext://tokenizers/tokenizer_llama3.tiktoken"
  " chat_template=llama3"
)
PLACEHOLDERS = {
  "pre-training run": "runs/base",
  "run": "runs/base",
  "base": f"runs/base/checkpoints/{STEPS}",
  "step": str(STEPS),
  "the SFT run": "my-sft",
  "new": "new-{0}",
  "model and data keys": f"{LLAMA3} hf_train_files=data/train.jsonl",
  "model keys": "model_name=llama3.1-8b base_output_directory=runs dataset_type=synthetic",
}


def data(name: str) -> str:
  return (REPOSITORY / "configs" / "data" / name).read_text(encoding="utf-8")


# The quickstart's, but for its length.
MY_SFT = (
  blocks(REPOSITORY / "docs" / "quickstart.md", "yaml")[0]
  .replace("steps: 1000", f"steps: {STEPS}")
  .replace("max_target_length: 2048", "max_target_length: 96")
) + "".join(f"{key}: {value}\n" for key, value in HERE.items())
MY_DISTILLATION = f"""\
base_config: configs/quickstart/distillation.yml
run_name: my
steps: {STEPS}
student_init_from_teacher_layers: null
"""
MY_REWARDS = blocks(REPOSITORY / "docs" / "adding_a_reward.md", "python")[0]
SUM = [
  {"role": "user", "content": "How many are 2 apples and 3?"},
  {"role": "assistant", "content": "Together 5.\n#### 5"},
]


@dataclass(frozen=True)
class Given:
  """What a page takes for granted.

  Attributes:
    files: what a reader has written, by name.
    made: what other pages left, or a reader's own work: what it is called there, and which of `Made` it is.
  """

  files: dict[str, str] = field(default_factory=dict)
  made: dict[str, str] = field(default_factory=dict)


GIVEN = {
  "README.md": Given(
    {"my_sft.yml": MY_SFT.replace("models/mine", "models/llama"), "test.jsonl": json.dumps({"messages": SUM})},
    {"runs/base": "runs/base", "SOURCE": "huggingface"},
  ),
  "docs/adding_a_reward.md": Given(
    {"my_rewards.py": MY_REWARDS, "my_grpo.yml": f"base_config: configs/quickstart/grpo.yml\nsteps: {STEPS}\n"}
  ),
  "docs/checkpoint.md": Given(
    {"my.yml": "base_config: runs/my-sft/config.yml\n"}, {"runs/my-sft": "runs/quickstart", "old-tunix-run": "tunix"}
  ),
  "docs/devices.md": Given(),
  "docs/distillation.md": Given(
    {"my.yml": MY_DISTILLATION},
    {"runs/base": "runs/base", "runs/quickstart": "runs/quickstart"},
  ),
  "docs/dpo.md": Given({"data/pairs-1.jsonl": data("quickstart_pairs.jsonl")}, {"runs/my-sft": "runs/base"}),
  "docs/end_to_end.md": Given({}, {"runs/my-sft": "runs/base"}),
  "docs/from_trl.md": Given({"my_sft.yml": MY_SFT}, {"models/my-hf-model": "huggingface"}),
  "docs/lora.md": Given({}, {"runs/base": "runs/base"}),
  "docs/quickstart.md": Given({"my_sft.yml": MY_SFT}, {"models/my-hf-model": "huggingface"}),
  "docs/sft.md": Given({}, {"runs/base": "runs/base"}),
}

SAID = {
  "import": r"weights in ",
  "export": r"\d+ tensors",
  "merge": r"merged \d+ kernels",
  "teacher-logits": r"\d+ rows",
  "eval": r"perplexity",
  "inspect": r"load_full_state_path",
  "convert": r"read back and the same",
  "diff": r"differ",
}
"""What a tool's output has to hold."""

EXIT_CODES = {"diff": 1}
"""Of a tool whose code is not 0 here: what is compared differs."""


COMMANDS = {
  name_of(page): commands for page in PAGES if (commands := list(shell_commands(page, PLACEHOLDERS.__getitem__)))
}


def with_keys(words: Sequence[str], keys: dict[str, str]) -> list[str]:
  """A command's words with other keys' values laid over them."""
  return [*(word for word in words if word.partition("=")[0] not in keys), *(f"{k}={v}" for k, v in keys.items())]


def made_small(words: Sequence[str]) -> list[str]:
  """Of a command that names a model, the words for a tiny one and few steps; others as they are."""
  if not any(word.startswith("model_name=") for word in words):
    return list(words)
  stated = {word.partition("=")[0] for word in words}
  small = {key: value for key, value in SMALL.items() if key not in stated}
  return with_keys(words, small | {key: value for key, value in SHORT.items() if key in stated})


def write_reader(folder: Path) -> Path:
  """A folder as a reader has one: the repository's configs, and chats."""
  folder.mkdir()
  (folder / "configs").symlink_to(REPOSITORY / "configs")
  write(folder / "data" / "train.jsonl", data("quickstart_chat.jsonl"))
  write(folder / "data" / "held-out.jsonl", data("quickstart_chat_eval.jsonl"))
  return folder


def write(path: Path, text: str) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text, encoding="utf-8")


def hand_back(arguments: Sequence[str]) -> int:
  """`python scripts/hand_back.py` in this process; pre-training has one of its own."""
  path = REPOSITORY / "scripts" / "hand_back.py"
  spec = importlib.util.spec_from_file_location("hand_back", path)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "argv", [str(path), *arguments])
    return module.main()


class Made:
  """What pages take for granted, each made once, in a folder of its own; `copy` gives a page its copy."""

  def __init__(self, folder: Path):
    self._folder = write_reader(folder)

  def copy(self, name: str, target: Path) -> None:
    """Copies what is called `name`, which is made first where it is missing."""
    source = self._folder / name
    if not source.exists():
      with pytest.MonkeyPatch.context() as patch:
        patch.chdir(self._folder)
        self._MAKERS[name](self)
    shutil.copytree(source, target)

  def _base(self) -> None:
    words = (
      f"configs/sft.yml run_name=base base_output_directory=runs steps={STEPS} {PLACEHOLDERS['model and data keys']}"
    )
    assert cli.main(["sft", *made_small(shlex.split(words))]) == 0

  def _quickstart(self) -> None:
    """Each line that `make quickstart` would run."""
    # `make test` may have started this: make below make says more.
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    lines = subprocess.run(
      ["make", "-n", "-o", ".venv/.installed", "quickstart", "PYTHON=python"],
      cwd=REPOSITORY,
      env=outside,
      capture_output=True,
      text=True,
      check=True,
    ).stdout.splitlines()
    assert lines[0] == "rm -rf runs/quickstart"
    for line in lines[1:]:
      match shlex.split(line):
        case ["python", "scripts/hand_back.py", *rest]:
          assert hand_back(rest) == 0
        case words:
          command = Command.of(words)
          assert cli.main([command.name, *command.arguments]) == 0

  def _huggingface(self) -> None:
    self.copy("runs/quickstart", self._folder / "of-quickstart")
    assert cli.main(["export", "of-quickstart", "huggingface"]) == 0

  def _tunix(self) -> None:
    """A run of the quickstart's model in Tunix's layout, by Tunix's own manager, at its first step."""
    from flax import nnx
    from tunix.sft.checkpoint_manager import CheckpointManager

    from maxtext_posttrain import maxtext_api

    maxtext_api.use_pretraining_prng()
    config = maxtext_api.build_config(runs.sft_overrides(["configs/quickstart/sft.yml"]))
    mesh = maxtext_api.build_mesh(config)
    pretraining = maxtext_api.pretraining_state(config, mesh)
    adapter = toys.TunixMaxTextAdapter(maxtext_api.init_model(config, pretraining, mesh))
    manager = CheckpointManager(str(self._folder / "tunix" / "checkpoints"))
    manager.save(0, adapter, nnx.Optimizer(adapter, pretraining.tx, wrt=nnx.Param), force=True)
    manager.close()

  _MAKERS: ClassVar[dict[str, Callable[[Made], None]]] = {
    "runs/base": _base,
    "runs/quickstart": _quickstart,
    "huggingface": _huggingface,
    "tunix": _tunix,
  }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
  return Made(tmp_path_factory.mktemp("made") / "reader")


def reason_not_to_run(words: Sequence[str]) -> str | None:
  line = " ".join(words)
  return next((reason for reason, lines in NOT_RUN.items() if line in lines), None)


def run_here(command: Command, capfd: pytest.CaptureFixture[str]) -> None:
  """A trainer's or a tool's command."""
  # A trainer's arguments alone name a model.
  outcome = run_cli([command.name, *made_small(command.arguments)], capfd)
  assert outcome.code == EXIT_CODES.get(command.name, 0), f"{command}\n{outcome.err}"
  assert re.search(SAID.get(command.name, ""), outcome.out), f"{command}\n{outcome.out}"


def run_on_devices(command: Command, devices: int) -> None:
  """A trainer's command in a process that has several devices."""
  process = subprocess.run(
    [sys.executable, "-m", "maxtext_posttrain.cli", command.name, *made_small(command.arguments)],
    env={**os.environ, **environment(devices)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert process.returncode == 0, f"{command}\n{process.stderr}"


def pretrain(commands: Sequence[Command], folder: Path) -> None:
  """Pre-training's command, and those that say what stands at its end in place of its own keys."""
  first, *others = commands
  ways = [list(first.arguments)]
  for number, other in enumerate(others):
    keys = dict(word.split("=", 1) for word in other.arguments)
    ways.append(with_keys(first.arguments, keys | {"run_name": keys["run_name"].format(number)}))
  # As the page says, pre-training takes absolute paths alone.
  ways = [[re.sub(r"=(?=runs\b)", f"={Path.cwd()}/", word) for word in way] for way in ways]
  argvs = [with_keys(made_small(way), {"steps": str(STEPS + 2)}) for way in ways]
  for way, result in zip(ways, runs.pretraining(argvs, folder), strict=True):
    assert result["error"] is None, f"{way}\n{result['error']}"
    weights_alone = any(word.startswith("load_parameters_path=") for word in way)
    assert list(result["losses"]) == list(range(0 if weights_alone else STEPS, STEPS + 2))


@pytest.mark.parametrize("page", COMMANDS)
def test_page(page: str, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any):
  words_to_run = [words for words in COMMANDS[page] if reason_not_to_run(words) is None]
  folder = write_reader(tmp_path / "reader")
  monkeypatch.chdir(folder)
  given = GIVEN.get(page, Given())
  for name, text in given.files.items():
    write(folder / name, text)
  for name, source in given.made.items():
    made.copy(source, folder / name)
  commands = [Command.of(words) for words in words_to_run]
  for index, command in enumerate(commands):
    match command.kind:
      case "make":
        assert command.arguments == ("quickstart",)
        made.copy("runs/quickstart", folder / "runs" / "quickstart")
      case "maxtext":
        assert command.name == PRETRAINING
        pretrain([command, *takewhile(lambda next_: next_.kind == "ellipsis", commands[index + 1 :])], tmp_path)
      case "trainer" if any(word.startswith("ici_") for word in command.arguments):
        run_on_devices(command, 8)
      case "trainer" | "tool":
        run_here(command, capfd)
      case "ellipsis":
        assert commands[index - 1].kind in ("maxtext", "ellipsis")
      case "script":
        raise AssertionError(f"{command.name}: run it, or say in NOT_RUN why not")


def test_what_is_not_run_is_still_there():
  there = {" ".join(words) for commands in COMMANDS.values() for words in commands}
  assert {line for lines in NOT_RUN.values() for line in lines} <= there
  assert set(GIVEN) <= set(COMMANDS)
