"""Whether MaxText's pre-training can go on from a checkpoint, and if not why: pure functions over its described tree.

What each finding does is what pre-training of MaxText 0.2.5 was seen to do with such a checkpoint
(`tests/integration/test_diagnosis.py`). It restores with Orbax's partial loading: where containers differ (a dict in a
list's place, a list of another length) or shapes do, it refuses; where a leaf is simply absent it goes on without a
word, with a fresh value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from maxtext_posttrain.checkpointing import optimizer_kind
from maxtext_posttrain.checkpointing.metadata import KeyPath, StoredArray, flatten_tree
from maxtext_posttrain.checkpointing.optimizer_kind import Optimizer
from maxtext_posttrain.handback import Way

Effect = Literal["refused", "lost", "note"]
Answer = Literal["yes", "partly", "no"]

RUN_NAME: Way = "run_name"
FULL_STATE: Way = "load_full_state_path"
PARAMETERS: Way = "load_parameters_path"
WAYS: tuple[Way, ...] = (RUN_NAME, FULL_STATE, PARAMETERS)
_WHOLE: tuple[Way, ...] = (RUN_NAME, FULL_STATE)

_KEY_WORDS = 4
_ADAPTER = "base"
_BOX = "value"
_LISTED = 3


@dataclasses.dataclass(frozen=True)
class Finding:
  """Something about a checkpoint that matters to pre-training.

  Attributes:
    code: short and stable, for programs.
    effect: `refused`: pre-training stops with an error; `lost`: it goes on, but something starts afresh without a
      word; `note`: nothing is lost that was there.
    message: what, where, and what to do.
    ways: the ways of going on that it concerns.
  """

  code: str
  effect: Effect
  message: str
  ways: tuple[Way, ...] = _WHOLE


@dataclasses.dataclass(frozen=True)
class Verdict:
  """Whether pre-training goes on one way: `yes`; `partly`, where something starts afresh; `no`, where it refuses."""

  answer: Answer
  reasons: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Diagnosis:
  """What a step is worth to pre-training.

  Attributes:
    optimizer: None where no optimizer state is stored.
    findings: in the order in which they were made.
  """

  optimizer: Optimizer | None
  findings: tuple[Finding, ...]

  def verdict(self, way: Way) -> Verdict:
    """Whether pre-training goes on this way."""
    concerned = [finding for finding in self.findings if way in finding.ways]
    refused = [finding.message for finding in concerned if finding.effect == "refused"]
    lost = [finding.message for finding in concerned if finding.effect == "lost"]
    answer: Answer = "no" if refused else "partly" if lost else "yes"
    return Verdict(answer, tuple(refused or lost))

  @property
  def resumable(self) -> bool:
    """Whether pre-training goes on with everything: step, weights and optimizer."""
    return any(self.verdict(way).answer == "yes" for way in _WHOLE)

  @property
  def notes(self) -> tuple[str, ...]:
    """What is worth knowing and stops nothing."""
    return tuple(finding.message for finding in self.findings if finding.effect == "note")


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a step lies, as far as pre-training's ways of finding it go.

  Attributes:
    in_run: it is `<run>/checkpoints/<step>`.
    newest: no later step lies beside it.
    newest_step: the latest step beside it.
    folder_step: its folder's name, where that is a number.
    actor: it lies below `checkpoints/actor`.
    custom_metadata: of the step.
  """

  in_run: bool = True
  newest: bool = True
  newest_step: int | None = None
  folder_step: int | None = None
  actor: bool = False
  custom_metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def diagnose_items(items: Mapping[str, Any], place: Place, counts: Mapping[KeyPath, int] | None = None) -> Diagnosis:
  """Examines a tree in MaxText's layout.

  Args:
    items: nested dicts and lists of `StoredArray`.
    place: where it lies.
    counts: values of its integer scalars by path, where they were read.
  """
  optimizer = optimizer_kind.recognise(items["opt_state"]) if items.get("opt_state") else None
  findings = [
    *_weights(items),
    *_steps(items, place, counts or {}),
    *_rng_state(items),
    *_optimizer(items, optimizer, counts or {}),
    *_scanning(items, place),
    *_placement(place),
  ]
  return Diagnosis(optimizer, tuple(findings))


