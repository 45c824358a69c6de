"""Every trainer reads what every other wrote, and pre-training reads it all: `make handback-matrix` prints the table.

Each writer makes a checkpoint of the same tiny model, each reader is started on it for real and trains on for a step.
What a reader held before its first step is compared with what lies on disk, leaf by leaf; where pre-training reads, its
first loss is the one computed from the writer's state in memory.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from maxtext_posttrain.cli import main
from maxtext_posttrain.config import load_config
from maxtext_posttrain.handback import pretraining_arguments
from maxtext_posttrain.trainers.base import Session
from maxtext_posttrain.trainers.distillation import Distillation
from maxtext_posttrain.trainers.dpo import DPO
from maxtext_posttrain.trainers.grpo import GRPO
from maxtext_posttrain.trainers.objective import Objective
from maxtext_posttrain.trainers.sft import SFT
from maxtext_posttrain.trainers.signals import StopRequest
from tests.conftest import REPOSITORY
from tests.support import runs

pytestmark = pytest.mark.slow

STEPS = 2
LAYOUTS = {"scanned": True, "unscanned": False}
WRITERS = ("pre-training", "SFT", "SFT with LoRA, merged", "DPO", "ORPO", "GRPO", "distillation", "imported")
PRETRAINING = {
  "pre-training by run_name": "run_name",
  "pre-training by load_full_state_path": "load_full_state_path",
  "pre-training by load_parameters_path": "load_parameters_path",
}
TRAINERS = ("SFT", "DPO", "GRPO", "distillation as student", "distillation as teacher")
READERS = (*PRETRAINING, *TRAINERS)

Tree = dict[tuple, np.ndarray]

DATA = REPOSITORY / "configs" / "data"
CHATS = DATA / "quickstart_chat.jsonl"
# Two prompts with two completions each are two updates; the reference is held.
GRPO_KEYS = (
  "max_prefill_predict_length=24",
  "max_target_length=32",
  "batch_size=2",
  "rl.num_generations=2",
  "rl.grpo_beta=0.1",
  "reward_weights={finished: 1.0, overlong: 1.0}",
)
MODEL = (
  "tokenizer_type=sentencepiece",
  "tokenizer_path=maxtext://tokenizers/tokenizer.llama2",
  "chat_template=llama2",
  "base_emb_dim=32",
  "base_mlp_dim=64",
  "max_target_length=64",
  "per_device_batch_size=2",
  "learning_rate=1e-2",
  "enable_tensorboard=false",
  "checkpoint_period=100",
  "learning_rate_schedule_steps=20",
)


@dataclasses.dataclass(frozen=True)
class Written:
  """A writer's checkpoint.

  Attributes:
    folder: the step's.
    tree: what its `items` hold.
    step: updates made.
    whole: it has an optimizer, not the weights alone.
    loss: of pre-training's first step on it, from memory. None where nothing of it is in memory.
  """

  folder: Path
  tree: Tree
  step: int
  whole: bool
  loss: float | None


class Bench:
  """The folder of one layout, and how things are run in it."""

  def __init__(self, folder: Path, scanned: bool):
    self.folder = folder
    self.scanned = scanned
    self.config = folder / "model.yml"
    lines = ["base_config: [models/tiny.yml]", *(key.replace("=", ": ", 1) for key in MODEL)]
    lines += [f"scan_layers: {json.dumps(scanned)}", f"base_output_directory: {folder}"]
    self.config.write_text("\n".join(lines) + "\n", encoding="utf-8")
    self.pairs = folder / "pairs.jsonl"
    rows = [{"prompt": f"{a} + {a}?", "chosen": f"It is {2 * a}.", "rejected": f"It is {a} {a}."} for a in range(8)]
    self.pairs.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

  def argv(self, trainer: str, name: str, *keys: str) -> list[str]:
    """The command line of a trainer, without its name."""
    path = self.folder / f"tiny_{trainer}.yml"
    if not path.exists():
      base = "distillation.yml" if trainer == "distill" else f"{trainer}.yml"
      path.write_text(f"base_config: [{base}, {self.config}]\n", encoding="utf-8")
    files = {"dpo": self.pairs, "grpo": DATA / "sums.jsonl"}
    data = [f"hf_train_files={files.get(trainer, CHATS)}", *(GRPO_KEYS if trainer == "grpo" else ())]
    steps = [] if any(key.startswith("steps=") for key in keys) else [f"steps={STEPS}"]
    return [str(path), f"run_name={name}", *steps, *data, *keys]

  def train(self, objective: Objective, trainer: str, name: str, *keys: str) -> ReadingSession:
    """A finished run of a trainer in this process."""
    session = ReadingSession(objective, load_config(self.argv(trainer, name, *keys), trainer=trainer))
    assert session.train(StopRequest()) == 0
    return session

  def pretraining_argv(self, name: str, *, way: str, source: str, step: int, steps: int, role: str = "") -> list[str]:
    """Real pre-training's arguments for going on from a run's step."""
    overrides = load_config(self.argv("sft", source)).maxtext_overrides()
    argv = pretraining_arguments(
      overrides, way=way, run_name=source, step=step, steps=steps, new_run_name=name, role=role
    )
    return [*argv, "dataset_type=synthetic", f"metrics_file={self.folder / f'{name}.jsonl'}"]

  def pretrain(self, argv: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Tree, dict[int, float]]:
    """Runs real pre-training in this process: the state its own set-up gave it, and loss by step."""
    from maxtext.trainers.pre_train import train
    from maxtext.utils import train_utils

    started: list[Tree] = []
    set_up = train_utils.setup_train_loop

    def noting(*args: Any, **kwargs: Any) -> Any:
      result = set_up(*args, **kwargs)
      started.append(runs.checkpoint_arrays(nnx.state(result[-1], nnx.Not(nnx.Intermediate))))
      return result

    with monkeypatch.context() as patch:
      patch.setattr(train_utils, "setup_train_loop", noting)
      train.main(["train.py", *argv])
    path = Path(next(key for key in argv if key.startswith("metrics_file=")).partition("=")[2])
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return started[0], {int(record["step"]): record["learning/loss"] for record in records}


class ReadingSession(Session):
  """A run that remembers what it held before its first step."""

  read: Tree

  def _build_trainer(self) -> Any:
    built = super()._build_trainer()
    self.read = runs.checkpoint_arrays(runs.live_state(built[0]))
    return built

  def first_pretraining_loss(self, bench: Bench, name: str) -> float:
    """The loss of pre-training's own first step on what this run holds in memory."""
    argv = bench.pretraining_argv(f"{name}-memory", way="run_name", source=name, step=STEPS, steps=STEPS + 2)
    return runs.first_pretraining_step(self, argv)[0]


