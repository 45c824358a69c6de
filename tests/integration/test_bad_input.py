"""What is wrong with the input is said in one line, with a way out; nothing is lost and no success is claimed."""

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
from tests.support.cli import Outcome, run_cli

pytestmark = pytest.mark.slow

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
SYNTHETIC = f"{MODEL}vocab_size: 64\ndataset_type: synthetic\nsteps: 2\n"
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
    keeps: how many newer checkpoints may be there afterwards.
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


def config_case(name: str, arguments: str | Arguments, *says: str, **options: Any) -> Case:
  return Case(name, arguments, says, **{"code": 2, **options})


def file_config(content: str | bytes, *arguments: str) -> Arguments:
  """A configuration of the case's own."""
  return lambda room: [room.file("own.yml", content).name, *arguments]


def circle(room: Room) -> Sequence[str]:
  room.file("a.yml", "base_config: b.yml\n")
  room.file("b.yml", "base_config: a.yml\n")
  return ["a.yml"]


CONFIGURATION = [
  config_case("unknown key", "stpes=5", "command line", "stpes", "steps"),
  config_case(
    "unknown key in a file",
    file_config("base_config: synthetic.yml\nlerning_rate: 1\n"),
    "own.yml, line 2",
    "learning_rate",
    config="",
  ),
  config_case("unknown nested key", "lora.lora_rnk=8", "lora.lora_rnk", "lora.lora_rank"),
  config_case("wrong type", "steps=ten", "command line: steps", "whole number", '"ten"'),
  config_case(
    "wrong type in a file",
    file_config(SYNTHETIC + "learning_rate: fast\n"),
    "own.yml, line 17: learning_rate",
    '"fast"',
    config="",
  ),
  config_case("no such choice", "nonfinite_gradients=ignore", "nonfinite_gradients", "error", "skip", "ignore"),
  config_case("below its range", "vocab_size=0", "vocab_size=0", "at least 1"),
  config_case(
    "no name", file_config("base_config: synthetic.yml\nrun_name: ''\n"), "run_name is missing", "run_name=", config=""
  ),
  config_case(
    "no folder",
    file_config("base_config: sft.yml\nrun_name: r\nsteps: 1\ndataset_type: synthetic\n"),
    "base_output_directory is missing",
    "base_output_directory=runs",
    config="",
  ),
  config_case(
    "no length",
    file_config(MODEL + "vocab_size: 64\ndataset_type: synthetic\n"),
    "steps is missing",
    "steps=1000",
    config="",
  ),
  config_case(
    "no data",
    file_config("base_config: chat.yml\nhf_train_files: ''\n"),
    "hf_train_files is missing",
    "hf_train_files=",
    config="",
  ),
  config_case(
    "no tokenizer",
    file_config("base_config: chat.yml\ntokenizer_path: ''\n"),
    "tokenizer_path is missing",
    "maxtext://",
    config="",
  ),
  config_case(
    "two sources of weights",
    lambda room: [f"load_parameters_path={room.checkpoint()}", "load_full_state_path=given/2"],
    "load_parameters_path",
    "load_full_state_path",
    "set one",
  ),
  config_case("a key twice", "steps=3 steps=4", "steps is given twice", "3 and 4", "keep one"),
  config_case(
    "two template keys", "chat_template=plain chat_template_path=synthetic.yml", "chat_template_path", "set one of them"
  ),
  config_case("two problems", "stpes=5 learning_rate=fast", "stpes", "learning_rate", lines=2),
  config_case("bad YAML", file_config("steps: [1, 2\nrun_name: r\n"), "own.yml, line", "not valid YAML", config=""),
  config_case("a list for a configuration", file_config("- steps\n"), "own.yml, line 1", "key: value", config=""),
  config_case("a key twice in a file", file_config("steps: 1\nsteps: 2\n"), "own.yml, line 2", "steps", config=""),
  config_case("not UTF-8", file_config(b"run_name: \xff\xfe\n"), "own.yml", "UTF-8", config=""),
  config_case("no configuration", "", "name a configuration", "config.yml", config=""),
  config_case("missing configuration", "gone.yml", "gone.yml: no such file", config=""),
  config_case("a folder for a configuration", ".", "folder", config=""),
  config_case("missing base_config", file_config("base_config: gone.yml\n"), "own.yml, line 1", "gone.yml", config=""),
  config_case("base_config in a circle", circle, "a.yml", "b.yml", "builds on itself", config=""),
  config_case(
    "undefined variable",
    file_config(SYNTHETIC + "load_parameters_path: ${oc.env:NOT_SET_HERE}\n"),
    "NOT_SET_HERE",
    "not set",
    config="",
  ),
  config_case(
    "unknown model", "model_name=llama9-7b override_model_config=false", "llama9-7b", "did you mean llama2-7b"
  ),
  config_case("out of its folder", "run_name=../other", "run_name", "base_output_directory", "plain name"),
  config_case("another trainer's task", "use_dpo=true", "use_dpo", "DPO"),
  config_case(
    "evaluation without data", "--dry-run eval_interval=1", "eval_interval=1", "hf_eval_files", config="chat.yml"
  ),
  config_case("unknown option", "--dryrun", "--dryrun", "--help"),
  config_case(
    "indivisible heads", "base_num_query_heads=3 base_num_kv_heads=2", "base_num_query_heads=3", "base_num_kv_heads=2"
  ),
  config_case("MaxText's validators", "shard_mode=explicit decoder_block=gemma4", "MaxText refuses the configuration"),
  config_case("more devices than there are", "ici_tensor_parallelism=3", "ici_*_parallelism", "1 device"),
]


