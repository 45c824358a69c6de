"""The compiler's options are ones it knows, and do what they are for."""

import jax
import jax.numpy as jnp

from maxtext_posttrain.performance import compiler_options


def test_only_matrix_products_go_to_the_library_on_the_cpu():
  def attend(x):
    return jax.nn.softmax(x @ x) @ x

  lowered = jax.jit(attend).lower(jnp.ones((64, 64)))
  mark = '"kind":"__ynn_fusion"'
  assert lowered.compile().as_text().count(mark) == 3
  assert lowered.compile(compiler_options("cpu")).as_text().count(mark) == 2


def test_other_platforms_keep_their_defaults():
  assert compiler_options("tpu") == compiler_options("gpu") == {}