def parameters(tree: Tree) -> Tree:
  """The weights of `items`, by their path in the model."""
  return {tuple(map(str, path[2:])): leaf for path, leaf in tree.items() if path[0] == "params"}


def frozen_parameters(session: Session, name: str) -> Tree:
  """The weights of a frozen model of a run."""
  state = nnx.filter_state(session.trainer._frozen[name], nnx.Param)
  return {tuple(map(str, path)): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(state)}


def write(bench: Bench, writer: str, monkeypatch: pytest.MonkeyPatch, written: dict[str, Written]) -> Written:
  """Makes a writer's checkpoint."""
  if writer == "pre-training":
    argv = bench.pretraining_argv("pretrained", way="run_name", source="pretrained", step=0, steps=STEPS)
    bench.pretrain(argv, monkeypatch)
    # Its folder is named one less than the step inside. Uninterrupted it would have gone on with this loss.
    longer = bench.pretraining_argv("longer", way="run_name", source="longer", step=0, steps=STEPS + 1)
    loss = bench.pretrain(longer, monkeypatch)[1][STEPS]
    return whole(bench.folder / "pretrained" / "checkpoints" / str(STEPS - 1), loss)
  if writer == "imported":
    source = written["SFT"]
    assert main(["export", str(source.folder), str(bench.folder / "hf")]) == 0
    scanned = [] if bench.scanned else ["--unscanned"]
    assert main(["import", str(bench.folder / "hf"), str(bench.folder / "imported"), *scanned]) == 0
    return weights(bench, "imported", bench.folder / "imported" / "0", source.loss)
  start = f"load_parameters_path={written['pre-training'].folder}/items" if "pre-training" in written else ""
  if writer == "SFT with LoRA, merged":
    keys = ["lora.enable_lora=true", "lora.lora_rank=4", "lora.lora_alpha=8", start]
    bench.train(SFT(), "sft", "lora", *keys)
    assert main(["merge", str(bench.folder / "lora"), str(bench.folder / "merged")]) == 0
    return weights(bench, "merged", next((bench.folder / "merged").glob("*/items")).parent, None)
  objective, trainer, keys = {
    "SFT": (SFT(), "sft", []),
    "DPO": (DPO(), "dpo", [start]),
    "ORPO": (DPO(), "dpo", [start, "dpo.algo=orpo"]),
    "GRPO": (GRPO(), "grpo", [start]),
    "distillation": (Distillation(), "distill", [start, *teacher(written["pre-training"].folder)]),
  }[writer]
  session = bench.train(objective, trainer, writer, *keys)
  steps = bench.folder / writer / "checkpoints" / objective.checkpoint_role
  return whole(steps / str(STEPS), session.first_pretraining_loss(bench, writer))


