"""Bad configurations: each is refused with its own line, and with no other line beside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from maxtext_posttrain import cli
from maxtext_posttrain.config import load_config
from maxtext_posttrain.errors import ConfigError

GOOD = "run_name: r\nbase_output_directory: out\nsteps: 5\ndataset_type: synthetic\n"
DATA = "run_name: r\nbase_output_directory: out\nsteps: 5\ndataset_type: hf\ntrain_data_columns: [messages]\n"
TOKENIZER = "tokenizer_path: maxtext://tokenizers/tokenizer.llama2\n"
FILES = DATA + TOKENIZER + "hf_train_files: train.jsonl\n"


@dataclass
class Bad:
  """One bad configuration: `yaml` after `start`, and the arguments; `says` is the whole line it must give."""

  name: str
  says: str
  yaml: str = ""
  args: list[str] = field(default_factory=list)
  start: str = GOOD
  environ: dict[str, str] = field(default_factory=dict)


def cli_arg(name: str, says: str, *args: str, **rest) -> Bad:
  return Bad(name, f"command line: {says}", args=list(args), **rest)


def lora_arg(name: str, says: str, *args: str) -> Bad:
  """A bad key of a run that trains an adapter."""
  names = {argument.split("=")[0] for argument in args}
  rest = {"lora.enable_lora": "true", "lora.lora_rank": "4", "lora.lora_alpha": "8", "lora_fresh_base": "true"}
  return cli_arg(name, says, *args, *(f"{key}={value}" for key, value in rest.items() if key not in names))


def line5(name: str, yaml: str, says: str, **rest) -> Bad:
  """A bad key in the first line after GOOD's four."""
  return Bad(name, f"c.yml, line 5: {says}", yaml=yaml, **rest)


