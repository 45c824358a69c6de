"""What is wrong with a model is one line that names it, and nothing is left behind."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxtext_posttrain.models import new_folder
from tests.support import families, gguf_models
from tests.support.cli import run_cli

Break = Callable[[Path], None]
NORM = "model.norm.weight"


def tensors(change: Callable[[dict[str, np.ndarray]], Any]) -> Break:
  def apply(folder: Path) -> None:
    path = folder / "model.safetensors"
    held = load_file(path)
    change(held)
    save_file(held, path)

  return apply


def config(**changes: Any) -> Break:
  def apply(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

  return apply


def text(name: str, content: str) -> Break:
  return lambda folder: (folder / name).write_text(content, encoding="utf-8") and None


def cut(name: str, size: int) -> Break:
  return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size]) and None


def remove(name: str) -> Break:
  return lambda folder: (folder / name).unlink()


def header(change: Callable[[dict[str, Any]], Any]) -> Break:
  def apply(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    fields = json.loads(data[8 : 8 + length])
    change(fields)
    raw = json.dumps(fields).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])

  return apply


def large_header(folder: Path) -> None:
  (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")


def pickled(folder: Path) -> None:
  (folder / "model.safetensors").unlink()
  (folder / "pytorch_model.bin").write_bytes(b"")


def tokenizer(size: int) -> Break:
  content = {"model": {"vocab": {str(index): index for index in range(size)}}, "added_tokens": []}
  return text("tokenizer.json", json.dumps(content))


FOLDERS: dict[str, tuple[Break, str]] = {
  "no config.json": (remove("config.json"), "no config.json and no GGUF file"),
  "config.json is no JSON": (text("config.json", "{"), "config.json is no JSON"),
  "config.json is a list": (text("config.json", "[]"), "config.json is no JSON object"),
  "config.json nested too deep": (text("config.json", "[" * 100_000), "config.json is no JSON"),
  "unknown architecture": (config(architectures=["FalconForCausalLM"]), "'FalconForCausalLM' is not known; known are"),
  "size missing": (config(hidden_size=None), "hidden_size is missing"),
  "no weights": (remove("model.safetensors"), "has no model.safetensors or model.safetensors.index.json"),
  "pickled weights": (pickled, "pickled weights are not read"),
  "empty file": (cut("model.safetensors", 0), "0 bytes are no safetensors file"),
  "cut off in its header": (cut("model.safetensors", 100), "cut off inside its header"),
  "cut off in its tensors": (cut("model.safetensors", 50_000), "the file is cut off (50000 bytes"),
  "header too large": (large_header, "a header of 1099511627776 bytes is larger than the format allows"),
  "header is no JSON": (text("model.safetensors", "\x08\0\0\0\0\0\0\0not json"), "its header is no JSON"),
  "offsets backwards": (header(lambda h: h[NORM].update(data_offsets=[8, 4])), f"tensor {NORM}: its entry in the"),
  "offsets negative": (header(lambda h: h[NORM].update(data_offsets=[-8, 4])), f"tensor {NORM}: its entry in the"),
  "shape does not fill": (header(lambda h: h[NORM].update(shape=[31])), "shape (31,) of F32 does not fill its 128"),
  "type not read": (header(lambda h: h[NORM].update(dtype="F8_E4M3")), f"{NORM} is F8_E4M3; F64, F32, F16, BF16"),
  "missing tensor": (tensors(lambda t: t.pop(NORM)), f"{NORM} is missing"),
  "surplus tensor": (
    tensors(lambda t: t.update({"model.extra": t[NORM]})),
    "model.extra has no place in a Llama model",
  ),
  "wrong shape": (
    tensors(lambda t: t.update({NORM: np.zeros(31, np.float32)})),
    f"{NORM} has shape (31,), (32,) is needed",
  ),
  "other sizes than config.json's": (config(intermediate_size=47), "mlp.gate_proj.weight has shape (48, 32), (47, 32)"),
  "tied, but the head differs": (config(tie_word_embeddings=True), "lm_head.weight differs from model.embed_tokens"),
  "index names a file that is missing": (
    text("model.safetensors.index.json", '{"weight_map": {"a": "model-1.safetensors"}}'),
    "model-1.safetensors: missing; model.safetensors.index.json names it",
  ),
  "index names a file elsewhere": (
    text("model.safetensors.index.json", '{"weight_map": {"a": "../model.safetensors"}}'),
    "which is not a file of its folder",
  ),
  "index without a map": (text("model.safetensors.index.json", "{}"), "has no weight_map"),
  "tokenizer of another model": (tokenizer(129), "its tokenizer has 129 ids, the model 128 (vocab_size)"),
  "tokenizer is no JSON": (text("tokenizer.json", "x"), "tokenizer.json is no JSON"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_broken_folder(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
  damage, words = FOLDERS[case]
  folder = tmp_path / "model"
  shutil.copytree(families.FOLDER / "llama2", folder)
  damage(folder)
  refused(["import", str(folder), str(tmp_path / "out")], words, tmp_path, capfd)


def refused(argv: list[str], words: str, folder: Path, capfd: pytest.CaptureFixture[str], code: int = 1) -> None:
  before = sorted(folder.iterdir())
  outcome = run_cli(argv, capfd)
  assert outcome.code == code, outcome.err
  assert len(outcome.errors) == 1, outcome.err
  assert words in outcome.errors[0]
  assert len(outcome.err.splitlines()) == 1
  assert sorted(folder.iterdir()) == before


def number_at(position: int, layout: str, value: int) -> Callable[[bytes], bytes]:
  def apply(data: bytes) -> bytes:
    return data[:position] + struct.pack(layout, value) + data[position + struct.calcsize(layout) :]

  return apply


def unknown_type(data: bytes) -> bytes:
  name = b"blk.1.ffn_up.weight"
  position = data.index(name) + len(name) + 4 + 2 * 8
  return data[:position] + struct.pack("<I", 777) + data[position + 4 :]


FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
  "not GGUF": (lambda data: b"GGML" + data[4:], "not a GGUF file (it begins with b'GGML')"),
  "empty": (lambda data: b"", "not a GGUF file"),
  "version": (number_at(4, "<I", 99), "GGUF version 99; 2 and 3 are read"),
  "huge tensor count": (number_at(8, "<Q", 1 << 60), f"claims {1 << 60} tensors"),
  "huge value count": (number_at(16, "<Q", 1 << 60), f"{1 << 60} values"),
  "huge string": (number_at(24, "<Q", 1 << 60), "cut off inside its header"),
  "cut off in its header": (lambda data: data[:200], "cut off inside its header"),
  "cut off in its tensors": (lambda data: data[:-5000], "the file is cut off"),
  "type that does not exist": (unknown_type, "tensor blk.1.ffn_up.weight is of type number 777, which cannot be"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_broken_gguf_file(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
  change, words = FILES[case]
  path = tmp_path / "model.gguf"
  gguf_models.write(path, "llama2")
  path.write_bytes(change(path.read_bytes()))
  refused(["import", str(path), str(tmp_path / "out")], words, tmp_path, capfd)


@pytest.mark.parametrize(
  ("how", "words"),
  [
    ({"drop": "model.layers.1.mlp.up_proj.weight"}, "model.layers.1.mlp.up_proj.weight is missing"),
    ({"drop": "model.embed_tokens.weight"}, "token_embd.weight (model.embed_tokens.weight) is missing"),
    ({"add": {"blk.0.surplus": np.zeros(3, np.float32)}}, "blk.0.surplus has no place in a Llama model"),
    ({"tokens": [*gguf_models.TOKENS, *map(str, range(200))]}, "ids, the model 128 (vocab_size)"),
  ],
)
def test_a_gguf_file_of_another_model(
  how: dict[str, Any], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
  path = tmp_path / "model.gguf"
  gguf_models.write(path, "llama2", **how)
  refused(["import", str(path), str(tmp_path / "out")], words, tmp_path, capfd)


def test_a_gguf_file_of_an_unknown_family(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
  writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  argv = ["import", str(tmp_path / "model.gguf"), str(tmp_path / "out")]
  refused(argv, "architecture 'mamba' is not known; known are", tmp_path, capfd)


LLAMA = str(families.FOLDER / "llama2")


@pytest.mark.parametrize(
  ("argv", "words", "code"),
  [
    (["import", "nowhere", "OUT"], "no such file or folder; models are not downloaded", 1),
    (["import", f"{LLAMA}/model.safetensors", "OUT"], "name the folder that holds it", 1),
    (["import", f"{LLAMA}/logits.npz", "OUT"], "is a file, but not a GGUF file", 1),
    (["import", LLAMA, "TAKEN"], "exists; name a folder that does not", 1),
    (["import", LLAMA, "TAKEN/file/out"], "cannot be written: ", 1),
    (["import", str(families.FOLDER / "gemma2"), "OUT", "--untie"], "--untie: Gemma 2 has no head of its own", 1),
    (["import", LLAMA], "the following arguments are required: OUT", 2),
    (["import", LLAMA, "OUT", "--dtype", "int8"], "invalid choice: 'int8'", 2),
    (["export", "nowhere", "OUT"], "no such folder", 1),
    (["export", LLAMA, "TAKEN"], "exists; name a folder that does not", 1),
    (["export", LLAMA, "OUT"], "holds no checkpoint in MaxText's layout", 1),
    (["export", LLAMA, "OUT", "--max-shard-size", "large"], "--max-shard-size large", 2),
  ],
)
def test_a_bad_command_line(
  argv: list[str], words: str, code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
  (tmp_path / "taken").mkdir()
  (tmp_path / "taken" / "file").write_text("")
  places = {"OUT": str(tmp_path / "out"), "TAKEN": str(tmp_path / "taken")}
  argv = [argument.replace("TAKEN", places["TAKEN"]).replace("OUT", places["OUT"]) for argument in argv]
  refused(argv, words, tmp_path, capfd, code)


@pytest.mark.parametrize("verb", ["import"])
def test_no_room(verb: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
  usage = shutil.disk_usage(tmp_path)
  monkeypatch.setattr(new_folder.shutil, "disk_usage", lambda path: usage._replace(free=1000))
  argv = [verb, LLAMA, str(tmp_path / "out")]
  refused(argv, "bytes are needed and 1000 are free", tmp_path, capfd)