def diagnose_tunix(opt_state: Any, place: Place) -> Diagnosis:
  """Examines Tunix's layout, which pre-training can't read at all.

  Args:
    opt_state: its optimizer state without `value` boxes; None where none is stored.
    place: where it lies.
  """
  message = "it is in Tunix's layout (model_params), which pre-training does not read; convert it (posttrain convert)"
  optimizer = optimizer_kind.recognise(opt_state) if opt_state else None
  return Diagnosis(optimizer, (Finding("tunix_layout", "refused", message, WAYS), *_placement(place)))


def count_parameters(weights: Any) -> int:
  """Numbers in a tree of weights."""
  return sum(math.prod(leaf.shape) for leaf in flatten_tree(weights).values())


def state_bytes(tree: Any) -> int:
  """Bytes of all arrays of a tree, uncompressed."""
  return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in flatten_tree(tree).values())


def is_scanned(weights: Any) -> bool | None:
  """Whether layers are stacked in one array each; None where no layer's name says so."""
  keys = {str(key) for path in flatten_tree(weights) for key in path}
  if keys & {"layers", "scanned_blocks", "dense_layers", "moe_stack"}:
    return True
  return False if any(key.startswith("layers_") and key[7:].isdigit() for key in keys) else None


def is_adapter(items: Mapping[str, Any]) -> bool:
  """Whether the weights of a tree in MaxText's layout are a LoRA adapter's and nothing else."""
  names = {str(path[-1]) for path in flatten_tree(items.get("params"))}
  return bool(names) and all(name.endswith(("_lora_a", "_lora_b")) for name in names)


def _weights(items: Mapping[str, Any]) -> Iterator[Finding]:
  params = items.get("params")
  if not flatten_tree(params):
    yield Finding("no_weights", "refused", "it holds no weights (params/params)", WAYS)
    return
  assert isinstance(params, Mapping)
  if "params" not in params:
    found = _named(params)
    message = f"its weights are at params/{found}, not below params/params, where pre-training looks"
    yield Finding("no_params_level", "refused", message, WAYS)
    return
  weights = params["params"]
  paths = set(flatten_tree(weights))
  if all(path[:1] == (_ADAPTER,) for path in paths) and isinstance(weights, Mapping) and set(weights) == {_ADAPTER}:
    message = "its weights lie one level too deep, below params/params/base: the Tunix adapter's level was saved too"
    yield Finding("adapter_level", "refused", message, WAYS)
  if paths and all(path[-1:] == (_BOX,) for path in paths):
    message = "each weight lies in a box of its own (…/value): an NNX state was saved as it is"
    yield Finding("boxed", "refused", message, WAYS)
  if is_adapter(items):
    message = (
      "it holds a LoRA adapter and not the base it was trained over: pre-training would begin with fresh weights; make"
      " full ones of it (posttrain merge)"
    )
    yield Finding("adapter", "lost", message, WAYS)
  elif any("lora_a" in str(path[-1]) or "lora_b" in str(path[-1]) for path in paths):
    message = "it holds LoRA weights; pre-training leaves those it does not know aside: merge them first"
    yield Finding("lora", "note", message, WAYS)


def _steps(items: Mapping[str, Any], place: Place, counts: Mapping[KeyPath, int]) -> Iterator[Finding]:
  step = items.get("step")
  if not isinstance(step, StoredArray):
    yield Finding("no_step", "lost", "it has no step: pre-training would begin at step 0")
    return
  if step.shape != ():
    message = f"step has shape {step.shape}, pre-training's is a scalar"
    yield Finding("step_shape", "refused", message)
  elif str(step.dtype) not in ("int32", "uint32"):
    message = f"step is {step.dtype}, pre-training's is int32: it is cast"
    yield Finding("step_dtype", "note", message)
  value = counts.get(("step",))
  # Pre-training names its folder one less than the step inside.
  if value is not None and place.folder_step is not None and place.folder_step not in (value, value - 1):
    message = f"folder {place.folder_step} holds step {value}: pre-training goes by the step inside"
    yield Finding("folder_step", "note", message)


def _rng_state(items: Mapping[str, Any]) -> Iterator[Finding]:
  auxiliary = flatten_tree(items.get("nnx_aux"))
  if not auxiliary:
    yield Finding("no_rng_state", "note", "it has no rng state (nnx_aux): pre-training begins with fresh keys")
  wrong = [
    path
    for path, leaf in auxiliary.items()
    if path[-1] == "key" and str(leaf.dtype) == "uint32" and leaf.shape[-1:] != (_KEY_WORDS,)
  ]
  if wrong:
    shape = auxiliary[wrong[0]].shape
    message = (
      f"{len(wrong)} rng keys are not of pre-training's kind (unsafe_rbg, {_KEY_WORDS} words):"
      f" nnx_aux/{_path(wrong[0])} has shape {shape}; take the weights alone, or save again from a run that sets"
      " jax_default_prng_impl=unsafe_rbg before the model is built"
    )
    yield Finding("rng_keys", "refused", message)