def data_case(name: str, arguments: str | Arguments, *says: str, **options: Any) -> Case:
  return Case(name, arguments, says, **{"config": "chat.yml", **options})


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


LONG_ROW = chat(f"user: {'word ' * 99}", "assistant: yes")
DATA = [
  data_case("missing file", "hf_train_files=gone.jsonl", "hf_train_files=gone.jsonl", "no such file", code=2),
  data_case("glob without match", "hf_train_files=gone/*.jsonl", "gone/*.jsonl", "matches no file", code=2),
  data_case("folder for a file", "hf_train_files=.", "hf_train_files", "folder", "*.jsonl"),
  data_case("unknown kind of file", "hf_train_files=chat.yml", "chat.yml", ".jsonl, .json, .parquet"),
  data_case("empty file", data_file("none.jsonl", b""), "none.jsonl", "no rows"),
  data_case("blank lines", data_file("blank.jsonl", b"\n \n\n"), "blank.jsonl", "no rows"),
  data_case(
    "bad JSON",
    rows(GOOD_ROW, '{"messages": ', GOOD_ROW),
    "rows.jsonl line 2",
    "not valid JSON",
    "1 of 3",
    "max_bad_rows=0.01",
  ),
  data_case("bad JSON in all lines", rows("{", "]"), "rows.jsonl line 1", "none of 2"),
  data_case(
    "no assistant turn", rows(chat("user: Hi"), chat("user: Hi")), "none of 2", "no assistant turn", "rows.jsonl line 1"
  ),
  data_case("assistant says nothing", rows(chat("user: Hi", "assistant: ")), "line 1", "assistant says nothing"),
  data_case("every row too long", rows(LONG_ROW, LONG_ROW), "none of 2", "max_target_length=16", "rows.jsonl line 1"),
  data_case(
    "missing column",
    rows({"question": "q", "answer": "a"}),
    "'messages'",
    "question, answer",
    'train_data_columns=["question", "answer"]',
  ),
  data_case(
    "two columns, one missing",
    rows({"q": "q", "answer": "a"}, arguments=["train_data_columns=[q,a]"]),
    "'a'",
    "q, answer",
  ),
  data_case("text for messages", rows({"messages": "Hi"}), "line 1", "'messages' is text"),
  data_case("null for messages", rows({"messages": None}), "line 1", "null"),
  data_case("list of texts", rows({"messages": ["Hi", "Yes"]}), "line 1", "message 1", "text"),
  data_case("no role", rows({"messages": [{"from": "user", "value": "Hi"}]}), "line 1", "no 'role'", "from, value"),
  data_case("number for content", rows({"messages": [{"role": "assistant", "content": 3}]}), "line 1", "number"),
  data_case("list for a row", rows([1, 2]), "line 1", "a list"),
  data_case(
    "unknown role",
    rows(chat("user: Hi", "narrator: So", "assistant: Yes"), arguments=["chat_template=llama2"]),
    "line 1",
    "refused by the chat template",
    "narrator",
  ),
  data_case("binary file", data_file("bytes.jsonl", bytes(range(256)) * 9), "bytes.jsonl line 1", "not valid JSON"),
  data_case("bad .json", data_file("list.json", '[\n{"messages": []},\n'), "list.json", "line 3"),
  data_case("number in .json", data_file("number.json", "3"), "number.json", "list of rows"),
  data_case("corrupt Parquet", data_file("bad.parquet", b"PAR1" + bytes(64) + b"PAR1"), "bad.parquet", "Parquet"),
  data_case("empty Parquet", data_file("empty.parquet", b""), "empty.parquet", "Parquet"),
  data_case("corrupt gzip", data_file("bad.jsonl.gz", b"not gzip"), "bad.jsonl.gz", "cannot be read"),
  data_case("truncated gzip", truncated_gzip, "cut.jsonl.gz", "cannot be read"),
  data_case(
    "token outside the vocabulary",
    "vocab_size=100",
    "rows.jsonl line 1",
    "token id",
    "vocab_size=100",
    "tokenizer_path",
  ),
  data_case("missing data set folder", "hf_train_files= hf_path=./gone", "hf_path=./gone", "no such", code=2),
  data_case("missing split", saved_data_set, "'train'", "train_split", "test"),
  data_case(
    "hub data set offline", "hf_train_files= hf_path=no-such-owner/no-such-data", "hf_path=no-such-owner/no-such-data"
  ),
  data_case(
    "bad evaluation data",
    lambda room: ["eval_interval=1", f"hf_eval_files={room.rows(chat('user: Hi'), name='eval.jsonl').name}"],
    "eval.jsonl line 1",
    "no assistant turn",
  ),
]


