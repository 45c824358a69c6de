"""GRPO here against TRL's `GRPOTrainer` by phases, and generation alone against Tunix's vanilla sampler.

  python benchmarks/grpo_step.py --pairs 3

Both trainers write completions of the same GSM8K questions with the same model (random float32 weights), score them
with the same function and make the same number of updates of each rollout; TRL generates with transformers. Random
weights hardly ever end a completion, so that all have the same length. Each run is a fresh process, the sides
alternate, and a run's first rollout, compilation included, does not count. Where there is an interpreter with vLLM
(`make vllm-env`), our trainer with its engine is a third side. Then both our engine and Tunix's sampler, on Tunix's own
Llama of the same sizes, generate as many tokens greedily.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _common import Spread, write_tokenizer
from _contest import (
  GSM8K,
  REPOSITORY,
  RUN_KEYS,
  TORCH_PYTHON,
  VLLM_PYTHON,
  Side,
  print_machine,
  probed,
  run_side,
  torch_side,
)
from _shapes import SHAPES
from generate import Side as Generator

_VLLM = "vLLM"
_PHASES = ("rollout", "rewards", "log_probs", "updates", "weights")
_TITLES = {
  "rollout": "rollout",
  "rewards": "rewards",
  "log_probs": "log-probabilities",
  "updates": "updates",
  "weights": "weight transfer",
  "whole": "whole",
}
_OURS = {"rollout": "rollout", "rewards": "reward", "log_probs": "log_prob", "weights": "weight_transfer"}
_REWARD = """\
def distinct(prompts, completions, answers):
  return [len(set(completion)) / 100 for completion in completions]
"""
_FEWEST_ROLLOUTS = 2

Phases = dict[str, float]


def main(arguments: Sequence[str] | None = None) -> None:
  options = _parse(arguments)
  print_machine(options.torch_python, warm_cache=False)
  keys = _keys(options)
  config = REPOSITORY / "configs" / "grpo.yml"
  ours = probed("ours", "train_grpo", config)
  theirs = torch_side("TRL", options.torch_python, "_trl_grpo_side.py")
  with tempfile.TemporaryDirectory(prefix="grpo_step-") as name:
    folder = Path(name)
    write_tokenizer(GSM8K / "train.jsonl", folder / "tokenizer")
    count = write_prompts(folder / "tokenizer", folder / "prompts.jsonl", options.prompt)
    (folder / "rewards.py").write_text(_REWARD, encoding="utf-8")
    reward = f"{folder / 'rewards.py'}:distinct"
    keys |= {"hf_train_files": str(folder / "prompts.jsonl"), "tokenizer_path": str(folder / "tokenizer")}
    ours = dataclasses.replace(ours, keys={"reward_weights": json.dumps({reward: 1.0})})
    sides = [ours, dataclasses.replace(theirs, keys={"reward": reward})]
    if options.vllm_python.is_file():
      vllm = probed(_VLLM, "train_grpo", config, options.vllm_python.absolute())
      sides.append(dataclasses.replace(vllm, keys={**ours.keys, "rollout_engine": "vllm"}))
    else:
      print(f"vLLM      not measured: there is no {options.vllm_python}; make vllm-env makes it")
    print(
      f"rollout   {options.prompts} of {count} prompts with {options.generations} completions of {options.new} tokens,"
      f" {options.updates} updates"
    )
    pairs: list[dict[str, list[Phases]]] = []
    for number in range(options.pairs):
      order = sides if number % 2 == 0 else sides[::-1]
      pairs.append({side.name: _rollouts(side, folder / f"{number}-{side.name}", keys, options) for side in order})
    for line in table(pairs):
      print(line)
    raw: dict[str, Any] = {"pairs": pairs}
    if not options.without_tunix:
      raw["generation"] = _generation(folder, keys, options)
  if options.output:
    options.output.write_text(json.dumps(raw, indent=1), encoding="utf-8")


def write_prompts(tokenizer: Path, target: Path, longest: int) -> int:
  """Writes GSM8K's questions that have, as a chat, at most `longest` tokens and more than half of it; how many."""
  from maxtext_posttrain.tokenizers import build_tokenizer

  chat = build_tokenizer(str(tokenizer), "huggingface")
  count = 0
  with (GSM8K / "train.jsonl").open(encoding="utf-8") as rows, target.open("w", encoding="utf-8") as output:
    for line in rows:
      row = json.loads(line)
      ids = chat.apply_chat_template([{"role": "user", "content": row["question"]}], add_generation_prompt=True)
      if longest // 2 < len(ids) <= longest:
        output.write(line)
        count += 1
  return count