def _optimizer(
  items: Mapping[str, Any], optimizer: Optimizer | None, counts: Mapping[KeyPath, int]
) -> Iterator[Finding]:
  if optimizer is None:
    yield Finding("no_optimizer", "lost", "it has no optimizer state: its moments would start fresh")
    return
  opt_state = items["opt_state"]
  yield from _wrapped(opt_state, optimizer)
  yield from _chain_shape(opt_state, optimizer)
  yield from _moments(items, optimizer)
  yield from _counts(items, optimizer, counts)


def _wrapped(opt_state: Any, optimizer: Optimizer) -> Iterator[Finding]:
  again = "take the weights alone (load_parameters_path)"
  if optimizer_kind.MULTI_STEPS in optimizer.wrappers:
    message = f"opt_state is inside optax.MultiSteps (gradient accumulation), which pre-training has not: {again}"
    yield Finding("multi_steps", "refused", message)
  if optimizer_kind.INJECT in optimizer.wrappers:
    message = f"opt_state is inside optax.inject_hyperparams, which pre-training has not: {again}"
    yield Finding("inject_hyperparams", "refused", message)
  if optimizer_kind.CLIP in optimizer.wrappers:
    where = f"opt_state/{_path(optimizer.path)}" if optimizer.path else "opt_state"
    message = f"the optimizer's chain has a link too many, a clip's (its state is at {where}): {again}"
    yield Finding("chain_level", "refused", message)
  if optimizer.name == "unknown":
    message = f"opt_state ({_named(opt_state)}) is of no optimizer that MaxText has"
    yield Finding("unknown_optimizer", "refused", message)


def _chain_shape(opt_state: Any, optimizer: Optimizer) -> Iterator[Finding]:
  """MaxText's AdamW is a list of three links, its SGD one of two; a list of another length is refused."""
  if optimizer.name in ("adam_pax", "unknown"):
    return
  if optimizer.path and optimizer.schedule is None:
    # Inside a wrapper chains are dicts, and what a dict lacks is passed over.
    where = f"opt_state/{_path(optimizer.path)}"
    yield Finding("no_schedule_count", "lost", f"{where} has no schedule's count: the schedule would start anew")
  length = {"adamw": 3, "sgd": 2}.get(optimizer.name)
  if length is None or optimizer.path or optimizer.wrappers:
    return
  if isinstance(opt_state, Mapping):
    message = f"opt_state is a dict with keys {_named(opt_state)} where pre-training has a list of {length}"
    yield Finding("dict_for_list", "refused", message)
  elif len(opt_state) != length:
    kind = "short" if len(opt_state) < length else "long"
    message = f"opt_state is a list of {len(opt_state)}, pre-training's {optimizer.name} has {length} links"
    if optimizer.schedule is None:
      message += ": the schedule's count is missing"
    yield Finding(f"list_too_{kind}", "refused", message)
  elif optimizer.schedule is None:
    message = f"opt_state/{length - 1}/count, the schedule's, is missing: it was saved with a constant learning rate"
    yield Finding("no_schedule_count", "refused", message)


