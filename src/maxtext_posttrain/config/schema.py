"""Which keys a configuration may have: MaxText's, from a generated file, and our own beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maxtext_posttrain.config import preferences, reinforcement

SECRET_KEYS = frozenset({"hf_access_token"})
"""Keys whose values are never shown."""

OWN_MEANING = frozenset({"chat_template", "use_dpo"})
"""MaxText's keys that mean more here than there, so that MaxText is not told their values: its DPO packs no pairs."""

_SCHEMA_FILE = "maxtext_schema.json"


@dataclass(frozen=True)
class OwnKey:
  """A key of ours beside MaxText's, or one of MaxText's that takes more values here.

  Attributes:
    type: the type as documentation shows it.
    default: the value where nothing sets one.
    doc: one line on what it does.
    spec: the JSON schema its values are checked against.
    from_maxtext: MaxText has a key of this name too; values that fit MaxText's own type are passed on.
    trainer: the one trainer that has it, or None for all.
  """

  type: str
  default: Any
  doc: str
  spec: Mapping[str, Any] = field(repr=False)
  from_maxtext: bool = False
  trainer: str | None = None


_STRING_OR_LIST = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}

OUR_KEYS: Mapping[str, OwnKey] = {
  "max_bad_rows": OwnKey(
    "float | int",
    0.01,
    "Rows that may be unusable before the run stops: a share of all rows below 1, a number of rows from 1 on.",
    {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "number", "minimum": 0}]},
  ),
  "parse_special_tokens_in_content": OwnKey(
    "bool",
    False,
    "Let text inside messages that looks like a special token become one. For trusted data only.",
    {"type": "boolean"},
  ),
  "trust_remote_code": OwnKey(
    "bool",
    False,
    "Let a HuggingFace repository run its own Python code when its tokenizer or data set is loaded.",
    {"type": "boolean"},
  ),
  "chat_template": OwnKey(
    "str",
    "",
    "Chat template: a built-in name (such as llama2), a file (.jinja, or a HuggingFace .json), or Jinja text.",
    {"type": "string"},
    from_maxtext=True,
  ),
  "hf_train_files": OwnKey(
    "str | list[str] | null",
    "",
    "Training files, globs allowed.",
    _STRING_OR_LIST,
    from_maxtext=True,
  ),
  "hf_eval_files": OwnKey(
    "str | list[str] | null",
    "",
    "Evaluation files, globs allowed.",
    _STRING_OR_LIST,
    from_maxtext=True,
  ),
  "num_epoch": OwnKey(
    "int | null",
    None,
    "Passes over the training data. Left out, the data repeat until `steps` are done.",
    {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
    from_maxtext=True,
  ),
  "nonfinite_gradients": OwnKey(
    '"error" | "skip"',
    "error",
    "What to do with a step whose gradients are not finite: stop the run, or leave the step out and count it.",
    {"type": "string", "enum": ["error", "skip"]},
  ),
  "max_skipped_steps": OwnKey(
    "int",
    100,
    "With nonfinite_gradients=skip: skipped steps in a row after which the run stops all the same.",
    {"type": "integer", "minimum": 0},
  ),
  "restore_fallback": OwnKey(
    "bool",
    False,
    "Where the newest checkpoint is damaged, go on from the one before it instead of stopping.",
    {"type": "boolean"},
  ),
  "post_train_skip_checkpointing": OwnKey(
    "bool",
    False,
    "Neither read nor write the run's checkpoints; load_parameters_path still loads.",
    {"type": "boolean"},
  ),
  "lora_fresh_base": OwnKey(
    "bool",
    False,
    "With lora.enable_lora: train over weights drawn from init_weights_seed instead of a load_parameters_path.",
    {"type": "boolean"},
  ),
  "log_every": OwnKey(
    "int",
    10,
    "Steps between two progress lines where the output is a log and not a terminal.",
    {"type": "integer", "minimum": 1},
  ),
  "maxtext_log": OwnKey(
    "bool",
    False,
    "Show what MaxText and the libraries below it log.",
    {"type": "boolean"},
  ),
  "wandb_mode": OwnKey(
    '"online" | "offline" | null',
    None,
    "With enable_wandb: send metrics, or only write them below the run's folder. Left out, WANDB_MODE says which.",
    {"anyOf": [{"type": "string", "enum": ["online", "offline"]}, {"type": "null"}]},
  ),
  "peak_tflops": OwnKey(
    "float | null",
    None,
    "Peak TFLOP/s of one device, for the model FLOPs utilization, where it is not known from the device's kind.",
    {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]},
  ),
  "device_memory_gib": OwnKey(
    "float | null",
    None,
    "GiB of memory that a run may use of each device. Left out, what the device says; a CPU says nothing, and then"
    " nothing is compared.",
    {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]},
  ),
  "memory_check": OwnKey(
    '"error" | "warn" | "off"',
    "error",
    "What to do with a run that by the estimate of memory does not fit its devices: refuse it, say so, or nothing.",
    {"type": "string", "enum": ["error", "warn", "off"]},
  ),
  "teacher_config": OwnKey(
    "str | null",
    None,
    "The YAML that describes the teacher's model: a run's config.yml, or an import's model.yml. Left out, the run's own"
    " configuration without student_overrides does; teacher_overrides lie over either.",
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    trainer="distill",
  ),
  "student_init_from_teacher_layers": OwnKey(
    "int | list[int] | null",
    None,
    "Start the student as the teacher with only these layers, by number from 0, or with every k-th.",
    {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
    trainer="distill",
  ),
  "distill_divergence": OwnKey(
    '"forward_kl" | "reverse_kl" | "jsd"',
    "forward_kl",
    "KL(teacher || student), KL(student || teacher), or GKD's generalised Jensen-Shannon divergence.",
    {"type": "string", "enum": ["forward_kl", "reverse_kl", "jsd"]},
    trainer="distill",
  ),
  "distill_jsd_beta": OwnKey(
    "float",
    0.5,
    "With distill_divergence=jsd: the teacher's share of the mixture; 0 is forward_kl, 1 reverse_kl.",
    {"type": "number", "minimum": 0, "maximum": 1},
    trainer="distill",
  ),
  "distill_teacher_layer_indices": OwnKey(
    "list[int] | null",
    None,
    "The teacher's layers that distill_layer_indices of the student are compared with. Left out, the same numbers.",
    {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
    trainer="distill",
  ),
  "dpo.loss_type": OwnKey(
    " | ".join(f'"{name}"' for name in preferences.LOSS_TYPES),
    "sigmoid",
    "With dpo.algo=dpo: DPO's loss, the same of means over tokens, SLiC's, IPO's, or SimPO's (no reference).",
    {"type": "string", "enum": list(preferences.LOSS_TYPES)},
    trainer=preferences.TRAINER,
  ),
  "dpo.simpo_gamma": OwnKey(
    "float",
    0.5,
    "With dpo.loss_type=simpo: the margin between the two rewards that is aimed at.",
    {"type": "number", "minimum": 0},
    trainer=preferences.TRAINER,
  ),
  "dpo.reference": OwnKey(
    " | ".join([*(f'"{name}"' for name in preferences.REFERENCE_KINDS), "null"]),
    None,
    "What the policy is compared with: the weights the run starts from as a frozen model, their log-probabilities"
    " computed once before training, or the base with the adapter off. Left out, the last with LoRA, else the first.",
    {"anyOf": [{"type": "string", "enum": list(preferences.REFERENCE_KINDS)}, {"type": "null"}]},
    trainer=preferences.TRAINER,
  ),
  "batch_size": OwnKey(
    "int | null",
    None,
    "Prompts of one rollout. Left out, as many as make the sequences of one update.",
    {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
    from_maxtext=True,
    trainer=reinforcement.TRAINER,
  ),
  "rl.loss_agg_mode": OwnKey(
    " | ".join(f'"{name}"' for name in reinforcement.AGGREGATIONS),
    "sequence-mean-token-mean",
    "Over what the loss is a mean: all tokens; sequences, each by the mean or the sum of its tokens; or Dr. GRPO's"
    " constant.",
    {"type": "string", "enum": list(reinforcement.AGGREGATIONS)},
    from_maxtext=True,
    trainer=reinforcement.TRAINER,
  ),
  "rl.advantage_scale": OwnKey(
    " | ".join(f'"{name}"' for name in reinforcement.ADVANTAGE_SCALES),
    "std",
    "Advantages: rewards less their group's mean over its standard deviation; less the mean alone (Dr. GRPO); or the"
    " rewards as they are.",
    {"type": "string", "enum": list(reinforcement.ADVANTAGE_SCALES)},
    trainer=reinforcement.TRAINER,
  ),
  "rl.advantage_epsilon": OwnKey(
    "float",
    1e-6,
    "With rl.advantage_scale=std: what is added to the standard deviation.",
    {"type": "number", "exclusiveMinimum": 0},
    trainer=reinforcement.TRAINER,
  ),
  "rl.mask_truncated_completions": OwnKey(
    "bool",
    False,
    "Leave completions that were cut at their limit out of the loss; they stay in their group.",
    {"type": "boolean"},
    trainer=reinforcement.TRAINER,
  ),
  "rl.importance_sampling_cap": OwnKey(
    "float | null",
    None,
    "Correct for an engine that is not quite the trainer: each token's loss times the ratio of their probabilities, at"
    " most this.",
    {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]},
    trainer=reinforcement.TRAINER,
  ),
  "reward_weights": OwnKey(
    "dict[str, float]",
    {"exact_answer": 1.0},
    "Reward functions with their weights: exact_answer, marked_answer, tagged_format, finished, overlong, or your own"
    " as file.py:function of (prompts, completions, answers).",
    # As a choice of one it replaces what a file below says; a mapping alone would be merged into that.
    {"anyOf": [{"type": "object"}]},
    trainer=reinforcement.TRAINER,
  ),
  "reward_failure_score": OwnKey(
    "float",
    0.0,
    "What completions score by a reward call that raises, answers nonsense or takes longer than"
    " reward_worker_timeout_seconds.",
    {"type": "number"},
    trainer=reinforcement.TRAINER,
  ),
  "overlong_tokens": OwnKey(
    "int",
    0,
    "For the reward overlong: the last so many tokens of a completion's limit are one too many each.",
    {"type": "integer", "minimum": 0},
    trainer=reinforcement.TRAINER,
  ),
  "rollout_engine": OwnKey(
    " | ".join(f'"{name}"' for name in reinforcement.ENGINES),
    "native",
    "What writes the completions: MaxText itself, or vLLM in the same process (docs/grpo.md).",
    {"type": "string", "enum": list(reinforcement.ENGINES)},
    trainer=reinforcement.TRAINER,
  ),
  "vllm_engine_args": OwnKey(
    "dict[str, Any]",
    {},
    "With rollout_engine=vllm: arguments of vLLM's EngineArgs, such as kv_cache_memory_bytes, over what MaxText's vLLM"
    " keys say.",
    {"anyOf": [{"type": "object"}]},
    trainer=reinforcement.TRAINER,
  ),
  "rollout_check_period": OwnKey(
    "int",
    0,
    "With rollout_engine=vllm: new weights between two checks that its greedy log-probabilities are the trainer's; 0"
    " checks the first alone.",
    {"type": "integer", "minimum": 0},
    trainer=reinforcement.TRAINER,
  ),
  "rollout_seed": OwnKey(
    "int",
    0,
    "Seed of the completions; a rollout draws by it, its own number and the place in it.",
    {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
    trainer=reinforcement.TRAINER,
  ),
  "samples_per_rollout": OwnKey(
    "int",
    2,
    "Completions of each rollout that samples.jsonl gets, with their rewards.",
    {"type": "integer", "minimum": 0},
    trainer=reinforcement.TRAINER,
  ),
}
"""Our own keys beside MaxText's, in the order documentation shows them."""


@dataclass(frozen=True)
class Key:
  """What is known of one key.

  Attributes:
    name: dotted name.
    spec: JSON schema of its values.
    default: value where nothing sets one, unless MaxText's base.yml does.
    description: one line.
    ours: it is in `OUR_KEYS`.
    derived: MaxText computes it; it cannot be set.
    trainer: the one trainer that has it, or None for all.
  """

  name: str
  spec: Mapping[str, Any]
  default: Any
  description: str
  ours: bool = False
  derived: bool = False
  trainer: str | None = None

  def belongs_to(self, trainer: str | None) -> bool:
    """Whether a configuration of `trainer` may have it; None stands for any trainer's."""
    return self.trainer is None or trainer is None or self.trainer == trainer


class Schema:
  """All keys a configuration may have.

  Attributes:
    maxtext_version: the release the keys were taken from.
    keys: by dotted name.
    groups: names such as `lora` that hold keys of their own and no value.
    maxtext_specs: JSON schema of MaxText's own values, also where `keys` takes more.
    trainer_only: MaxText's keys that its own configuration of a model does not have, only that of one trainer.
  """

  def __init__(
    self,
    maxtext_version: str,
    keys: Mapping[str, Key],
    groups: frozenset[str],
    maxtext_specs: Mapping[str, Mapping[str, Any]],
    trainer_only: frozenset[str],
  ):
    self.maxtext_version = maxtext_version
    self.keys = keys
    self.groups = groups
    self.maxtext_specs = maxtext_specs
    self.trainer_only = trainer_only

  @classmethod
  def load(cls) -> Schema:
    """Reads the generated file of MaxText's keys and adds ours."""
    text = (Path(__file__).parent / _SCHEMA_FILE).read_text(encoding="utf-8")
    raw = json.loads(text)
    keys: dict[str, Key] = {}
    groups: set[str] = set()
    for name, spec in raw["keys"].items():
      if "properties" in spec:
        groups.add(name)
      keys.update((key.name, key) for key in _maxtext_keys(name, spec))
    maxtext_specs = {name: key.spec for name, key in keys.items()}
    trainer_only = frozenset(name for name, key in keys.items() if key.trainer is not None)
    for name, own in OUR_KEYS.items():
      keys[name] = Key(name, own.spec, own.default, own.doc, ours=True, trainer=own.trainer)
    return cls(raw["maxtext_version"], keys, frozenset(groups), maxtext_specs, trainer_only)


def _maxtext_keys(name: str, spec: Mapping[str, Any]) -> Iterator[Key]:
  trainer = spec.get("trainer")
  if "properties" in spec:
    for child, child_spec in spec["properties"].items():
      for key in _maxtext_keys(f"{name}.{child}", child_spec):
        yield Key(key.name, key.spec, key.default, key.description, trainer=trainer)
    return
  default = spec["default"] if "default" in spec else {"object": {}, "array": []}.get(spec.get("type", "array"))
  yield Key(name, spec, default, spec.get("description", ""), derived=bool(spec.get("derived", False)), trainer=trainer)