def _rollouts(side: Side, folder: Path, keys: Mapping[str, str], options: argparse.Namespace) -> list[Phases]:
  """The phases of each rollout of a run but the first."""
  result, _ = run_side(side, folder, {"jax_cache_dir": str(folder / "cache"), **keys})
  ends = result["completed"][options.updates - 1 :: options.updates]
  if "phases" in result:
    found = [{**phases, "weights": 0.0} for phases in result["phases"]]
  else:
    found = list(_own_phases(folder / "output" / "benchmark" / "metrics.jsonl"))
  rollouts = []
  for number in range(1, len(ends)):
    phases = dict(found[number])
    phases["whole"] = ends[number] - ends[number - 1]
    phases["updates"] = phases["whole"] - sum(phases[name] for name in _PHASES if name != "updates")
    rollouts.append(phases)
  median = statistics.median(phases["whole"] for phases in rollouts)
  print(f"{side.name:<8} {result['parameters']:,} parameters, {median:.2f} s a rollout with its updates", flush=True)
  return rollouts


def _own_phases(metrics: Path) -> Iterator[Phases]:
  for line in metrics.read_text(encoding="utf-8").splitlines():
    record = json.loads(line)
    if "rollout_seconds" in record:
      yield {name: record[f"{key}_seconds"] for name, key in _OURS.items()}


def table(pairs: Sequence[Mapping[str, Sequence[Phases]]]) -> Iterator[str]:
  """Seconds of each phase on all sides, their ratios to TRL's, and the goals."""

  def medians(side: str, phase: str) -> list[float]:
    return [statistics.median(phases[phase] for phases in runs[side]) for runs in pairs]

  own = [name for name in ("ours", _VLLM) if name in pairs[0]]
  columns = "{:<22}" + " {:>26}" * (len(own) + 1) + " {:>20}" * len(own) + "  {}"
  ratios = [f"{name}/TRL" for name in own]
  yield ""
  yield columns.format("s, median [least .. most]", *own, "TRL", *ratios, "goal").rstrip()
  for phase in (*_PHASES, "whole"):
    times = {name: medians(name, phase) for name in (*own, "TRL")}
    cells = [Spread.of(values).text(4) if any(values) else "" for values in times.values()]
    for name in own:
      known = all(times["TRL"])
      cells.append(Spread.of([a / b for a, b in zip(times[name], times["TRL"], strict=True)]).text(2) if known else "")
    yield columns.format(_TITLES[phase], *cells, "<= 1.0" if phase == "whole" else "").rstrip()
  for name in own:
    shares = [a / b for a, b in zip(medians(name, "weights"), medians(name, "whole"), strict=True)]
    yield f"{name}: weight transfer is {100 * statistics.median(shares):.2f} % of the whole; the goal is under 5 %"