def _moments(items: Mapping[str, Any], optimizer: Optimizer) -> Iterator[Finding]:
  """AdamW's and adam_pax's moments have an entry for each weight, below a `params` level where nothing wraps them."""
  if optimizer.name not in ("adamw", "adam_pax"):
    return
  weights = flatten_tree(_below(items, ("params", "params")))
  moments = {path[-1]: (path, tree) for path, tree in optimizer_kind.moment_trees(items["opt_state"])}
  for name in ("mu", "nu"):
    if name not in moments:
      yield Finding(f"no_{name}", "lost", f"the optimizer's {name} is missing: it would start at zero")
      continue
    path, tree = moments[name]
    where = f"opt_state/{_path(path)}"
    bare = not optimizer.path and not optimizer.wrappers
    if bare and "params" not in tree:
      message = f"{where} lacks the level params that pre-training has: its moments would start at zero"
      yield Finding("moments_level", "lost", message)
      continue
    if set(tree) == {"params"}:
      tree = tree["params"]
    have = flatten_tree(tree)
    if have and weights and all(path[:1] == (_ADAPTER,) for path in have) and not set(have) & set(weights):
      message = f"{where} lies one level too deep, below base, the Tunix adapter's: its moments would start at zero"
      yield Finding("moments_adapter", "lost", message)
      continue
    wrong = [path for path, leaf in have.items() if path in weights and leaf.shape != weights[path].shape]
    if wrong:
      shapes = f"{have[wrong[0]].shape}, the weight {weights[wrong[0]].shape}"
      message = f"{len(wrong)} of {where} have not their weight's shape: {_path(wrong[0])} has {shapes}"
      yield Finding("moments_shape", "refused", message)
    gone = [path for path in have if path not in weights]
    if gone:
      message = f"params/params lacks {len(gone)} weights that {where} has: {_some(gone)}"
      yield Finding("weights_missing", "refused", message, WAYS)
    absent = [path for path in weights if path not in have]
    if absent and optimizer_kind.TRAINABLE_MASK not in optimizer.wrappers:
      message = f"{where} lacks {len(absent)} of {len(weights)} weights ({_some(absent)}): those would start at zero"
      yield Finding("moments_missing", "lost", message)


def _counts(items: Mapping[str, Any], optimizer: Optimizer, counts: Mapping[KeyPath, int]) -> Iterator[Finding]:
  stored = flatten_tree(items["opt_state"])
  count_paths = [path for path in stored if path[-1] == "count" and stored[path].shape == ()]
  named = {_path(path) for path in stored}
  adam = {_path(path[:-1]) for path, _ in optimizer_kind.moment_trees(items["opt_state"])}
  for where in sorted(f"{path}/count".lstrip("/") for path in adam):
    if where not in named:
      message = f"opt_state/{where} is missing: the moments' bias correction would start anew"
      yield Finding("no_count", "lost", message)
  step = counts.get(("step",))
  values = {path: counts[("opt_state", *path)] for path in count_paths if ("opt_state", *path) in counts}
  other = {path: value for path, value in values.items() if value != step}
  if step is not None and other and optimizer_kind.SKIP_STEP not in optimizer.wrappers:
    listed = ", ".join(f"opt_state/{_path(path)} is {value}" for path, value in list(other.items())[:_LISTED])
    message = f"step is {step}, but {listed}: the learning rate follows the schedule's count, not the step"
    yield Finding("counts_disagree", "note", message)


def _scanning(items: Mapping[str, Any], place: Place) -> Iterator[Finding]:
  written = place.custom_metadata.get("scan_layers")
  found = is_scanned(_below(items, ("params", "params")))
  if isinstance(written, bool) and found is not None and written != found:
    message = (
      f"its metadata says scan_layers={str(written).lower()}, but its weights are"
      f" {'stacked by layer' if found else 'a layer each'}: set scan_layers={str(found).lower()}"
    )
    yield Finding("scan_layers", "note", message, WAYS)


def _placement(place: Place) -> Iterator[Finding]:
  by_path = "use load_full_state_path"
  if place.actor:
    message = f"it lies in checkpoints/actor, and pre-training looks in checkpoints/<step>: {by_path}"
    yield Finding("in_actor", "refused", message, (RUN_NAME,))
  elif not place.in_run:
    message = f"it does not lie in <run>/checkpoints/<step>: {by_path}"
    yield Finding("not_in_run", "refused", message, (RUN_NAME,))
  elif not place.newest:
    message = f"pre-training takes the run's newest step, {place.newest_step}: {by_path}"
    yield Finding("not_newest", "refused", message, (RUN_NAME,))


def _below(tree: Any, path: Sequence[str]) -> Any:
  for key in path:
    tree = tree.get(key) if isinstance(tree, Mapping) else None
  return tree


def _path(path: KeyPath) -> str:
  return "/".join(map(str, path))


def _named(tree: Any) -> str:
  keys = [str(key) for key in tree] if isinstance(tree, Mapping) else [f"a list of {len(tree)}"]
  return ", ".join(keys[:_LISTED]) + (", …" if len(keys) > _LISTED else "")


def _some(paths: Sequence[KeyPath]) -> str:
  return ", ".join(map(_path, paths[:_LISTED])) + (", …" if len(paths) > _LISTED else "")
