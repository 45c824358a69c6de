"""Tiny runs of every trainer on simulated CPU devices: many of them, one after the other, in a process of their own.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.support.devices jobs.json results.json
"""

from __future__ import annotations

import json
import os
import socket
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxtext_posttrain.checkpointing.metadata import describe_checkpoint
from maxtext_posttrain.checkpointing.names import ITEMS
from maxtext_posttrain.checkpointing.streaming import read_arrays
from tests.conftest import REPOSITORY
from tests.support import runs

DATA = REPOSITORY / "configs" / "data"
VOCABULARY = 320
SEQUENCES = 8
"""Of a micro-batch, on all devices together."""
REWARD = """
def length(prompts, completions, answers):
  return [float(len(each) % 3) for each in completions]
"""
_TEMPLATE = (
  "{% for message in messages %}{% if message['role'] == 'assistant' %}"
  "{% generation %}{{ message['content'] }}<eos>{% endgeneration %}"
  "{% else %}<bos>{{ message['content'] }}{% endif %}{% endfor %}"
)
_COMMON = """\
base_config: [{trainer}.yml, models/tiny.yml]
base_num_decoder_layers: 2
base_emb_dim: 64
base_mlp_dim: 128
base_num_query_heads: 8
base_num_kv_heads: 8
head_dim: 8
vocab_size: {vocabulary}
tokenizer_type: huggingface
tokenizer_path: {folder}/tokenizer
base_output_directory: {folder}
max_target_length: 64
learning_rate: 1.e-2
learning_rate_schedule_steps: 4
steps: 2
checkpoint_period: 1
eval_interval: 2
enable_tensorboard: false
log_every: 1
"""
_TRAINERS = {
  "sft": "hf_train_files: {data}/quickstart_chat.jsonl\nhf_eval_files: {data}/quickstart_chat_eval.jsonl\n",
  "dpo": (
    "hf_train_files: {data}/quickstart_pairs.jsonl\nhf_eval_files: {data}/quickstart_pairs_eval.jsonl\neval_steps: 1\n"
  ),
  "distill": (
    "hf_train_files: {data}/quickstart_chat.jsonl\nhf_eval_files: {data}/quickstart_chat_eval.jsonl\n"
    "student_overrides: {{base_num_decoder_layers: 1}}\n"
    "teacher_overrides: {{load_parameters_path: {folder}/teacher/checkpoints/2/items}}\n"
  ),
  "grpo": (
    "hf_train_files: {data}/sums.jsonl\nhf_eval_files: {data}/sums_eval.jsonl\neval_steps: 1\n"
    "max_prefill_predict_length: 32\nmax_target_length: 48\n"
    "rl: {{num_generations: 4, grpo_beta: 0.05, loss_agg_mode: token-mean}}\n"
    'reward_weights: {{"{folder}/mine.py:length": 1.0, finished: 0.1}}\n'
  ),
}
_FILES = {"distill": "distillation"}


def write_room(folder: Path) -> Path:
  """Writes a tokenizer, a reward function and a configuration for each trainer; returns the folder."""
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=VOCABULARY,
    special_tokens=["<pad>", "<bos>", "<eos>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  texts = [path.read_text(encoding="utf-8") for path in sorted(DATA.glob("*.jsonl"))]
  tokenizer.train_from_iterator(texts, trainer)
  (folder / "tokenizer").mkdir(parents=True)
  tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
  tokens = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "chat_template": _TEMPLATE}
  (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(tokens), encoding="utf-8")
  (folder / "mine.py").write_text(REWARD, encoding="utf-8")
  for name, own in _TRAINERS.items():
    text = _COMMON.format(trainer=_FILES.get(name, name), vocabulary=VOCABULARY, folder=folder)
    own = own.format(data=DATA, folder=folder)
    # The trainer's own value of a key counts.
    given = {line.partition(":")[0] for line in own.splitlines()}
    kept = [line for line in text.splitlines() if line.partition(":")[0] not in given]
    (folder / f"{name}.yml").write_text("\n".join(kept) + "\n" + own, encoding="utf-8")
  return folder