def template(text: str, *says: str, name: str, arguments: Sequence[str] = ()) -> Case:
  return Case(
    name, lambda room: [f"chat_template={room.file('t.jinja', text).name}", *arguments], says, config="chat.yml"
  )


CHANGING = (
  "{{ messages | length }}{% for m in messages %}{{ m.role }}{{ m.content }}{{ messages[-1].content }}{% endfor %}"
)
TEMPLATE = [
  Case("missing template file", "chat_template=gone.jinja", ("gone.jinja", "no such file"), code=2, config="chat.yml"),
  Case("unknown template name", "chat_template=lama2", ("lama2", "llama2"), code=2, config="chat.yml"),
  template("{% for m in messages %}\n{{ m.content \n{% endfor %}", "t.jinja", "line 3", name="bad syntax"),
  template("{% for m in messages %}{{ m }}", "t.jinja", "line 1", "endfor", name="unclosed block"),
  template("{{ ''.__class__.__mro__ }}", "t.jinja", "line 1", "__class__", name="attack by attributes"),
  template(
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}", "t.jinja", "line 1", "__init__", name="attack by globals"
  ),
  template(
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "t.jinja", name="endless loop"
  ),
  template("{% for i in range(9999) %}{{ 'x' * 99999 }}{% endfor %}", "t.jinja", "characters", name="huge output"),
  template("{{ raise_exception('no system here') }}", "line 1", "no system here", name="template that refuses"),
  template("{{ messages[0].nothing.at.all }}", "t.jinja", "line 1", name="undefined value"),
  template(CHANGING, "t.jinja", "{% generation %}", name="text that changes"),
  template("no messages", "rows.jsonl line 1", name="template without messages"),
  Case(
    "JSON without template",
    lambda room: [f"chat_template={room.file('chat_template.json', '{}').name}"],
    ("chat_template.json",),
    config="chat.yml",
  ),
  Case(
    "template not UTF-8",
    lambda room: [f"chat_template={room.file('t.jinja', bytes([255, 254])).name}"],
    ("t.jinja", "UTF-8"),
    config="chat.yml",
  ),
  Case("no template", file_template := "chat_template=", ("no chat template", "llama2"), config="chat.yml"),
]


