"""Distillation: a student learns the next-token distributions of a teacher with the same vocabulary.

  loss = α · T² · D(teacher, student) + (1 − α) · cross-entropy + β · features

as a mean over the trained tokens of the whole global batch; MaxText calls the three weights `distill_alpha`,
`distill_temperature` and `distill_beta`. `losses/distillation.py` says what D may be. The teacher computes in the same
compiled step, or, with `offline_data_dir`, its most probable tokens come with the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxtext_posttrain import maxtext_api
from maxtext_posttrain.config import Config
from maxtext_posttrain.config.distillation import teacher_layers
from maxtext_posttrain.data import PreparedData
from maxtext_posttrain.data.distillation import prepare_distillation
from maxtext_posttrain.data.teacher_logits import TEACHER_IDS, TEACHER_LOG_PROBS, read_metadata
from maxtext_posttrain.errors import ConfigError
from maxtext_posttrain.losses.distillation import (
  DivergenceName,
  distillation_losses,
  feature_losses,
  scheduled,
  top_k_distillation_losses,
)
from maxtext_posttrain.losses.sft import masked_sum, sft_loss_sum
from maxtext_posttrain.maxtext_api import MaxTextConfig
from maxtext_posttrain.models.layer_selection import check_same_shapes, select_layers
from maxtext_posttrain.models.source import find_items
from maxtext_posttrain.trainers import outputs
from maxtext_posttrain.trainers.objective import Batch, BatchSpec, FrozenModel, LossContext, LossOutput, Objective

TEACHER = "teacher"


class Distillation(Objective):
  """The student is the live model; the teacher a frozen one, or files of what it said."""

  name = "distill"

  def prepare_data(self, config: Config) -> PreparedData:
    """Chats; with `offline_data_dir` the teacher's logits beside them."""
    return prepare_distillation(config)

  def batch_spec(self, config: Config, maxtext: MaxTextConfig, batch: int) -> BatchSpec:
    """As MaxText's; with `offline_data_dir` also the teacher's k most probable tokens of each position."""
    spec = dict(super().batch_spec(config, maxtext, batch))
    if config.offline_data_dir:
      k = read_metadata(config.offline_data_dir).k
      positions = (batch, maxtext.max_target_length)
      spec[TEACHER_IDS] = jax.ShapeDtypeStruct((*positions, k), jnp.int32)
      spec[TEACHER_LOG_PROBS] = jax.ShapeDtypeStruct((*positions, k + 1), jnp.float32)
    return spec

  def frozen_models(self, config: Config, maxtext: MaxTextConfig) -> Mapping[str, FrozenModel]:
    """The teacher, unless its logits come from files."""
    if config.teacher is None:
      return {}
    teacher = teacher_model(config)
    if teacher.maxtext.vocab_size != maxtext.vocab_size:
      raise ConfigError(
        f"vocab_size: the student has {maxtext.vocab_size}, the teacher {teacher.maxtext.vocab_size}: they must have"
        " the same vocabulary"
      )
    return {TEACHER: teacher}

  def init_weights(
    self, model: nnx.Module, frozen: Mapping[str, nnx.Module], config: Config, maxtext: MaxTextConfig
  ) -> None:
    """Gives a fresh student the teacher's layers, where `student_init_from_teacher_layers` asks for it."""
    layers = config.student_init_from_teacher_layers
    if layers is not None and TEACHER in frozen:
      chosen = teacher_layers(layers, config.teacher.base_num_decoder_layers if config.teacher else 0)
      start_from_layers(model, frozen[TEACHER], chosen, scan_axis=maxtext.param_scan_axis)

  def describe_start(self, config: Config) -> str:
    """Fresh weights, or what `student_init_from_teacher_layers` makes of the teacher."""
    layers = config.student_init_from_teacher_layers
    return (
      super().describe_start(config) if layers is None else f"the teacher, student_init_from_teacher_layers={layers}"
    )

  def loss(self, model: nnx.Module, batch: Batch, context: LossContext) -> LossOutput:
    """The mixed loss. Evaluation measures too: the KL from the teacher at T = 1, and how often both agree."""
    config, maxtext, is_train = context.config, context.maxtext, context.is_train
    mask = batch["targets_segmentation"] != 0
    trained = jnp.sum(mask).astype(jnp.float32)
    weights = {name: _scheduled(config, maxtext, name, context.step) for name in _SCHEDULED}
    others: dict[str, jax.Array] = {"targets": batch["targets"]}
    project, teacher_features = None, None
    if TEACHER in context.frozen:
      teacher = context.frozen[TEACHER]
      others["teacher"], project = outputs.unprojected(context.frozen_maxtext[TEACHER], teacher, batch)
      teacher_features = maxtext_api.pop_attention_outputs(teacher)
    else:
      others |= {key: batch[key] for key in (TEACHER_IDS, TEACHER_LOG_PROBS)}
    part = _Part(config, maxtext, weights["alpha"], weights["temperature"], project, evaluate=not is_train)
    loss_sum, means = outputs.logit_sums(maxtext, model, batch, others, part, is_train=is_train)
    features = maxtext_api.pop_attention_outputs(model)
    balance = maxtext_api.pop_load_balance_loss(model)
    if config.distill_beta > 0:
      means["features"] = _compare_features(config, features, teacher_features, mask)
      loss_sum += weights["beta"] * means["features"]
    if is_train:
      changing = [name for name in _SCHEDULED if config[f"distill_{name}_schedule"] != "constant"]
      means |= {f"distill_{name}": weights[name] * trained for name in changing}
      if balance is not None:
        # A mean over layers already: weighted by this micro-batch's tokens, it is a mean over the global batch too.
        loss_sum += balance * trained
    tokens = jnp.sum(batch["inputs_segmentation"] != 0).astype(jnp.float32)
    return LossOutput(loss_sum, totals={"tokens": tokens}, means=means)

  def weight(self, batch: Batch) -> jax.Array:
    """The number of trained tokens."""
    return jnp.sum(batch["targets_segmentation"] != 0)