def teacher(folder: Path) -> list[str]:
  """The keys that name a teacher of the run's own shape."""
  return [f"teacher_overrides.load_parameters_path={folder}/items"]


def whole(folder: Path, loss: float) -> Written:
  return Written(folder, runs.items(folder), STEPS, True, loss)


def weights(bench: Bench, name: str, source: Path, loss: float | None) -> Written:
  """A checkpoint of weights alone, put where a run's own would lie so that every way is tried on it."""
  folder = bench.folder / f"{name}-run" / "checkpoints" / str(STEPS)
  shutil.copytree(source, folder)
  return Written(folder, runs.items(folder), STEPS, False, loss)


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(
  request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Bench, dict[str, Written]]:
  """Every writer's checkpoint in one layout."""
  bench = Bench(tmp_path_factory.mktemp(request.param), LAYOUTS[request.param])
  written: dict[str, Written] = {}
  with pytest.MonkeyPatch.context() as monkeypatch:
    for writer in WRITERS:
      written[writer] = write(bench, writer, monkeypatch, written)
  return bench, written


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_pair(
  layout: tuple[Bench, dict[str, Written]],
  writer: str,
  reader: str,
  monkeypatch: pytest.MonkeyPatch,
  handback_table: Callable[[str, str, str, str], None],
):
  bench, written = layout
  checkpoint = written[writer]
  name = f"{reader.split()[-1]} of {writer}".replace(" ", "-").replace(",", "")
  if reader in PRETRAINING:
    outcome = read_by_pretraining(bench, checkpoint, PRETRAINING[reader], name, monkeypatch)
  else:
    outcome = read_by_trainer(bench, checkpoint, reader, name)
  handback_table("scanned" if bench.scanned else "unscanned", writer, reader, outcome)


def read_by_pretraining(bench: Bench, checkpoint: Written, way: str, name: str, monkeypatch: pytest.MonkeyPatch) -> str:
  """Real pre-training goes on from a checkpoint in one of its ways; what it read, in a word."""
  run, _, *roles = checkpoint.folder.parent.relative_to(bench.folder).parts
  if way == "run_name":
    # Each reader has the folder to itself. By name pre-training finds no `actor`: its steps are laid where it looks.
    shutil.copytree(checkpoint.folder.parent, bench.folder / name / "checkpoints")
    run, roles = name, []
  step = int(checkpoint.folder.name)
  first = 0 if way == "load_parameters_path" else checkpoint.step
  role = "".join(f"{part}/" for part in roles)
  argv = bench.pretraining_argv(name, way=way, source=run, step=step, steps=first + 2, role=role)
  read, losses = bench.pretrain(argv, monkeypatch)
  if checkpoint.whole and way != "load_parameters_path":
    runs.assert_same_items(read, checkpoint.tree)
    outcome = "everything"
  else:
    # Of weights alone pre-training takes the weights, whichever way it is told of them, and starts the rest anew.
    runs.assert_same_items(parameters(read), parameters(checkpoint.tree))
    assert read[("step",)] == 0
    first, outcome = 0, "weights"
  assert min(losses) == first
  if checkpoint.loss is not None:
    assert losses[first] == checkpoint.loss
  return outcome


def read_by_trainer(bench: Bench, checkpoint: Written, reader: str, name: str) -> str:
  """One of our trainers starts from a checkpoint and makes a step; what it read, in a word."""
  items = f"{checkpoint.folder}/items"
  if reader == "distillation as teacher":
    session = bench.train(Distillation(), "distill", name, "steps=1", *teacher(checkpoint.folder))
    runs.assert_same_items(frozen_parameters(session, "teacher"), parameters(checkpoint.tree))
    return "weights"
  way, steps = ("load_full_state_path", STEPS + 1) if checkpoint.whole else ("load_parameters_path", 1)
  keys = [f"{way}={items}", f"steps={steps}"]
  objective, trainer, more = {
    "SFT": (SFT(), "sft", []),
    "DPO": (DPO(), "dpo", []),
    "GRPO": (GRPO(), "grpo", []),
    "distillation as student": (Distillation(), "distill", teacher(checkpoint.folder)),
  }[reader]
  session = bench.train(objective, trainer, name, *keys, *more)
  assert session.trainer.train_steps == steps
  if reader in ("DPO", "GRPO"):
    runs.assert_same_items(frozen_parameters(session, "reference"), parameters(checkpoint.tree))
  if checkpoint.whole:
    runs.assert_same_items(session.read, checkpoint.tree)
    return "everything"
  runs.assert_same_items(parameters(session.read), parameters(checkpoint.tree))
  return "weights"