def tokenizer(name: str, arguments: str | Arguments, *says: str, **options: Any) -> Case:
  return Case(name, arguments, says, **{"config": "chat.yml", **options})


def tokenizer_file(name: str, content: bytes, *arguments: str) -> Arguments:
  return lambda room: [f"tokenizer_path={room.file(name, content).name}", *arguments]


def two_models(room: Room) -> Sequence[str]:
  for name in ("a.model", "b.model"):
    room.file(f"models/{name}", b"")
  return ["tokenizer_path=models"]


def empty_folder(room: Room) -> Sequence[str]:
  (room.folder / "empty").mkdir()
  return ["tokenizer_path=./empty"]


HUGGINGFACE = "tokenizer_type=huggingface"
TOKENIZER = [
  tokenizer("missing tokenizer", "tokenizer_path=gone.model", "tokenizer_path=gone.model", "no such file", code=2),
  tokenizer(
    "shipped tokenizer without its scheme",
    "tokenizer_path=assets/tokenizer.llama2",
    "no such file",
    "maxtext://tokenizers/tokenizer.llama2",
    code=2,
  ),
  tokenizer("unknown kind", "tokenizer_type=sentencepice", "tokenizer_type", "sentencepiece", code=2),
  tokenizer("path out of MaxText", "tokenizer_path=maxtext://../../secret", "maxtext://../../secret", code=2),
  tokenizer("SentencePiece as tiktoken", "tokenizer_type=tiktoken", "tokenizer.llama2", "tokenizer_type=sentencepiece"),
  tokenizer(
    "tiktoken as SentencePiece",
    "tokenizer_path=maxtext://tokenizers/tokenizer_llama3.tiktoken",
    "tokenizer_type=tiktoken",
  ),
  tokenizer("corrupt SentencePiece", tokenizer_file("bad.model", bytes(range(200))), "bad.model", "SentencePiece"),
  tokenizer("empty SentencePiece", tokenizer_file("none.model", b""), "none.model", "SentencePiece"),
  tokenizer(
    "incomplete tiktoken",
    tokenizer_file("cut.tiktoken", b"IQ== 0\nIg== 1\n", "tokenizer_type=tiktoken"),
    "cut.tiktoken",
    "incomplete",
  ),
  tokenizer(
    "broken line in tiktoken",
    tokenizer_file("bad.tiktoken", b"IQ== 0\n!!\n", "tokenizer_type=tiktoken"),
    "bad.tiktoken, line 2",
  ),
  tokenizer("two models in a folder", two_models, "models", "a.model, b.model", "name the file"),
  tokenizer("folder without tokenizer", lambda room: [*empty_folder(room), HUGGINGFACE], "./empty", "no tokenizer"),
  tokenizer("file for a HuggingFace folder", f"tokenizer_path=chat.yml {HUGGINGFACE}", "chat.yml", "tokenizer.json"),
  tokenizer(
    "corrupt tokenizer.json",
    lambda room: [f"tokenizer_path={room.file('hf/tokenizer.json', '{').parent}", HUGGINGFACE],
    "hf",
    "tokenizer",
  ),
  tokenizer(
    "hub tokenizer offline", f"tokenizer_path=no-such-owner/no-such-model {HUGGINGFACE}", "no-such-owner/no-such-model"
  ),
]


def checkpoint(name: str, arguments: str | Arguments, *says: str, **options: Any) -> Case:
  return Case(name, arguments, says, **options)


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

    items = ocp.load_checkpointables(step, {"items": None})["items"]
    shutil.rmtree(step)
    trees = {"model_params": walk(items["params"]["params"])} if tunix else {"items": walk(items)}
    ocp.save_checkpointables(step, trees)

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


