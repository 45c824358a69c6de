"""What is wrong with the input is said in one line, with a way out; nothing is lost and no success is claimed."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.support import runs
from tests.support.bad_input import (
  GOOD_ROW,
  MODEL,
  SYNTHETIC,
  Case,
  Room,
  broken_weights,
  case,
  chat,
  circle,
  cut_arrays,
  data_file,
  data_position,
  deeper,
  empty_folder,
  file_at,
  file_config,
  folder_for_metrics,
  foreign_metrics,
  full_state,
  given_folder,
  load_parameters,
  no_metadata,
  only_newest,
  read_only,
  resume,
  rewrite,
  rows,
  saved_data_set,
  small_disk,
  small_files,
  threefry_keys,
  tokenizer_file,
  truncated_gzip,
  two_models,
  wider,
)
from tests.support.cli import Outcome, run_cli

pytestmark = pytest.mark.slow

config_case = partial(case, code=2)
chat_case = partial(case, config="chat.yml")

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
    "own.yml, line 18: learning_rate",
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


LONG_ROW = chat(f"user: {'word ' * 99}", "assistant: yes")
DATA = [
  chat_case("missing file", "hf_train_files=gone.jsonl", "hf_train_files=gone.jsonl", "no such file", code=2),
  chat_case("glob without match", "hf_train_files=gone/*.jsonl", "gone/*.jsonl", "matches no file", code=2),
  chat_case("folder for a file", "hf_train_files=.", "hf_train_files", "folder", "*.jsonl"),
  chat_case("unknown kind of file", "hf_train_files=chat.yml", "chat.yml", ".jsonl, .json, .parquet"),
  chat_case("empty file", data_file("none.jsonl", b""), "none.jsonl", "no rows"),
  chat_case("blank lines", data_file("blank.jsonl", b"\n \n\n"), "blank.jsonl", "no rows"),
  chat_case(
    "bad JSON",
    rows(GOOD_ROW, '{"messages": ', GOOD_ROW),
    "rows.jsonl line 2",
    "not valid JSON",
    "1 of 3",
    "max_bad_rows=0.01",
  ),
  chat_case("bad JSON in all lines", rows("{", "]"), "rows.jsonl line 1", "none of 2"),
  chat_case(
    "no assistant turn", rows(chat("user: Hi"), chat("user: Hi")), "none of 2", "no assistant turn", "rows.jsonl line 1"
  ),
  chat_case("assistant says nothing", rows(chat("user: Hi", "assistant: ")), "line 1", "assistant says nothing"),
  chat_case("every row too long", rows(LONG_ROW, LONG_ROW), "none of 2", "max_target_length=16", "rows.jsonl line 1"),
  chat_case(
    "missing column",
    rows({"question": "q", "answer": "a"}),
    "'messages'",
    "question, answer",
    'train_data_columns=["question", "answer"]',
  ),
  chat_case(
    "two columns, one missing",
    rows({"q": "q", "answer": "a"}, arguments=["train_data_columns=[q,a]"]),
    "'a'",
    "q, answer",
  ),
  chat_case("text for messages", rows({"messages": "Hi"}), "line 1", "'messages' is text"),
  chat_case("null for messages", rows({"messages": None}), "line 1", "null"),
  chat_case("list of texts", rows({"messages": ["Hi", "Yes"]}), "line 1", "message 1", "text"),
  chat_case("no role", rows({"messages": [{"from": "user", "value": "Hi"}]}), "line 1", "no 'role'", "from, value"),
  chat_case("number for content", rows({"messages": [{"role": "assistant", "content": 3}]}), "line 1", "number"),
  chat_case("list for a row", rows([1, 2]), "line 1", "a list"),
  chat_case(
    "unknown role",
    rows(chat("user: Hi", "narrator: So", "assistant: Yes"), arguments=["chat_template=llama2"]),
    "line 1",
    "refused by the chat template",
    "narrator",
  ),
  chat_case("binary file", data_file("bytes.jsonl", bytes(range(256)) * 9), "bytes.jsonl line 1", "not valid JSON"),
  chat_case("bad .json", data_file("list.json", '[\n{"messages": []},\n'), "list.json", "line 3"),
  chat_case("number in .json", data_file("number.json", "3"), "number.json", "list of rows"),
  chat_case("corrupt Parquet", data_file("bad.parquet", b"PAR1" + bytes(64) + b"PAR1"), "bad.parquet", "Parquet"),
  chat_case("empty Parquet", data_file("empty.parquet", b""), "empty.parquet", "Parquet"),
  chat_case("corrupt gzip", data_file("bad.jsonl.gz", b"not gzip"), "bad.jsonl.gz", "cannot be read"),
  chat_case("truncated gzip", truncated_gzip, "cut.jsonl.gz", "cannot be read"),
  chat_case(
    "token outside the vocabulary",
    "steps=2 vocab_size=100",  # With `steps` the data are read while the model compiles.
    "rows.jsonl line 1",
    "token id",
    "vocab_size=100",
    "tokenizer_path",
  ),
  chat_case("missing data set folder", "hf_train_files= hf_path=./gone", "hf_path=./gone", "no such", code=2),
  chat_case("missing split", saved_data_set, "'train'", "train_split", "test"),
  chat_case(
    "hub data set offline", "hf_train_files= hf_path=no-such-owner/no-such-data", "hf_path=no-such-owner/no-such-data"
  ),
  chat_case(
    "bad evaluation data",
    lambda room: ["eval_interval=1", f"hf_eval_files={room.rows(chat('user: Hi'), name='eval.jsonl').name}"],
    "eval.jsonl line 1",
    "no assistant turn",
  ),
]


def template(text: str, *says: str, name: str) -> Case:
  return chat_case(name, lambda room: [f"chat_template={room.file('t.jinja', text).name}"], *says)


CHANGING = (
  "{{ messages | length }}{% for m in messages %}{{ m.role }}{{ m.content }}{{ messages[-1].content }}{% endfor %}"
)
TEMPLATE = [
  chat_case("missing template file", "chat_template=gone.jinja", "gone.jinja", "no such file", code=2),
  chat_case("unknown template name", "chat_template=lama2", "lama2", "llama2", code=2),
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
  chat_case(
    "JSON without template",
    lambda room: [f"chat_template={room.file('chat_template.json', '{}').name}"],
    "chat_template.json",
  ),
  chat_case(
    "template not UTF-8",
    lambda room: [f"chat_template={room.file('t.jinja', bytes([255, 254])).name}"],
    "t.jinja",
    "UTF-8",
  ),
  chat_case("no template", "chat_template=", "no chat template", "llama2"),
]


HUGGINGFACE = "tokenizer_type=huggingface"
TOKENIZER = [
  chat_case("missing tokenizer", "tokenizer_path=gone.model", "tokenizer_path=gone.model", "no such file", code=2),
  chat_case(
    "shipped tokenizer without its scheme",
    "tokenizer_path=assets/tokenizer.llama2",
    "no such file",
    "maxtext://tokenizers/tokenizer.llama2",
    code=2,
  ),
  chat_case("unknown kind", "tokenizer_type=sentencepice", "tokenizer_type", "sentencepiece", code=2),
  chat_case("path out of MaxText", "tokenizer_path=maxtext://../../secret", "maxtext://../../secret", code=2),
  chat_case("SentencePiece as tiktoken", "tokenizer_type=tiktoken", "tokenizer.llama2", "tokenizer_type=sentencepiece"),
  chat_case(
    "tiktoken as SentencePiece",
    "tokenizer_path=maxtext://tokenizers/tokenizer_llama3.tiktoken",
    "tokenizer_type=tiktoken",
  ),
  chat_case("corrupt SentencePiece", tokenizer_file("bad.model", bytes(range(200))), "bad.model", "SentencePiece"),
  chat_case("empty SentencePiece", tokenizer_file("none.model", b""), "none.model", "SentencePiece"),
  chat_case(
    "incomplete tiktoken",
    tokenizer_file("cut.tiktoken", b"IQ== 0\nIg== 1\n", "tokenizer_type=tiktoken"),
    "cut.tiktoken",
    "incomplete",
  ),
  chat_case(
    "broken line in tiktoken",
    tokenizer_file("bad.tiktoken", b"IQ== 0\n!!\n", "tokenizer_type=tiktoken"),
    "bad.tiktoken, line 2",
  ),
  chat_case("two models in a folder", two_models, "models", "a.model, b.model", "name the file"),
  chat_case("folder without tokenizer", lambda room: [*empty_folder(room), HUGGINGFACE], "./empty", "no tokenizer"),
  chat_case("file for a HuggingFace folder", f"tokenizer_path=chat.yml {HUGGINGFACE}", "chat.yml", "tokenizer.json"),
  chat_case(
    "corrupt tokenizer.json",
    lambda room: [f"tokenizer_path={room.file('hf/tokenizer.json', '{').parent}", HUGGINGFACE],
    "hf",
    "tokenizer",
  ),
  chat_case(
    "hub tokenizer offline", f"tokenizer_path=no-such-owner/no-such-model {HUGGINGFACE}", "no-such-owner/no-such-model"
  ),
]


CHECKPOINT = [
  case(
    "missing weights", "load_parameters_path=gone/0/items", "load_parameters_path", "no such file or folder", code=2
  ),
  case("empty folder", given_folder, "/empty", "step's folder"),
  case("file for a checkpoint", "load_parameters_path=chat.yml", "/chat.yml", "step's folder"),
  case(
    "run's folder for a checkpoint",
    lambda room: [f"load_parameters_path={room.run()}", "run_name=s"],
    "out/r ",
    "for example",
    "out/r/checkpoints/2",
  ),
  case(
    "folder of steps for a checkpoint",
    lambda room: [f"load_parameters_path={room.run() / 'checkpoints'}", "run_name=s"],
    "for example",
    "out/r/checkpoints/2",
  ),
  case(
    "weights of another size",
    load_parameters(change=rewrite(wider)),
    "given/2",
    "wi_0/kernel",
    "(16, 2, 64) on disk",
    "(16, 2, 32) wanted",
  ),
  case(
    "weights of another depth",
    load_parameters(change=rewrite(deeper)),
    "given/2",
    "(16, 4, 32) on disk",
    "(16, 2, 32) wanted",
  ),
  case("weights with scanned layers", load_parameters("scan_layers=false"), "scan_layers=true; set that", "layers_0"),
  case("damaged weights", load_parameters(change=cut_arrays), "given/2", "damaged"),
  case("weights without metadata", load_parameters(change=no_metadata), "given/2", "damaged"),
  case("weights that are not numbers", load_parameters(change=rewrite(broken_weights)), "step 1", "nan", "not finite"),
  case(
    "Tunix's layout of another model",
    load_parameters(change=rewrite(wider, tunix=True)),
    "given/2",
    "wi_0/kernel",
    "on disk",
    "wanted",
  ),
  case("state of another size", full_state(rewrite(wider)), "given/2", "mu/params", "on disk", "wanted"),
  case("keys of another kind", full_state(rewrite(threefry_keys)), "given/2", "rngs/params/key", "unsafe_rbg"),
  case(
    "damaged newest",
    resume(change=lambda path: cut_arrays(path / "2")),
    "checkpoints/2",
    "damaged",
    "restore_fallback=true",
    "checkpoint 1",
  ),
  case(
    "damaged and no older one",
    resume("steps=4", "restore_fallback=true", change=only_newest),
    "checkpoints/2",
    "damaged",
    "no older",
  ),
  case(
    "newest without metadata",
    resume(change=lambda path: no_metadata(path / "2")),
    "checkpoints/2",
    "damaged",
    "restore_fallback=true",
  ),
  case(
    "run of another size",
    resume(change=lambda path: rewrite(wider)(path / "2")),
    "checkpoints/2",
    "wi_0/kernel",
    "on disk",
    "wanted",
  ),
  case("run of another optimizer", resume("steps=4", "opt_type=sgd"), "checkpoints/2", "opt_state"),
  case(
    "run of other data",
    resume(change=data_position(lambda text: text.replace('"data": "', '"data": "x'))),
    "other data",
    "load_parameters_path",
  ),
  case(
    "run of another batch size",
    resume(change=data_position(lambda text: text.replace('batch size": 1', 'batch size": 2'))),
    "global batch size was 2, is 1",
    "load_parameters_path",
  ),
  case(
    "damaged data position", resume(change=data_position(lambda text: text[:9])), "post_train_iter", "can't be read"
  ),
  case("data position of something else", resume(change=data_position(lambda text: "[]")), "post_train_iter"),
  case("checkpoint beyond steps", resume("steps=1"), "at step 2", "beyond steps=1", "raise steps"),
]


FILES = [
  case(
    "output is a file",
    "base_output_directory=chat.yml",
    "base_output_directory=chat.yml",
    "is a file",
    "folder",
    code=2,
  ),
  case("output below a file", "base_output_directory=chat.yml/out", "chat.yml/out", "base_output_directory"),
  case("run is a file", file_at("out/r"), "out/r", "base_output_directory"),
  case("checkpoints is a file", file_at("out/r/checkpoints"), "out/r/checkpoints", "base_output_directory"),
  case("read-only folder", "", "out/r", "base_output_directory", around=read_only),
  case("kernel's folder", "base_output_directory=/proc/out", "/proc/out", "base_output_directory"),
  case("full disk", "", "checkpoints/1", "could not be written", "No space left", around=small_disk),
  case(
    "full disk in the background",
    "async_checkpointing=true steps=3",
    "checkpoints/1",
    "could not be written",
    "No space left",
    around=small_disk,
  ),
  case("file size limit", "", "checkpoints/1", "could not be written", "File too large", around=small_files),
  case("folder for the metrics", folder_for_metrics, "metrics.jsonl"),
  case("metrics of something else", foreign_metrics, "metrics.jsonl", "line 1"),
  case(
    "metrics without space", "enable_checkpointing=false steps=400", "metrics.jsonl", "No space left", around=small_disk
  ),
  case(
    "TensorBoard without space",
    "enable_checkpointing=false steps=400 enable_tensorboard=true",
    "No space left",
    around=small_disk,
  ),
  case("file for the TensorBoard folder", file_at("out/r/tensorboard", "enable_tensorboard=true"), "out/r/tensorboard"),
]

TRAINING = [
  case(
    "learning rate too high",
    "learning_rate=1e30 warmup_steps_fraction=0 steps=4",
    "step 2",
    "not finite",
    "learning_rate",
    "nonfinite_gradients=skip",
    keeps=1,
  ),
  case(
    "too many skipped",
    "learning_rate=1e30 warmup_steps_fraction=0 steps=9 nonfinite_gradients=skip max_skipped_steps=2",
    "step 2",
    "max_skipped_steps=2",
    "learning_rate",
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
  new = checkpoints(room) - steps_before
  assert len(new) == case.keeps
  for step in new:
    assert all(np.isfinite(leaf).all() for leaf in runs.items(step).values())


def test_fallback_goes_on_as_if_the_damaged_checkpoint_had_never_been(
  room: Room, finished: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
  shutil.copytree(finished, room.folder / "out" / "whole")
  cut_arrays(room.run() / "checkpoints" / "2")
  assert run_cli(["sft", "synthetic.yml", "steps=4", "run_name=whole"], capfd).code == 0
  outcome = run_cli(["sft", "synthetic.yml", "steps=4", "restore_fallback=true"], capfd)
  assert (outcome.code, outcome.errors) == (0, [])
  for said in ("checkpoints/2 is damaged", "going back to checkpoint 1"):
    assert said in caplog.text
  folders = [room.folder / "out" / run / "checkpoints" for run in ("r", "whole")]
  for step in ("2", "4"):
    runs.assert_same_items(*(runs.items(folder / step) for folder in folders))