def job(folder: Path, trainer: str, run_name: str, devices: int, *extra: str, **mesh: int) -> dict[str, Any]:
  """One run: on all devices, shared out as `mesh` says (`fsdp=4, tensor=2`), with SEQUENCES a micro-batch."""
  sizes = {"data": 1, "fsdp": 1, "tensor": 1} | mesh
  argv = [
    str(folder / f"{trainer}.yml"),
    f"run_name={run_name}",
    f"per_device_batch_size={SEQUENCES / devices}",
    *(f"ici_{axis}_parallelism={size}" for axis, size in sizes.items()),
    *extra,
  ]
  return {"trainer": trainer, "run": str(folder / run_name), "argv": argv}


def environment(devices: int, process: int = 0, processes: int = 1, port: int = 0) -> dict[str, str]:
  """What a process with so many simulated devices has set; of several, one that finds the others by a port."""
  flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
  flags.append(f"--xla_force_host_platform_device_count={devices}")
  result = {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
  if processes > 1:
    # Bound to the loopback alone.
    result |= dict.fromkeys(("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"), f"127.0.0.1:{port}")
    result |= {"JAX_NUM_PROCESSES": str(processes), "JAX_PROCESS_ID": str(process)}
  return result


def free_port() -> int:
  """A port of the loopback that nobody listens on."""
  with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    return listener.getsockname()[1]


class Jobs:
  """Runs made one after the other by one process, or by several together."""

  def __init__(self, folder: Path, name: str, jobs: Sequence[Mapping[str, Any]], *, devices: int, processes: int = 1):
    """Starts the processes, each with so many devices."""
    self.logs = [folder / f"{name}.{index}.log" for index in range(processes)]
    self._results = [folder / f"{name}.{index}.json" for index in range(processes)]
    port = free_port()
    self.processes = []
    for index, (log, results) in enumerate(zip(self.logs, self._results, strict=True)):
      own = environment(devices, index, processes, port)
      process = runs.FORKSERVER.Process(target=_make, args=(list(jobs), str(results), str(log), own))
      process.start()
      self.processes.append(process)

  def results(self) -> dict[str, str | None]:
    """Waits; by run, what ended it early, or None. Of several processes all must say the same."""
    for process, log in zip(self.processes, self.logs, strict=True):
      process.join()
      assert process.exitcode == 0, log.read_text(encoding="utf-8")[-4000:]
    first, *others = [json.loads(path.read_text(encoding="utf-8")) for path in self._results]
    assert all(other == first for other in others)
    return first


def _make(jobs: Sequence[Mapping[str, Any]], results: str, log: str, own: Mapping[str, str]) -> None:
  from maxtext_posttrain.commands import TRAINERS
  from maxtext_posttrain.commands.train import run_configured
  from maxtext_posttrain.config import load_config
  from maxtext_posttrain.errors import PostTrainError

  runs.enter_child(log, own)
  outcomes: dict[str, str | None] = {}
  for each in jobs:
    name = Path(each["run"]).name
    print(f"--- {name}: {' '.join(each['argv'][1:])}", flush=True)
    try:
      code = run_configured(TRAINERS[each["trainer"]], load_config(each["argv"], trainer=each["trainer"]))
      outcomes[name] = f"exit {code}" if code else None
    except PostTrainError as error:
      outcomes[name] = f"{type(error).__name__}: {error}"
    except Exception as error:
      traceback.print_exc()
      outcomes[name] = f"internal: {type(error).__name__}: {error}"
    Path(results).write_text(json.dumps(outcomes), encoding="utf-8")
  runs.leave_child(own)


def items(step: Path) -> dict[tuple[Any, ...], np.ndarray]:
  """The arrays of a step's items by path, whatever devices wrote them."""
  stored = describe_checkpoint(str(step))
  return read_arrays(stored, ITEMS, stored.arrays(ITEMS))
