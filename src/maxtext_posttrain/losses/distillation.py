"""Distillation's losses: how far a student's next-token distributions are from a teacher's, and its features too.

What the named divergences are, with p the teacher and q the student, both softmax(logits / T):

- `forward_kl`: KL(p ‖ q), Hinton et al. 2015 (https://arxiv.org/abs/1503.02531);
- `reverse_kl`: KL(q ‖ p), MiniLLM (https://arxiv.org/abs/2306.08543);
- `jsd`: β KL(p ‖ m) + (1 − β) KL(q ‖ m), m = β p + (1 − β) q, the generalised Jensen-Shannon divergence of GKD
  (https://arxiv.org/abs/2306.13649, equation 1). Divided by β it tends to the forward KL as β → 0, and by 1 − β to the
  reverse KL as β → 1; β exactly 0 or 1 would be 0, and means those two, as in TRL.

A loss multiplies the divergence by T², so that its gradient keeps its size when T changes.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

DivergenceName = Literal["forward_kl", "reverse_kl", "jsd"]
FeatureLossName = Literal["cosine", "l2"]
ScheduleName = Literal["constant", "linear", "cosine"]

_SMALLEST_NORM = 1e-6


def tempered_log_probs(logits: jax.Array, temperature: jax.Array | float) -> jax.Array:
  """log softmax(logits / temperature) over the last axis, float32."""
  return jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, axis=-1)


def kl_divergence(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
  """KL(p ‖ q) over the last axis, in nats; outcomes that p gives no probability to count nothing.

  Args:
    log_p: [..., outcomes] float32 log-probabilities; −inf is none.
    log_q: the same shape.

  Returns:
    [...] float32.
  """
  possible = log_p > -jnp.inf
  difference = jnp.where(possible, log_p, 0.0) - jnp.where(possible, log_q, 0.0)
  return jnp.sum(jnp.exp(log_p) * difference, axis=-1)


def divergence(student: jax.Array, teacher: jax.Array, name: DivergenceName, beta: float = 0.5) -> jax.Array:
  """The named divergence of each position; see the module.

  Args:
    student: [..., outcomes] float32 log-probabilities.
    teacher: the same shape.
    name: which.
    beta: of `jsd`, in [0, 1].

  Returns:
    [...] float32, without the factor T².
  """
  if name == "forward_kl" or (name == "jsd" and beta == 0.0):
    return kl_divergence(teacher, student)
  if name == "reverse_kl" or (name == "jsd" and beta == 1.0):
    return kl_divergence(student, teacher)
  # logaddexp has no gradient where both are −inf; there the mixture is of no use either.
  possible = (student > -jnp.inf) | (teacher > -jnp.inf)
  parts = (jnp.where(possible, each, 0.0) for each in (student + jnp.log1p(-beta), teacher + jnp.log(beta)))
  mixture = jnp.where(possible, jnp.logaddexp(*parts), -jnp.inf)
  return beta * kl_divergence(teacher, mixture) + (1.0 - beta) * kl_divergence(student, mixture)


def distillation_losses(
  student_logits: jax.Array,
  teacher_logits: jax.Array,
  mask: jax.Array,
  *,
  name: DivergenceName,
  beta: float = 0.5,
  temperature: jax.Array | float = 1.0,
) -> jax.Array:
  """T² · divergence of each position; 0, with no gradient, where `mask` is false, whatever stands there.

  Args:
    student_logits: [..., vocab].
    teacher_logits: [..., vocab]; no gradient goes into them.
    mask: [...] bool, true where the target token is trained on.
    name: the divergence.
    beta: of `jsd`.
    temperature: T, above 0.

  Returns:
    [...] float32.
  """
  trained = mask[..., None]
  student = tempered_log_probs(jnp.where(trained, student_logits, 0.0), temperature)
  teacher = tempered_log_probs(jnp.where(trained, jax.lax.stop_gradient(teacher_logits), 0.0), temperature)
  return jnp.where(mask, temperature**2 * divergence(student, teacher, name, beta), 0.0)


def top_k_distillation_losses(
  student_logits: jax.Array,
  teacher_ids: jax.Array,
  teacher_log_probs: jax.Array,
  mask: jax.Array,
  *,
  name: DivergenceName,
  beta: float = 0.5,
  temperature: jax.Array | float = 1.0,
) -> jax.Array:
  """The same from the teacher's k most probable tokens, all other tokens being one outcome, the tail.

  The student's other tokens are gathered into the same outcome. Both distributions over k + 1 outcomes are then
  tempered: q ∝ q^(1/T). With k = vocab this is `distillation_losses`; below that and at T = 1 never more.

  Args:
    student_logits: [..., vocab].
    teacher_ids: [..., k] int32, different ids.
    teacher_log_probs: [..., k + 1] float32 at temperature 1, the tail's last; −inf is none.
    mask: [...] bool, true where the target token is trained on.
    name: the divergence.
    beta: of `jsd`.
    temperature: T, above 0.

  Returns:
    [...] float32.
  """
  trained = mask[..., None]
  ids = jnp.where(trained, teacher_ids, jnp.arange(teacher_ids.shape[-1]))
  student = gather_tail(jnp.where(trained, student_logits, 0.0), ids)
  teacher = jnp.where(trained, jax.lax.stop_gradient(teacher_log_probs), 0.0)
  student = tempered_log_probs(student, temperature)
  teacher = tempered_log_probs(teacher, temperature)
  return jnp.where(mask, temperature**2 * divergence(student, teacher, name, beta), 0.0)


def gather_tail(logits: jax.Array, ids: jax.Array) -> jax.Array:
  """Log-probabilities of some tokens and of all others together.

  Args:
    logits: [..., vocab].
    ids: [..., k] int32, different ids.

  Returns:
    [..., k + 1] float32; the last is log Σ p over the other tokens, −inf where there are none.
  """
  log_probs = tempered_log_probs(logits, 1.0)
  chosen = jnp.take_along_axis(log_probs, ids, axis=-1)
  if ids.shape[-1] == logits.shape[-1]:
    tail = jnp.full((*chosen.shape[:-1], 1), -jnp.inf)
  else:
    others = jnp.put_along_axis(log_probs, ids, -jnp.inf, axis=-1, inplace=False)
    tail = jax.nn.logsumexp(others, axis=-1, keepdims=True)
  return jnp.concatenate([chosen, tail], axis=-1)


def top_k_log_probs(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """The k most probable tokens, and their log-probabilities with the tail's last.

  Args:
    logits: [..., vocab].
    k: how many; at most vocab.

  Returns:
    [..., k] int32 ids by falling probability, and [..., k + 1] float32 log-probabilities at temperature 1.
  """
  ids = jax.lax.top_k(logits.astype(jnp.float32), k)[1].astype(jnp.int32)
  return ids, gather_tail(logits, ids)


def feature_losses(student: jax.Array, teacher: jax.Array, mask: jax.Array, name: FeatureLossName) -> jax.Array:
  """How far features are apart, the mean over layers, at each position; 0, with no gradient, where `mask` is false.

  Args:
    student: [layers, ..., width] of the chosen layers.
    teacher: the same shape; no gradient goes into it.
    mask: [...] bool.
    name: `cosine`: 1 − cos of the angle; `l2`: the mean of the squared differences over the width.

  Returns:
    [...] float32.
  """
  student = jnp.where(mask[..., None], student.astype(jnp.float32), 1.0)
  teacher = jnp.where(mask[..., None], jax.lax.stop_gradient(teacher).astype(jnp.float32), 1.0)
  if name == "l2":
    losses = jnp.mean(jnp.square(student - teacher), axis=-1)
  else:
    norms = [
      jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(each), axis=-1), _SMALLEST_NORM**2)) for each in (student, teacher)
    ]
    losses = 1.0 - jnp.sum(student * teacher, axis=-1) / (norms[0] * norms[1])
  return jnp.where(mask, jnp.mean(losses, axis=0), 0.0)


def scheduled(start: float, end: float | None, name: ScheduleName, step: jax.Array, steps: int) -> jax.Array:
  """A value that goes from `start` to `end` over a run.

  Args:
    start: at step 0.
    end: at `steps` and after; None is `start`.
    name: `constant` stays at `start`; `linear`; `cosine` leaves and arrives slowly, as half a period.
    step: updates made before this one, a scalar.
    steps: of the whole run, above 0.

  Returns:
    A float32 scalar.
  """
  if end is None or name == "constant":
    return jnp.float32(start)
  progress = jnp.clip(step.astype(jnp.float32) / steps, 0.0, 1.0)
  if name == "cosine":
    progress = 0.5 * (1.0 - jnp.cos(jnp.pi * progress))
  return jnp.float32(start) + (jnp.float32(end) - jnp.float32(start)) * progress