CHECKPOINT = [
  checkpoint(
    "missing weights", "load_parameters_path=gone/0/items", "load_parameters_path", "no such file or folder", code=2
  ),
  checkpoint("empty folder", given_folder, "/empty", "step's folder"),
  checkpoint("file for a checkpoint", "load_parameters_path=chat.yml", "/chat.yml", "step's folder"),
  checkpoint(
    "run's folder for a checkpoint",
    lambda room: [f"load_parameters_path={room.run()}", "run_name=s"],
    "out/r ",
    "for example",
    "out/r/checkpoints/2",
  ),
  checkpoint(
    "folder of steps for a checkpoint",
    lambda room: [f"load_parameters_path={room.run() / 'checkpoints'}", "run_name=s"],
    "for example",
    "out/r/checkpoints/2",
  ),
  checkpoint(
    "weights of another size",
    load_parameters(change=rewrite(wider)),
    "given/2",
    "wi_0/kernel",
    "(16, 2, 64) on disk",
    "(16, 2, 32) wanted",
  ),
  checkpoint(
    "weights of another depth",
    load_parameters(change=rewrite(deeper)),
    "given/2",
    "(16, 4, 32) on disk",
    "(16, 2, 32) wanted",
  ),
  checkpoint(
    "weights with scanned layers", load_parameters("scan_layers=false"), "scan_layers=true; set that", "layers_0"
  ),
  checkpoint("damaged weights", load_parameters(change=cut_arrays), "given/2", "damaged"),
  checkpoint("weights without metadata", load_parameters(change=no_metadata), "given/2", "damaged"),
  checkpoint(
    "weights that are not numbers", load_parameters(change=rewrite(broken_weights)), "step 1", "nan", "not finite"
  ),
  checkpoint(
    "Tunix's layout of another model",
    load_parameters(change=rewrite(wider, tunix=True)),
    "given/2",
    "wi_0/kernel",
    "on disk",
    "wanted",
  ),
  checkpoint("state of another size", full_state(rewrite(wider)), "given/2", "mu/params", "on disk", "wanted"),
  checkpoint("keys of another kind", full_state(rewrite(threefry_keys)), "given/2", "rngs/params/key", "unsafe_rbg"),
  checkpoint(
    "damaged newest",
    resume(change=lambda path: cut_arrays(path / "2")),
    "checkpoints/2",
    "damaged",
    "restore_fallback=true",
    "checkpoint 1",
  ),
  checkpoint(
    "damaged and no older one",
    resume("steps=4", "restore_fallback=true", change=only_newest),
    "checkpoints/2",
    "damaged",
    "no older",
  ),
  checkpoint(
    "newest without metadata",
    resume(change=lambda path: no_metadata(path / "2")),
    "checkpoints/2",
    "damaged",
    "restore_fallback=true",
  ),
  checkpoint(
    "run of another size",
    resume(change=lambda path: rewrite(wider)(path / "2")),
    "checkpoints/2",
    "wi_0/kernel",
    "on disk",
    "wanted",
  ),
  checkpoint("run of another optimizer", resume("steps=4", "opt_type=sgd"), "checkpoints/2", "opt_state"),
  checkpoint(
    "run of other data",
    resume(change=data_position(lambda text: text.replace('"data": "', '"data": "x'))),
    "other data",
    "load_parameters_path",
  ),
  checkpoint(
    "run of another batch size",
    resume(change=data_position(lambda text: text.replace('batch size": 1', 'batch size": 2'))),
    "global batch size was 2, is 1",
    "load_parameters_path",
  ),
  checkpoint(
    "damaged data position", resume(change=data_position(lambda text: text[:9])), "post_train_iter", "can't be read"
  ),
  checkpoint("data position of something else", resume(change=data_position(lambda text: "[]")), "post_train_iter"),
  checkpoint("checkpoint beyond steps", resume("steps=1"), "at step 2", "beyond steps=1", "raise steps"),
]


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
  """`out` on a file system of 64 KiB."""
  folder = room.folder / "out"
  folder.mkdir(exist_ok=True)
  if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True).returncode:
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


