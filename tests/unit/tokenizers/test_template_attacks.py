"""Hostile templates neither get out of the sandbox nor use up time or memory."""

from __future__ import annotations

import resource
import time

import pytest

from maxtext_posttrain.errors import ChatTemplateError
from maxtext_posttrain.tokenizers.chat_template import ChatTemplate
from maxtext_posttrain.tokenizers.metering import RenderLimits
from tests.support.template_attacks import BOMBS, ESCAPES

LIMITS = RenderLimits(seconds=0.5, characters=2_000_000)
MESSAGES = [{"role": "user", "content": "a" * 100}, {"role": "assistant", "content": "b"}]


@pytest.fixture(scope="module", autouse=True)
def limited_memory():
  """Lets an attack that works fail here, rather than take the machine along."""
  soft, hard = resource.getrlimit(resource.RLIMIT_AS)
  resource.setrlimit(resource.RLIMIT_AS, (64 << 30 if hard == resource.RLIM_INFINITY else hard, hard))
  yield
  resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def render(source: str) -> str:
  return ChatTemplate("hostile", source, LIMITS).render(MESSAGES, {}, None).text


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES.keys())
def test_no_way_out(source):
  try:
    text = render(source)
  except ChatTemplateError:
    text = ""
  # Jinja's sandbox answers some attempts with nothing at all, which is no way out either.
  assert text in ("", "[Undefined]")
  assert MESSAGES == [{"role": "user", "content": "a" * 100}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS.keys())
def test_no_bomb_goes_off(source):
  peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  started = time.process_time()
  with pytest.raises(ChatTemplateError) as caught:
    render(source)
  assert time.process_time() - started < 3
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before < 300_000  # KiB
  assert "\n" not in str(caught.value)


def test_the_error_names_template_line_and_roles():
  with pytest.raises(ChatTemplateError) as caught:
    render("line one\n{{ messages.append(1) }}")
  message = str(caught.value)
  assert "hostile, line 2" in message
  assert "unsafe" in message
  assert "roles: user, assistant" in message