_SCHEDULED = ("alpha", "temperature", "beta")


def _scheduled(config: Config, maxtext: MaxTextConfig, name: str, step: jax.Array) -> jax.Array:
  key = f"distill_{name}"
  return scheduled(config[key], config[f"{key}_end"], config[f"{key}_schedule"], step, maxtext.steps)


@dataclasses.dataclass(frozen=True)
class _Part:
  """The loss of some positions, and what else is measured there, as sums over those that count.

  Attributes:
    config: of the run.
    maxtext: of the student.
    alpha: the divergence's share.
    temperature: T.
    project: makes the teacher's logits of `others["teacher"]`; None where its likeliest tokens come with the batch.
    evaluate: whether more is measured.
  """

  config: Config
  maxtext: MaxTextConfig
  alpha: jax.Array
  temperature: jax.Array
  project: Callable[[jax.Array], jax.Array] | None
  evaluate: bool

  def __call__(
    self, logits: jax.Array, others: Mapping[str, jax.Array], mask: jax.Array
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Of logits [rows, positions, vocab], the same positions of `others`, and a mask [rows, positions]."""
    teacher = None if self.project is None else self.project(others["teacher"])

    def distance(temperature: jax.Array | float, name: DivergenceName, beta: float = 0.5) -> jax.Array:
      options = {"name": name, "beta": beta, "temperature": temperature}
      if teacher is not None:
        return jnp.sum(distillation_losses(logits, teacher, mask, **options))
      saved = (others[TEACHER_IDS], others[TEACHER_LOG_PROBS])
      return jnp.sum(top_k_distillation_losses(logits, *saved, mask, **options))

    config, targets = self.config, others["targets"]
    distilled = distance(self.temperature, config.distill_divergence, config.distill_jsd_beta)
    # Where the cross-entropy has no weight, it is measured and has no gradient to compute.
    alone = config.distill_alpha == 1.0 and config.distill_alpha_schedule == "constant"
    measured = jax.lax.stop_gradient(logits) if alone else logits
    cross_entropy = sft_loss_sum(measured, targets, mask, z_loss_multiplier=self.maxtext.z_loss_multiplier)
    loss_sum = distilled if alone else self.alpha * distilled + (1.0 - self.alpha) * cross_entropy
    sums = {"distillation": distilled, "cross_entropy": cross_entropy}
    if self.evaluate:
      predicted = jnp.argmax(logits, axis=-1)
      likeliest = others[TEACHER_IDS][..., 0] if teacher is None else jnp.argmax(teacher, axis=-1)
      sums["kl"] = distance(1.0, "forward_kl")
      sums["token_accuracy"] = masked_sum((predicted == targets).astype(jnp.float32), mask)
      sums["teacher_agreement"] = masked_sum((predicted == likeliest).astype(jnp.float32), mask)
      if teacher is not None:
        sums["teacher_cross_entropy"] = sft_loss_sum(teacher, targets, mask)
    return loss_sum, sums


def _compare_features(
  config: Config, student: jax.Array | None, teacher: jax.Array | None, mask: jax.Array
) -> jax.Array:
  """The feature loss summed over trained tokens."""
  if student is None or teacher is None:
    raise ConfigError("distill_beta: this architecture gives no features out; set it to 0")
  chosen = config.distill_layer_indices
  teachers = config.distill_teacher_layer_indices or chosen
  student = student if chosen is None else student[np.asarray(chosen, np.int32)]
  teacher = teacher if teachers is None else teacher[np.asarray(teachers, np.int32)]
  return jnp.sum(feature_losses(student, teacher, mask, config.distill_feature_loss_type))


def teacher_model(config: Config) -> FrozenModel:
  """The teacher of a run, as its configuration describes it.

  Raises:
    ConfigError: MaxText refuses its configuration.
    CheckpointError: there are no weights.
  """
  teacher = config.teacher
  assert teacher is not None
  overrides = teacher.maxtext_overrides()
  items = overrides.pop("load_parameters_path")
  overrides |= {"enable_checkpointing": False, "load_parameters_path": "", "load_full_state_path": ""}
  maxtext = maxtext_api.build_config(overrides, hidden_environment=teacher.environment)
  return FrozenModel(maxtext, items if "://" in items else str(find_items(items)))


def start_from_layers(student: nnx.Module, teacher: nnx.Module, layers: Sequence[int], *, scan_axis: int) -> None:
  """Gives `student` the teacher's parameters, with only some of its layers.

  Raises:
    ModelError: they do not fit.
  """
  given, wanted = (
    {tuple(path): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    for model in (teacher, student)
  )
  selected = select_layers(given, layers, scan_axis=scan_axis)
  check_same_shapes(selected, wanted)
  state = nnx.state(student, nnx.Param)
  for path, variable in nnx.to_flat_state(state):
    before = variable.get_value()
    # A copy: the update gives its own arrays away, and the teacher's must stay.
    copied = jnp.array(selected[tuple(path)], before.dtype, copy=True)
    variable.set_value(jax.device_put(copied, before.sharding))
  nnx.update(student, state)