CASES = [
  # Keys that do not exist.
  line5("unknown key", "stpes: 5", "unknown key stpes; did you mean steps?"),
  line5(
    "unknown, nothing like it", "zzqqy: 5", "unknown key zzqqy; neither MaxText 0.2.5 nor this package has one like it"
  ),
  line5("ours misspelt", "max_bad_row: 5", "unknown key max_bad_row; did you mean max_bad_rows?"),
  line5("another trainer's word", "lr: 0.1", "unknown key lr; did you mean learning_rate?"),
  line5(
    "batch size",
    "batch_size: 4",
    "batch_size is a key of grpo training; sft has no such key; did you mean per_device_batch_size?",
  ),
  line5("dashes", "learning-rate: 0.1", "unknown key learning-rate; did you mean learning_rate?"),
  line5("capitals", "Learning_Rate: 0.1", "unknown key Learning_Rate; did you mean learning_rate?"),
  line5("flat for nested", "lora_rank: 8", "unknown key lora_rank; did you mean lora.lora_rank?"),
  line5("group misspelt", "lorra: {lora_rank: 8}", "unknown key lorra; did you mean lora?"),
  Bad("nested unknown", "c.yml, line 6: unknown key lora.rnk; did you mean lora.lora_rank?", "lora:\n  rnk: 8\n"),
  cli_arg("unknown on the command line", "unknown key stpes; did you mean steps?", "stpes=5"),
  cli_arg("key inside a value", "unknown key steps.x: steps holds a single value and no keys", "steps.x=1"),
  cli_arg("derived", "emb_dim is computed by MaxText and cannot be set; set base_emb_dim", "emb_dim=8"),
  cli_arg("derived, nothing instead", "checkpoint_dir is computed by MaxText and cannot be set", "checkpoint_dir=x"),
  cli_arg("grpo key", "rl.num_generations is a key of grpo training; sft has no such key", "rl.num_generations=8"),
  # Arguments that are no key=value.
  cli_arg("no equals sign", "packing: expected key=value", "packing"),
  cli_arg("no key", "=5: expected key=value", "=5"),
  cli_arg("dashes before a key", "--seed=5: keys are given as key=value, without dashes", "--seed=5"),
  cli_arg("twice", "steps is given twice with different values (6 and 7); keep one", "steps=6", "steps=7"),
  cli_arg(
    "twice, nested",
    "lora.lora_rank is given twice with different values (8 and 4); keep one",
    "lora={lora_rank: 8, enable_lora: false}",
    "lora.lora_rank=4",
  ),
  cli_arg(
    "twice, a secret stays secret",
    "hf_access_token is given twice with different values; keep one",
    "hf_access_token=abc",
    "hf_access_token=xyz",
  ),
  cli_arg("base_config", "base_config can only stand in a YAML file", "base_config=base.yml"),
  cli_arg(
    "environment and command line",
    "steps is also set by M_STEPS in the environment; keep one",
    "steps=6",
    environ={"M_STEPS": "7"},
  ),
  # Types.
  line5("text for int", "log_period: ten", 'log_period: expected a whole number, got the text "ten"'),
  line5("fraction for int", "log_period: 2.5", "log_period: expected a whole number, got the number 2.5"),
  line5("bool for int", "log_period: yes", "log_period: expected a whole number, got the boolean true"),
  line5("octal", "log_period: 010", 'log_period: expected a whole number, got the text "010"'),
  line5("sexagesimal", "log_period: 1:30", 'log_period: expected a whole number, got the text "1:30"'),
  line5("null for int", "log_period: null", "log_period: expected a whole number, got null"),
  line5("list for int", "log_period: [1, 2]", "log_period: expected a whole number, got the list [1, 2]"),
  line5("mapping for int", "log_period: {a: 1}", 'log_period: expected a whole number, got the mapping {"a": 1}'),
  line5("text for float", "adam_b1: high", 'adam_b1: expected a number, got the text "high"'),
  line5("nan", "adam_b1: .nan", "adam_b1: expected a number, got the number nan"),
  line5("infinite", "adam_b1: .inf", "adam_b1: expected a number, got the number inf"),
  line5("text for bool", "packing: maybe", 'packing: expected true or false, got the text "maybe"'),
  line5("number for bool", "packing: 2", "packing: expected true or false, got the number 2"),
  line5("int for text", "hf_name: 12", "hf_name: expected text or null, got the number 12"),
  line5("int for plain text", "prompt: 12", "prompt: expected text, got the number 12; put it in quotes"),
  line5("list for text", "prompt: [a]", 'prompt: expected text, got the list ["a"]'),
  line5(
    "number in a list of texts",
    "adamw_mask: [a, 3]",
    "adamw_mask: item 2: expected text, got the number 3; put it in quotes",
  ),
  line5(
    "text for a list of numbers",
    "compress_ratios: four",
    'compress_ratios: expected a list of whole numbers, got the text "four"',
  ),
  line5("value for a group", "lora: 8", "lora: expected a mapping of keys, as lora.key=value, got the number 8"),
  line5(
    "value for a mapping", "formatting_func_kwargs: 8", "formatting_func_kwargs: expected a mapping, got the number 8"
  ),
  cli_arg("nothing for a number", "learning_rate: expected a number of at least 0, got nothing", "learning_rate="),
  cli_arg("two equals signs", 'steps: expected a whole number of at least -1, got the text "=6"', "steps==6"),
  cli_arg(
    "nested type", 'lora.lora_rank: expected a whole number of at least 0, got the text "big"', "lora.lora_rank=big"
  ),
  cli_arg("broken list", 'mesh_axes: expected a list of texts, got the text "[a, b"', "mesh_axes=[a, b"),
  cli_arg(
    "long text is cut",
    f'steps: expected a whole number of at least -1, got the text "{"x" * 58}…',
    f"steps={'x' * 500}",
  ),
  Bad(
    "environment type",
    'M_STEPS in the environment: steps: expected a whole number of at least -1, got the text "many"',
    environ={"M_STEPS": "many"},
  ),
  # Choices.
  line5(
    "enum",
    "opt_type: adam",
    'opt_type: expected one of adamw, adam_pax, sgd, muon, got the text "adam"; did you mean adamw?',
  ),
  cli_arg(
    "our enum", 'nonfinite_gradients: expected one of error, skip, got the text "warn"', "nonfinite_gradients=warn"
  ),
  cli_arg(
    "model name",
    "model_name: expected one of default, llama2-7b, llama2-13b, llama2-70b, llama3-8b, llama3.1-8b-Instruct,"
    " llama3-70b, llama3.1-70b-Instruct, llama3.1-8b, llama3.1-70b, llama3.1-405b, llama3.3-70b and 75 more,"
    ' got the text "lama3-8b"; did you mean llama3-8b?',
    "model_name=lama3-8b",
  ),
  # Ranges.
  cli_arg("no steps", "steps=0: must be at least 1", "steps=0"),
  cli_arg("steps -1 with no schedule", "steps=-1: must be at least 1", "steps=-1"),
  cli_arg("steps below -1", "steps: expected a whole number of at least -1, got the number -2", "steps=-2"),
  cli_arg("checkpoint_period 0", "checkpoint_period=0: must be at least 1", "checkpoint_period=0"),
  cli_arg("no checkpoints kept", "max_num_checkpoints_to_keep=0: must be at least 1", "max_num_checkpoints_to_keep=0"),
  cli_arg("no batch", "per_device_batch_size=0: must be above 0", "per_device_batch_size=0"),
  cli_arg("negative batch", "per_device_batch_size=-1: must be above 0", "per_device_batch_size=-1"),
  cli_arg(
    "no accumulation",
    "gradient_accumulation_steps: expected a whole number above 0, got the number 0",
    "gradient_accumulation_steps=0",
  ),
  cli_arg(
    "warmup above 1",
    "warmup_steps_fraction: expected a number from 0 to 1, got the number 1.5",
    "warmup_steps_fraction=1.5",
  ),
  cli_arg("short sequences", "max_target_length=1: must be at least 2", "max_target_length=1"),
  cli_arg("negative rate", "learning_rate: expected a number of at least 0, got the number -0.1", "learning_rate=-0.1"),
  cli_arg("adam_b2", "adam_b2=1.0: must be at least 0 and below 1", "adam_b2=1"),
  cli_arg("seed", "data_shuffle_seed=4294967296: must be at most 4294967295", "data_shuffle_seed=4294967296"),
  cli_arg("vocabulary", "vocab_size=0: must be at least 1", "vocab_size=0"),
  cli_arg(
    "heads",
    "base_num_query_heads=6: must be a multiple of base_num_kv_heads=4",
    "base_num_query_heads=6",
    "base_num_kv_heads=4",
  ),
  cli_arg("max_bad_rows", "max_bad_rows: expected a number of at least 0, got the number -1", "max_bad_rows=-1"),
  cli_arg("log_every", "log_every: expected a whole number of at least 1, got the number 0", "log_every=0"),
  cli_arg("peak_tflops", "peak_tflops: expected a number above 0 or null, got the number 0", "peak_tflops=0"),
  cli_arg("num_epoch", "num_epoch: expected a whole number of at least 1 or null, got the number 0", "num_epoch=0"),
  # What is missing.
  Bad("no run_name", "run_name is missing: name the run: run_name=my-run", args=["run_name="]),
  Bad(
    "no output",
    "base_output_directory is missing: say where runs are kept: base_output_directory=runs, or gs://bucket/runs",
    args=["base_output_directory="],
  ),
  Bad(
    "no steps given",
    "steps is missing: say how long to train: steps=1000, or num_epoch=1",
    start=GOOD.replace("steps: 5\n", ""),
  ),
  Bad(
    "no tokenizer",
    "tokenizer_path is missing: name a tokenizer: a file, a folder, a hub repository, or"
    " maxtext://tokenizers/tokenizer.llama2",
    "hf_path: org/name",
    start=DATA,
  ),
  Bad(
    "no data",
    "hf_path or hf_train_files is missing: name a data set or files, for example hf_train_files=data/train.jsonl",
    start=DATA + TOKENIZER,
  ),
  Bad(
    "a format and no files",
    "hf_train_files is missing: hf_path=json says the files' format, not which they are",
    "hf_path: json",
    start=DATA + TOKENIZER,
  ),
  Bad(
    "no grain files",
    "grain_train_files is missing: name the training files, for example grain_train_files=data/*.parquet",
    args=["dataset_type=grain"],
    start=DATA + TOKENIZER,
  ),
  # Files that are not there.
  cli_arg("train file", "hf_train_files=nowhere.jsonl: no such file", "hf_train_files=nowhere.jsonl", start=FILES),
  cli_arg("train glob", "hf_train_files=no/*.jsonl: matches no file", "hf_train_files=no/*.jsonl", start=FILES),
  cli_arg(
    "one file of a list",
    'hf_train_files=["train.jsonl", "b.jsonl"]: no such file: b.jsonl',
    "hf_train_files=[train.jsonl,b.jsonl]",
    start=FILES,
  ),
  cli_arg("eval file", "hf_eval_files=e.jsonl: no such file", "hf_eval_files=e.jsonl", "eval_interval=5", start=FILES),
  cli_arg("data folder", "hf_path=./data: no such file or folder", "hf_path=./data", start=DATA + TOKENIZER),
  cli_arg("tokenizer file", "tokenizer_path=my.model: no such file", "tokenizer_path=my.model", start=FILES),
  cli_arg(
    "tokenizer that MaxText ships",
    "tokenizer_path=assets/tokenizer.llama2: no such file; MaxText ships maxtext://tokenizers/tokenizer.llama2",
    "tokenizer_path=assets/tokenizer.llama2",
    start=FILES,
  ),
  cli_arg(
    "tokenizer asset",
    "tokenizer_path=maxtext://tokenizers/tokenizer.llama9: no such file",
    "tokenizer_path=maxtext://tokenizers/tokenizer.llama9",
    start=FILES,
  ),
  cli_arg("template file", "chat_template=my/own.jinja: no such file", "chat_template=my/own.jinja"),
  cli_arg(
    "template name",
    "chat_template=lama: is neither a file, nor Jinja text, nor a built-in template; built in are chatml, gemma,"
    " llama2, llama3, mistral, plain, qwen",
    "chat_template=lama",
  ),
  cli_arg("template path", "chat_template_path=t.json: no such file or folder", "chat_template_path=t.json"),
  cli_arg("weights", "load_parameters_path=w/items: no such file or folder", "load_parameters_path=w/items"),
  cli_arg(
    "output is a file",
    "base_output_directory=train.jsonl: is a file; name a folder",
    "base_output_directory=train.jsonl",
  ),
  # Combinations.
  cli_arg(
    "both loads",
    "load_parameters_path=gs://a: load_full_state_path is set too; set one of them",
    "load_parameters_path=gs://a",
    "load_full_state_path=gs://b",
  ),
  cli_arg(
    "full state without checkpoints",
    "enable_checkpointing=false: load_full_state_path restores through the run's checkpoints, which this turns off",
    "load_full_state_path=gs://b",
    "enable_checkpointing=false",
  ),
  cli_arg(
    "eval without data",
    "eval_interval=5: there are no evaluation data; set hf_eval_files, or eval_interval=-1",
    "eval_interval=5",
    start=FILES,
  ),
  cli_arg(
    "eval without a split",
    "eval_interval=5: there are no evaluation data; set hf_eval_files or hf_eval_split, or eval_interval=-1",
    "eval_interval=5",
    "hf_path=org/name",
    start=DATA + TOKENIZER,
  ),
  cli_arg(
    "no eval steps",
    "eval_steps=0: must be at least 1, or -1 for all evaluation data",
    "eval_interval=5",
    "eval_steps=0",
  ),
  cli_arg(
    "warmup and decay",
    "warmup_steps_fraction=0.6: with wsd_decay_steps_fraction=0.5 the warmup and the decay take more than the whole"
    " schedule; their sum must be at most 1",
    "lr_schedule_type=wsd",
    "warmup_steps_fraction=0.6",
    "wsd_decay_steps_fraction=0.5",
  ),
  cli_arg(
    "head in parts, quantised",
    "num_vocab_tiling=2: with quantization the output head can't be applied in parts; set it to 1",
    "num_vocab_tiling=2",
    "quantization=int8",
  ),
  cli_arg(
    "head in parts, offloaded",
    "num_vocab_tiling=2: with parameter_memory_host_offload the output head can't be applied in parts; set it to 1",
    "num_vocab_tiling=2",
    "parameter_memory_host_offload=true",
  ),
  cli_arg(
    "head in parts, explicit sharding",
    "num_vocab_tiling=2: with shard_mode the output head can't be applied in parts; set it to 1",
    "num_vocab_tiling=2",
    "shard_mode=explicit",
  ),
  cli_arg(
    "run_name leads out", "run_name=../x: must not lead out of base_output_directory; use a plain name", "run_name=../x"
  ),
  cli_arg(
    "absolute run_name", "run_name=/x: must not lead out of base_output_directory; use a plain name", "run_name=/x"
  ),
  cli_arg(
    "three columns",
    'train_data_columns=["a", "b", "c"]: must name one column of messages, or two different ones: the user\'s text and'
    " the assistant's",
    "train_data_columns=[a,b,c]",
    start=FILES,
  ),
  cli_arg(
    "a model's size",
    "base_emb_dim=64, but maxtext model llama2-7b.yml sets 4096; remove one, or set override_model_config=true",
    "base_emb_dim=64",
    "model_name=llama2-7b",
  ),
  line5(
    "a model's size in YAML",
    "base_emb_dim: 64",
    "base_emb_dim=64, but maxtext model llama2-7b.yml sets 4096; remove one, or set override_model_config=true",
    args=["model_name=llama2-7b"],
  ),
  cli_arg(
    "a model without a file",
    "model_name=deepseek3-671b-lineage: MaxText ships no models/deepseek3-671b-lineage.yml with its sizes; choose"
    " another, or give the sizes yourself with override_model_config=true",
    "model_name=deepseek3-671b-lineage",
  ),
  # What the SFT trainer does not do.
  cli_arg(
    "tfds", "dataset_type=tfds: is not supported; use one of hf, grain, synthetic", "dataset_type=tfds", start=FILES
  ),
  cli_arg(
    "host offload",
    "optimizer_memory_host_offload=true: an optimizer kept in host memory is not supported",
    "optimizer_memory_host_offload=true",
  ),
  cli_arg("mtp", "mtp_num_layers=1: multi-token prediction is not supported; set it to 0", "mtp_num_layers=1"),
  cli_arg("indexer", "use_indexer=true: sparse attention indexers are not supported", "use_indexer=true"),
  cli_arg("multimodal", "use_multimodal=true: multimodal models are not supported", "use_multimodal=true"),
  cli_arg("diloco", "enable_diloco=true: DiLoCo is not supported", "enable_diloco=true"),
  cli_arg("dpo", "use_dpo=true: it asks for DPO, which the SFT trainer does not do", "use_dpo=true"),
  cli_arg("not sft", "use_sft=false: the SFT trainer does SFT; leave this key out", "use_sft=false"),
  lora_arg(
    "LoRA's rank",
    "lora.lora_rank=0: must be above 0 with lora.enable_lora=true, for example lora.lora_rank=16",
    "lora.lora_rank=0",
  ),
  lora_arg(
    "LoRA's alpha",
    "lora.lora_alpha=0.0: must be above 0 with lora.enable_lora=true, for example lora.lora_alpha=32",
    "lora.lora_alpha=0.0",
  ),
  lora_arg(
    "LoRA's pattern",
    "lora.lora_module_path=(: is no regular expression: missing ), unterminated subpattern at position 0",
    "lora.lora_module_path=(",
  ),
  lora_arg(
    "LoRA's type",
    "lora.lora_weight_qtype=int2: must be one of nf4, int4, int8, float8_e4m3fn, float8_e5m2",
    "lora.lora_weight_qtype=int2",
  ),
  lora_arg(
    "LoRA's blocks without a type",
    "lora.lora_tile_size=16: sizes the blocks of a quantised base; set lora.lora_weight_qtype too",
    "lora.lora_tile_size=16",
  ),
  lora_arg(
    "LoRA's blocks of none",
    "lora.lora_tile_size=0: must be at least 1; leave it out for one scale an axis",
    "lora.lora_weight_qtype=nf4",
    "lora.lora_tile_size=0",
  ),
  lora_arg(
    "LoRA with Muon",
    "opt_type=muon: Muon is for full weight matrices, not for an adapter's; use adamw",
    "opt_type=muon",
  ),
  lora_arg(
    "LoRA with serving's adapters",
    "lora_input_adapters_path=x: is for serving; an adapter to begin with is lora.lora_restore_path",
    "lora_input_adapters_path=x",
  ),
  lora_arg(
    "LoRA's adapter to begin with", "lora.lora_restore_path=gone: no such file or folder", "lora.lora_restore_path=gone"
  ),
  lora_arg(
    "LoRA with a whole state",
    "load_full_state_path=.: with lora.enable_lora=true the base is named with load_parameters_path, an"
    " adapter to begin with by lora.lora_restore_path",
    "load_full_state_path=.",
  ),
  lora_arg(
    "LoRA with two bases",
    "lora_fresh_base=true: load_parameters_path is set too; set one of them",
    "load_parameters_path=.",
  ),
  Bad(
    "LoRA without a base",
    "load_parameters_path is missing: name the base that the adapter is trained over;"
    " lora_fresh_base=true trains over weights drawn from init_weights_seed",
    args=["lora.enable_lora=true", "lora.lora_rank=4", "lora.lora_alpha=8"],
  ),
  cli_arg(
    "tokens as data",
    "tokenize_train_data=false: data that are tokens already are not supported; give text",
    "tokenize_train_data=false",
    start=FILES,
  ),
  # YAML that is broken, or that PyYAML would let pass.
  line5("duplicate key", "steps: 6", "steps is given twice (first in line 3)"),
  Bad(
    "duplicate nested key",
    "c.yml, line 7: lora_rank is given twice (first in line 6)",
    "lora:\n  lora_rank: 1\n  lora_rank: 2\n",
  ),
  line5(
    "tab",
    "\tsteps: 6",
    "is not valid YAML: while scanning a plain scalar found a tab character that violates indentation",
  ),
  Bad(
    "open bracket",
    "c.yml, line 6: is not valid YAML: while parsing a flow sequence did not find expected ',' or ']'",
    "prompt: [a\n",
  ),
  line5(
    "python object",
    "prompt: !!python/object/apply:os.getcwd []",
    "is not valid YAML: could not determine a constructor for the tag"
    " 'tag:yaml.org,2002:python/object/apply:os.getcwd'",
  ),
  Bad("a list", "c.yml, line 1: must hold `key: value` lines", start="- steps\n- 5\n"),
  line5("alias in a circle", "lora: &a {lora_rank: *a}", "an alias (*name) points to what it stands in"),
  line5("a list for a key", "[a, b]: 1", "a key must be one word"),
  Bad(
    "two documents",
    "c.yml, line 5: is not valid YAML: expected a single document in the stream but found another document",
    "---\nsteps: 5\n",
  ),
  # base_config.
  line5("no such base", "base_config: nope.yml", ""),
  line5("base is a number", "base_config: 5", "base_config must name a YAML file, or be a list of them"),
  # ${...}
  line5("reference to nothing", "prompt: ${nothing}", "prompt: ${nothing}: there is no key nothing"),
  line5("reference in a circle", "prompt: ${prompt}", "prompt: its ${...} refer to each other in a circle"),
  line5(
    "variable not set", "prompt: ${oc.env:NO_SUCH}", "prompt: ${oc.env:NO_SUCH}: NO_SUCH is not set in the environment"
  ),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  monkeypatch.chdir(tmp_path)
  (tmp_path / "train.jsonl").write_text("{}\n")
  return tmp_path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused_with_one_line(case: Bad, folder: Path):
  (folder / "c.yml").write_text(case.start + case.yaml)
  with pytest.raises(ConfigError) as error:
    load_config(["c.yml", *case.args], environ=case.environ)
  assert error.value.exit_code == 2
  if case.name == "no such base":
    assert error.value.problems[0].startswith("c.yml, line 5: base_config nope.yml: no such file beside this one, in ")
    return
  assert [problem for problem in error.value.problems if not problem.startswith(case.says)] == []
  assert error.value.problems == [case.says] or case.says.endswith("…")
  assert "\n" not in error.value.problems[0]


def test_text_too_long_for_a_file_name(folder: Path):
  (folder / "c.yml").write_text(GOOD)
  with pytest.raises(ConfigError, match="is neither a file, nor Jinja text, nor a built-in template"):
    load_config(["c.yml", f"chat_template={'x' * 5000}"])


def test_there_are_many_cases():
  assert len({case.name for case in CASES}) == len(CASES) >= 100


def test_all_problems_are_listed_at_once(folder: Path, capsys: pytest.CaptureFixture[str]):
  (folder / "c.yml").write_text("stpes: 5\npacking: maybe\nopt_type: adam\nlora:\n  rnk: 1\nmax_target_length: 1\n")
  assert cli.main(["sft", "c.yml", "lr=1", "checkpoint_period=0"]) == 2
  lines = capsys.readouterr().err.splitlines()
  assert lines == [
    "error: c.yml, line 1: unknown key stpes; did you mean steps?",
    "error: c.yml, line 5: unknown key lora.rnk; did you mean lora.lora_rank?",
    "error: command line: unknown key lr; did you mean learning_rate?",
    'error: c.yml, line 3: opt_type: expected one of adamw, adam_pax, sgd, muon, got the text "adam"; did you'
    " mean adamw?",
    'error: c.yml, line 2: packing: expected true or false, got the text "maybe"',
    "error: command line: checkpoint_period=0: must be at least 1",
    "error: c.yml, line 6: max_target_length=1: must be at least 2",
    "error: run_name is missing: name the run: run_name=my-run",
    "error: base_output_directory is missing: say where runs are kept: base_output_directory=runs, or gs://bucket/runs",
    "error: steps is missing: say how long to train: steps=1000, or num_epoch=1",
  ]


def test_no_file_named():
  with pytest.raises(ConfigError, match=r"name a configuration: config\.yml"):
    load_config([])


def test_key_in_place_of_the_file(folder: Path):
  with pytest.raises(ConfigError, match=r"steps=5: the first argument must be a YAML file"):
    load_config(["steps=5"])


@pytest.mark.parametrize(
  ("name", "says"),
  [
    ("nope.yml", "nope.yml: no such file, here or in "),
    ("nope", "the first argument must be a YAML file"),
    (".", "is a folder"),
  ],
)
def test_file_that_is_not_there(name: str, says: str, folder: Path):
  with pytest.raises(ConfigError) as error:
    load_config([name])
  assert says in error.value.problems[0]


def test_file_that_is_not_text(folder: Path):
  (folder / "c.yml").write_bytes(b"run_name: \xff\xfe\n")
  with pytest.raises(ConfigError, match=r"^c\.yml: is not UTF-8 text \(byte 10\)$"):
    load_config(["c.yml"])


def test_files_that_build_on_each_other_in_a_circle(folder: Path):
  (folder / "a.yml").write_text("base_config: b.yml\n")
  (folder / "b.yml").write_text("base_config: a.yml\n")
  with pytest.raises(ConfigError, match=r"^a\.yml: builds on itself by base_config: a\.yml -> b\.yml -> a\.yml$"):
    load_config(["a.yml"])


def test_problem_in_a_base_names_that_file(folder: Path):
  (folder / "parent.yml").write_text(GOOD + "packing: maybe\n")
  (folder / "c.yml").write_text("base_config: parent.yml\n")
  with pytest.raises(ConfigError, match=r"^parent\.yml, line 5: packing: expected true or false"):
    load_config(["c.yml"])
