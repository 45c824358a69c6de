"""Wrong input for the command line: what a case is, and the folders, data, checkpoints and disks that are wrong."""

from __future__ import annotations

import gzip
import json
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

MODEL = """\
base_config: [sft.yml, models/tiny.yml]
run_name: r
base_output_directory: out
per_device_batch_size: 1
max_target_length: 16
base_num_decoder_layers: 2
base_emb_dim: 16
base_mlp_dim: 32
base_num_query_heads: 2
base_num_kv_heads: 1
head_dim: 8
enable_tensorboard: false
checkpoint_period: 1
"""
SYNTHETIC = f"{MODEL}vocab_size: 64\ndataset_type: synthetic\nsteps: 2\nlearning_rate_schedule_steps: 99\n"
# Without `steps` the data say how many there are: they are read before anything is built, so a case takes no second.
CHAT = f"""{MODEL}num_epoch: 1
tokenizer_type: sentencepiece
tokenizer_path: maxtext://tokenizers/tokenizer.llama2
chat_template: plain
hf_train_files: rows.jsonl
"""
GOOD_ROW = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}


def chat(*turns: str) -> dict[str, Any]:
  """A row of `role: content` turns."""
  return {"messages": [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]}


class Room:
  """The folder a case runs in, with two configurations, good data, and a finished run to take checkpoints from."""

  def __init__(self, folder: Path, finished: Path):
    self.folder = folder
    self.finished = finished
    self.file("synthetic.yml", SYNTHETIC)
    self.file("chat.yml", CHAT)
    self.rows(GOOD_ROW)

  def file(self, name: str, content: str | bytes) -> Path:
    path = self.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path

  def rows(self, *rows: Any, name: str = "rows.jsonl") -> Path:
    return self.file(name, "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))

  def run(self) -> Path:
    """The finished run's folder, with checkpoints 1 and 2, as the run that the configurations name."""
    run = self.folder / "out" / "r"
    shutil.copytree(self.finished, run)
    return run

  def checkpoint(self) -> Path:
    """A step's folder outside the run."""
    return Path(shutil.copytree(self.finished / "checkpoints" / "2", self.folder / "given" / "2"))


Arguments = Callable[[Room], Sequence[str]]


@dataclass(frozen=True)
class Case:
  """One way to be wrong.

  Attributes:
    name: what is wrong.
    arguments: after the configuration: a text with blanks between them, or what `arguments(room)` prepares.
    says: texts that the one error line holds, or, with several lines, that they hold together.
    code: the exit code.
    config: which configuration of the room; "" where `arguments` brings its own.
    lines: how many errors are reported.
    around: what holds while the command runs.
    keeps: how many checkpoints are made before the run meets what is wrong; they stay, and are whole.
  """

  name: str
  arguments: str | Arguments
  says: tuple[str, ...]
  code: int = 1
  config: str = "synthetic.yml"
  lines: int = 1
  around: Callable[[Room], Any] | None = None
  keeps: int = 0

  def argv(self, room: Room) -> list[str]:
    given = self.arguments.split() if isinstance(self.arguments, str) else self.arguments(room)
    return ["sft", *filter(None, [self.config]), *given]


def case(name: str, arguments: str | Arguments, *says: str, **options: Any) -> Case:
  return Case(name, arguments, says, **options)


def file_config(content: str | bytes, *arguments: str) -> Arguments:
  """A configuration of the case's own."""
  return lambda room: [room.file("own.yml", content).name, *arguments]


def circle(room: Room) -> Sequence[str]:
  room.file("a.yml", "base_config: b.yml\n")
  room.file("b.yml", "base_config: a.yml\n")
  return ["a.yml"]


def rows(*rows: Any, arguments: Sequence[str] = ()) -> Arguments:
  def prepare(room: Room) -> Sequence[str]:
    room.rows(*rows)
    return arguments

  return prepare


def data_file(name: str, content: str | bytes) -> Arguments:
  return lambda room: [f"hf_train_files={room.file(name, content).name}"]


def truncated_gzip(room: Room) -> Sequence[str]:
  data = gzip.compress(b"".join(json.dumps(chat("user: a", f"assistant: {i}")).encode() + b"\n" for i in range(999)))
  return data_file("cut.jsonl.gz", data[: len(data) // 2])(room)


def saved_data_set(room: Room) -> Sequence[str]:
  import datasets

  datasets.DatasetDict({"test": datasets.Dataset.from_list([GOOD_ROW])}).save_to_disk(str(room.folder / "saved"))
  return ["hf_train_files=", "hf_path=./saved"]


def tokenizer_file(name: str, content: bytes, *arguments: str) -> Arguments:
  return lambda room: [f"tokenizer_path={room.file(name, content).name}", *arguments]


def two_models(room: Room) -> Sequence[str]:
  for name in ("a.model", "b.model"):
    room.file(f"models/{name}", b"")
  return ["tokenizer_path=models"]


def empty_folder(room: Room) -> Sequence[str]:
  (room.folder / "empty").mkdir()
  return ["tokenizer_path=./empty"]


def load_parameters(*arguments: str, change: Callable[[Path], None] = lambda path: None) -> Arguments:
  def prepare(room: Room) -> Sequence[str]:
    path = room.checkpoint()
    change(path)
    return [f"load_parameters_path={path}", *arguments]

  return prepare


def resume(*arguments: str, change: Callable[[Path], None] = lambda run: None) -> Arguments:
  def prepare(room: Room) -> Sequence[str]:
    change(room.run() / "checkpoints")
    return arguments or ["steps=4"]

  return prepare


def cut_arrays(path: Path) -> None:
  """Halves every data file below `path`."""
  files = [file for file in path.rglob("d/*") if file.is_file()]
  assert files
  for file in files:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def rewrite(change: Callable[[tuple, Any], Any], *, tunix: bool = False) -> Callable[[Path], None]:
  """Writes a step anew with its arrays changed, or its weights alone in Tunix's layout."""

  def apply(step: Path) -> None:
    from orbax.checkpoint import v1 as ocp

    def walk(node: Any, path: tuple = ()) -> Any:
      if isinstance(node, dict):
        return {key: walk(child, (*path, key)) for key, child in node.items()}
      if isinstance(node, list):
        return [walk(child, (*path, index)) for index, child in enumerate(node)]
      if node is None:
        return None
      return {"value": change(path, node)} if tunix else change(path, node)

    items = ocp.load_checkpointables(str(step), {"items": None})["items"]
    shutil.rmtree(step)
    trees = {"model_params": walk(items["params"]["params"])} if tunix else {"items": walk(items)}
    ocp.save_checkpointables(str(step), trees)

  return apply


def broken_weights(path: tuple, leaf: Any) -> Any:
  return leaf * np.nan if path[0] == "params" else leaf


def threefry_keys(path: tuple, leaf: Any) -> Any:
  import jax

  return jax.random.split(jax.random.key(0, impl="threefry2x32"), leaf.shape) if path[-1] == "key" else leaf


def wider(path: tuple, leaf: Any) -> Any:
  return np.concatenate([leaf, leaf], axis=-1) if path[-2:] == ("wi_0", "kernel") else leaf


def deeper(path: tuple, leaf: Any) -> Any:
  return np.concatenate([leaf, leaf], axis=1) if "layers" in path and path[-1] == "kernel" else leaf


def data_position(change: Callable[[str], str]) -> Callable[[Path], None]:
  def apply(checkpoints: Path) -> None:
    (file,) = checkpoints.glob("2/post_train_iter/*.json")
    before = file.read_text()
    file.write_text(change(before))
    assert file.read_text() != before

  return apply


def no_metadata(step: Path) -> None:
  (step / "items" / "_METADATA").unlink()


def full_state(change: Callable[[Path], None]) -> Arguments:
  def prepare(room: Room) -> Sequence[str]:
    path = room.checkpoint()
    change(path)
    return ["steps=4", f"load_full_state_path={path / 'items'}"]

  return prepare


def only_newest(checkpoints: Path) -> None:
  shutil.rmtree(checkpoints / "1")
  cut_arrays(checkpoints / "2")


def given_folder(room: Room) -> Sequence[str]:
  (room.folder / "empty").mkdir()
  return ["load_parameters_path=empty"]


@contextmanager
def read_only(room: Room) -> Iterator[None]:
  """Refuses writing to `out` even to root."""
  folder = room.folder / "out"
  folder.mkdir(exist_ok=True)
  if shutil.which("chattr") is None or subprocess.run(["chattr", "+i", folder], capture_output=True).returncode:
    pytest.skip("chattr +i is not permitted here")
  try:
    yield
  finally:
    subprocess.run(["chattr", "-i", folder], check=True)


@contextmanager
def small_disk(room: Room) -> Iterator[None]:
  """`out` on a file system of 176 KiB: room for what a run notes of itself, not for a checkpoint."""
  folder = room.folder / "out"
  folder.mkdir(exist_ok=True)
  if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=176k", "tmpfs", folder], capture_output=True).returncode:
    pytest.skip("mount is not permitted here")
  try:
    yield
  finally:
    subprocess.run(["umount", folder], check=True)


@contextmanager
def small_files(room: Room) -> Iterator[None]:
  """No file may grow beyond 8 KiB; Python ignores the signal, so writing fails with EFBIG."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def file_at(name: str, *arguments: str, content: str = "mine") -> Arguments:
  def prepare(room: Room) -> Sequence[str]:
    room.file(name, content)
    return arguments

  return prepare


def folder_for_metrics(room: Room) -> Sequence[str]:
  (room.folder / "out" / "r" / "metrics.jsonl").mkdir(parents=True)
  return []


def foreign_metrics(room: Room) -> Sequence[str]:
  (room.run() / "metrics.jsonl").write_text("[1, 2]\n")
  return ["steps=4"]
