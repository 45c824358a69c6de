"""Every command in an `sh` block of the documents parses, and names keys, files and targets that there are."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from maxtext_posttrain.commands import TOOLS, arguments
from maxtext_posttrain.config import load_config
from maxtext_posttrain.config.lookup import Folders
from maxtext_posttrain.config.schema import Schema
from maxtext_posttrain.errors import ConfigError
from tests.conftest import REPOSITORY
from tests.support.commands import Command
from tests.support.documents import PAGES, blocks, name_of, shell_commands

COMMANDS = [(name_of(page), words) for page in PAGES for words in shell_commands(page)]

MODEL = "model_name: default\nbase_emb_dim: 64\nbase_num_decoder_layers: 2\nvocab_size: 32000\n"
RUN = "run_name: r\nbase_output_directory: runs\nsteps: 5\nhf_train_files: data/train.jsonl\n"
TOKENS = "tokenizer_type: sentencepiece\ntokenizer_path: maxtext://tokenizers/tokenizer.llama2\nchat_template: llama2\n"
READERS_FILES = {
  "my_sft.yml": f"base_config: sft.yml\n{RUN}{TOKENS}",
  "my_grpo.yml": f"base_config: grpo.yml\n{RUN}{TOKENS}",
  "my.yml": f"base_config: distillation.yml\n{RUN}{TOKENS}teacher_overrides: {{load_parameters_path: models/t}}\n",
  "models/mine/model.yml": MODEL,
  "models/llama/model.yml": MODEL,
}
"""What documents call the reader's own: a configuration of theirs, an import's model.yml."""

KEYS = (
  "hf_train_files=data/train.jsonl",
  "tokenizer_path=maxtext://tokenizers/tokenizer.llama2",
  "chat_template=llama2",
)
"""What `<model and data keys>` stands for."""

_MISSING = re.compile(r"(?:^|: )[\w.]+=(\S+): (?:no such (?:file|folder)|matches no file)")


class Parsed(Exception):
  """A command line was understood; what it would do is not done."""


@pytest.fixture
def readers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  """A folder like the one a reader works in: the repository's configs, and files of their own."""
  (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
  for name, text in READERS_FILES.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text, encoding="utf-8")
  monkeypatch.chdir(tmp_path)
  return tmp_path


@pytest.fixture
def parsing_only(monkeypatch: pytest.MonkeyPatch) -> None:
  for name in ("parse_args", "parse_intermixed_args"):
    parse: Callable[..., Any] = getattr(arguments.ArgumentParser, name)

    def stop(self: Any, *given: Any, parse: Callable[..., Any] = parse) -> None:
      raise Parsed(parse(self, *given))

    monkeypatch.setattr(arguments.ArgumentParser, name, stop)


@functools.cache
def known_keys() -> frozenset[str]:
  schema = Schema.load()
  return frozenset(schema.keys) | schema.groups


def check_config(argv: Sequence[str], trainer: str, folder: Path) -> None:
  """Loads a configuration; what it names that only a reader has (runs, models, data) is made to be there."""
  made: set[str] = set()
  while True:
    try:
      load_config(argv, trainer=trainer, environ={})
      return
    except ConfigError as error:
      missing = {found[1] for problem in error.problems if (found := _MISSING.search(problem))}
      if not missing or missing & made or any(path.startswith(("configs/", "maxtext://")) for path in missing):
        raise
      for path in missing:
        target = folder / path.replace("*", "x")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir() if not target.suffix or target.suffix == ".py" else target.touch()
      made |= missing


def check_trainer(trainer: str, words: Sequence[str], folder: Path) -> None:
  given = [word for word in words if not word.startswith("-")]
  options = {word for word in words if word.startswith("-")}
  assert options <= {"--help", "--dry-run", "--no-compile", "--print-config", "--debug"}
  argv = [key for word in given for key in (KEYS if word == "KEYS" else [word])]
  if "--help" in options:
    assert (folder / argv[0]).is_file()
  else:
    check_config(argv, trainer, folder)


def check_keys(words: Sequence[str]) -> None:
  keys = {word.partition("=")[0] for word in words if re.match(r"[a-z][\w.]*=", word)}
  assert keys <= known_keys(), f"no such keys: {sorted(keys - known_keys())}"


def check_tool(tool: str, words: Sequence[str]) -> None:
  with pytest.raises(Parsed):
    TOOLS[tool].load()(words)


def check(words: Sequence[str], folder: Path) -> None:
  """One command.

  Raises:
    AssertionError: it names what there is not.
    ConfigError: its configuration or its arguments are wrong.
  """
  command = Command.of(words)
  match command.kind:
    case "trainer":
      check_trainer(command.name, command.arguments, folder)
    case "tool":
      check_tool(command.name, command.arguments)
    case "ellipsis":
      check_keys(command.arguments)
    case "maxtext":
      package = Folders.find({}).maxtext.parent
      assert (package.parent / f"{command.name.replace('.', '/')}.py").is_file(), f"MaxText has no {command.name}"
      check_keys(command.arguments)
    case "make":
      targets = re.findall(r"^([a-z0-9-]+):.*##", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
      named = {word for word in command.arguments if not re.match(r"[A-Z_]+=", word)}
      assert named <= set(targets), f"no such target: {words}"
    case "script":
      script = (REPOSITORY / command.name).resolve()
      assert script.is_file(), f"no such script: {command.name}"
      assert os.access(script, os.X_OK), f"{command.name} can't be run"
      check_keys(command.arguments)


@pytest.mark.usefixtures("parsing_only")
@pytest.mark.parametrize(
  ("page", "words"), COMMANDS, ids=[f"{page}:{' '.join(words)[:60]}" for page, words in COMMANDS]
)
def test_command(page: str, words: list[str], readers_folder: Path):
  check(words, readers_folder)


def test_documents_have_commands():
  pages = {page for page, _ in COMMANDS}
  assert {"README.md", "CONTRIBUTING.md", "docs/quickstart.md", "docs/sft.md", "docs/dpo.md", "docs/lora.md"} <= pages


@pytest.mark.usefixtures("parsing_only")
@pytest.mark.parametrize(
  "line",
  [
    "make quickstrat",
    "posttrain inspekt runs/a",
    "posttrain inspect",
    "posttrain eval runs/a --datta x.jsonl",
    "python -m train_sft configs/sft.yml run_name=a base_output_directory=b stepz=3",
    "python -m train_sft configs/quickstart/none.yml",
    "python -m train_dpo configs/dpo.yml --dry",
    "python -m maxtext.trainers.pretrain.train base.yml",
    "… load_parameter_path=a",
    "curl somewhere",
    "end_to_end/cpu/rl.sh",
    "STEPS=3 end_to_end/cpu/sft.sh tiny stepz=3",
  ],
)
def test_a_wrong_command_is_found(line: str, readers_folder: Path):
  with pytest.raises((AssertionError, ConfigError)):
    check(line.split(), readers_folder)


YAML_BLOCKS = [(name_of(page), text) for page in PAGES for text in blocks(page, "yaml")]


@pytest.mark.parametrize(("page", "text"), YAML_BLOCKS, ids=[page for page, _ in YAML_BLOCKS])
def test_yaml(page: str, text: str, readers_folder: Path):
  (readers_folder / "block.yml").write_text(text, encoding="utf-8")
  extra = [] if "tokenizer_path" in text else [KEYS[1]]
  check_config(["block.yml", *extra], "sft", readers_folder)