def _generation(folder: Path, keys: Mapping[str, str], options: argparse.Namespace) -> dict[str, list[float]]:
  """Tokens per second of a rollout's generation alone, ours and Tunix's, in turns; prints them."""
  shape = {
    name: int(keys[key])
    for name, key in {
      "layers": "base_num_decoder_layers",
      "emb": "base_emb_dim",
      "mlp": "base_mlp_dim",
      "heads": "base_num_query_heads",
      "kv_heads": "base_num_kv_heads",
      "head_dim": "head_dim",
      "vocab": "vocab_size",
    }.items()
  } | {"prompt": options.prompt, "new": options.new}
  sides = [Generator(name, sys.executable, shape, folder / "generation-cache") for name in ("ours", "tunix")]
  sequences = options.prompts * options.generations
  rates: dict[str, list[float]] = {side.name: [] for side in sides}
  for number in range(options.rounds + 1):
    for side in sides if number % 2 else reversed(sides):
      run = side.run(sequences)
      if number:
        rates[side.name].append(run.rate)
  for side in sides:
    side.close()
  ratio = Spread.of([b / a for a, b in zip(rates["ours"], rates["tunix"], strict=True)]).text(2)
  print(f"\ngeneration alone, {sequences} sequences of {options.prompt} + {options.new} tokens, tokens per second:")
  for name, values in rates.items():
    print(f"{name:<8} {Spread.of(values).text(0)}{'' if name == 'ours' else f', {ratio} of ours'}")
  return rates


def _keys(options: argparse.Namespace) -> dict[str, str]:
  return {
    **SHAPES[options.model],
    **RUN_KEYS,
    "train_data_columns": "[question,answer]",
    "steps": str(options.rollouts * options.updates),
    "batch_size": str(options.prompts),
    "per_device_batch_size": str(options.prompts * options.generations // options.updates),
    "max_prefill_predict_length": str(options.prompt),
    "max_target_length": str(options.prompt + options.new),
    "decode_sampling_temperature": "1.0",
    "rl.num_generations": str(options.generations),
    "rl.grpo_epsilon": "0.2",
    "rl.use_rollout_logps": "true" if options.updates == 1 else "false",
    **dict(key.split("=", 1) for key in options.keys),
  }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description="GRPO here against TRL's, by phases.")
  parser.add_argument("--model", choices=SHAPES, default="10m", help="what is trained (default 10m)")
  parser.add_argument("--pairs", type=int, default=3, help="runs of each side (default 3)")
  parser.add_argument("--rollouts", type=int, default=5, help="of a run; the first does not count (default 5)")
  parser.add_argument("--prompts", type=int, default=8, help="of a rollout (default 8)")
  parser.add_argument("--generations", type=int, default=4, help="completions of a prompt (default 4)")
  parser.add_argument("--updates", type=int, default=2, help="of a rollout (default 2)")
  parser.add_argument("--prompt", type=int, default=64, help="most tokens of a prompt (default 64)")
  parser.add_argument("--new", type=int, default=64, help="tokens of a completion (default 64)")
  parser.add_argument("--rounds", type=int, default=5, help="of generation alone (default 5)")
  parser.add_argument("--without-tunix", action="store_true", help="leave generation alone out")
  parser.add_argument(
    "--torch-python", type=Path, default=TORCH_PYTHON, help="an interpreter with TRL (default: make torch-env's)"
  )
  parser.add_argument(
    "--vllm-python", type=Path, default=VLLM_PYTHON, help="an interpreter with vLLM (default: make vllm-env's)"
  )
  parser.add_argument("--output", type=Path, help="also write all figures to this file as JSON")
  parser.add_argument("keys", nargs="*", metavar="key=value", help="MaxText keys for both sides")
  options = parser.parse_args(arguments)
  if options.pairs < 1 or options.rollouts < _FEWEST_ROLLOUTS or options.rounds < 1:
    parser.error(f"--pairs and --rounds must be at least 1, --rollouts at least {_FEWEST_ROLLOUTS}")
  if options.updates < 1 or options.prompts * options.generations % options.updates:
    parser.error(f"--updates must divide the {options.prompts * options.generations} sequences of a rollout")
  if bad := [key for key in options.keys if "=" not in key]:
    parser.error(f"{bad[0]}: keys are given as key=value")
  return options


if __name__ == "__main__":
  main()