FILES = [
  Case(
    "output is a file",
    "base_output_directory=chat.yml",
    ("base_output_directory=chat.yml", "is a file", "folder"),
    code=2,
  ),
  Case("output below a file", "base_output_directory=chat.yml/out", ("chat.yml/out", "base_output_directory")),
  Case("run is a file", file_at("out/r"), ("out/r", "base_output_directory")),
  Case("checkpoints is a file", file_at("out/r/checkpoints"), ("out/r/checkpoints", "base_output_directory")),
  Case("read-only folder", "", ("out/r", "base_output_directory"), around=read_only),
  Case("kernel's folder", "base_output_directory=/proc/out", ("/proc/out", "base_output_directory")),
  Case("full disk", "", ("checkpoints/1", "could not be written", "No space left"), around=small_disk),
  Case(
    "full disk in the background",
    "async_checkpointing=true steps=3",
    ("checkpoints/1", "could not be written", "No space left"),
    around=small_disk,
  ),
  Case("file size limit", "", ("checkpoints/1", "could not be written", "File too large"), around=small_files),
  Case("folder for the metrics", folder_for_metrics, ("metrics.jsonl",)),
  Case("metrics of something else", foreign_metrics, ("metrics.jsonl", "line 1")),
  Case(
    "metrics without space",
    "enable_checkpointing=false steps=400",
    ("metrics.jsonl", "No space left"),
    around=small_disk,
  ),
  Case(
    "TensorBoard without space",
    "enable_checkpointing=false steps=400 enable_tensorboard=true",
    ("No space left",),
    around=small_disk,
  ),
  Case(
    "file for the TensorBoard folder", file_at("out/r/tensorboard", "enable_tensorboard=true"), ("out/r/tensorboard",)
  ),
]

TRAINING = [
  Case(
    "learning rate too high",
    "learning_rate=1e30 steps=4",
    ("step 2", "not finite", "learning_rate", "nonfinite_gradients=skip"),
    keeps=1,
  ),
  Case(
    "too many skipped",
    "learning_rate=1e30 steps=9 nonfinite_gradients=skip max_skipped_steps=2",
    ("step 2", "max_skipped_steps=2", "learning_rate"),
    keeps=1,
  ),
]
TABLE = {
  "configuration": CONFIGURATION,
  "data": DATA,
  "template": TEMPLATE,
  "tokenizer": TOKENIZER,
  "checkpoint": CHECKPOINT,
  "files": FILES,
  "training": TRAINING,
}
CASES = [pytest.param(case, id=f"{kind}: {case.name}") for kind, cases in TABLE.items() for case in cases]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """The folder of a run that made two steps and saved both."""
  from maxtext_posttrain import cli

  folder = tmp_path_factory.mktemp("finished")
  (folder / "synthetic.yml").write_text(SYNTHETIC)
  assert cli.main(["sft", str(folder / "synthetic.yml"), f"base_output_directory={folder}"]) == 0
  return folder / "r"


@pytest.fixture
def room(tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
  monkeypatch.chdir(tmp_path)
  return Room(tmp_path, finished)


def contents(folder: Path) -> dict[str, bytes]:
  return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def checkpoints(room: Room) -> set[Path]:
  return {path for path in (room.folder / "out").glob("*/checkpoints/*") if path.name.isdigit() and path.is_dir()}


def assert_nothing_claimed(outcome: Outcome) -> None:
  assert "Traceback" not in outcome.out + outcome.err
  for line in outcome.out.splitlines():
    assert not line.startswith("checkpoint:"), line
    assert " ended at step " not in line


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case: Case, room: Room, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture):
  argv = case.argv(room)
  before, steps_before = contents(room.folder), checkpoints(room)
  if case.around is None:
    outcome = run_cli(argv, capfd)
  else:
    with case.around(room):
      outcome = run_cli(argv, capfd)
      assert checkpoints(room) == set()
  assert outcome.code == case.code, outcome
  assert len(outcome.errors) == case.lines, outcome
  said = "\n".join(outcome.errors)
  assert [text for text in case.says if text not in said] == [], said
  assert "internal:" not in said
  assert "Traceback" not in caplog.text
  assert_nothing_claimed(outcome)
  after = contents(room.folder)
  assert {name for name, data in before.items() if not after[name].startswith(data)} == set()
  assert len(checkpoints(room) - steps_before) <= case.keeps
