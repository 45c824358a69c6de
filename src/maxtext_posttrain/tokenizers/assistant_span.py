"""Finds the assistant's text where a template does not mark it with `{% generation %}`.

For each assistant message the conversation is rendered once more with a probe in that message's place. What comes
before the probe and what comes behind it must be the beginning and the end of the conversation's own text; what lies
between is what the assistant wrote. Two more renderings, of the messages before it with and without the generation
prompt, say which part of the beginning is the prompt, so that what a template opens an answer with (an empty
thinking block, say) counts as the model's to write exactly when it is not part of the generation prompt. The token
that ends the turn is what the template writes after the probe whether or not messages follow, less the white space.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maxtext_posttrain.errors import ChatTemplateError

_PROBE = "8kQz3vWprobeXy6Jm"

# Renders messages, with (True) or without the generation prompt.
Render = Callable[[Sequence[Mapping[str, Any]], bool], str]


def find_assistant_spans(
  name: str, messages: Sequence[Mapping[str, Any]], text: str, render: Render
) -> tuple[tuple[int, int], ...]:
  """Locates each assistant turn in a rendered conversation.

  Args:
    name: the template's, for messages.
    messages: the conversation.
    text: what the template made of it, without a generation prompt.
    render: renders other conversations with the same template and variables.

  Returns:
    Half-open character ranges of `text`, one for each message of role `assistant`, its end-of-turn text included.

  Raises:
    ChatTemplateError: the text around a turn changes with the turn, so that its span cannot be told.
  """
  spans = []
  previous_end = 0
  for index, message in enumerate(messages):
    if message.get("role") != "assistant":
      continue
    span = _find_span(messages, index, text, previous_end, render)
    if span is None:
      raise ChatTemplateError(
        f"chat template {name}: cannot tell which text is the assistant's in message {index}, because the text around "
        "it changes with it; put {% generation %} ... {% endgeneration %} around the assistant's text in the template"
      )
    spans.append(span)
    previous_end = span[1]
  return tuple(spans)


def _find_span(
  messages: Sequence[Mapping[str, Any]], index: int, text: str, previous_end: int, render: Render
) -> tuple[int, int] | None:
  before, message, after = messages[:index], messages[index], messages[index + 1 :]
  probe = {"role": message["role"], "content": _PROBE}
  last = _halves(_try(render, [*before, probe]))
  # A probe is refused where, say, a tool's result follows: then the turn is sought where nothing follows it.
  halves = _halves(_try(render, [*before, probe, *after])) if after else last
  head, tail = halves or last or ("", "")
  if not head + tail:
    return None
  start = _start(head, last[0] if last else None, previous_end, before, render)
  if not text.startswith(head[:start]):
    return None
  if halves and text.endswith(tail) and len(text) - len(tail) >= start:
    closing = _common_start(tail, last[1]) if last else ""
    end = len(text) - len(tail) + len(closing.rstrip())
  else:
    # The turn ends in another way than the probe's (a tool call, say): where the conversation up to it ends.
    upto = _try(render, [*before, message])
    if upto is None or not text.startswith(upto):
      return None
    end = len(upto.rstrip())
  return (start, end) if start < end else None


def _halves(probed: str | None) -> tuple[str, str] | None:
  """The text before and behind the probe; None if it is not there exactly once."""
  if probed is None or probed.count(_PROBE) != 1:
    return None
  head, _, tail = probed.partition(_PROBE)
  return head, tail


def _start(
  head: str, last_head: str | None, previous_end: int, before: Sequence[Mapping[str, Any]], render: Render
) -> int:
  """Where the turn begins in `head`, the text before the probe: behind the generation prompt.

  `last_head` is the text before the probe where no messages follow.
  """
  prompted, bare = _try(render, before, prompt=True), _try(render, before)
  if prompted is None or bare is None or not prompted.startswith(bare):
    return len(head)
  if prompted == bare:
    # The format needs no prompt if only white space comes before the answer; else the template leaves it out.
    lead = last_head[len(bare) :] if last_head is not None and last_head.startswith(bare) else "?"
    return len(head) - (0 if lead.strip() else len(lead))
  if head.startswith(prompted):
    return len(prompted)
  # The messages before are written in another way where messages follow, or the prompt opens the answer with text that
  # only the last turn has: behind the last place that holds the most of the prompt.
  prompt = prompted[len(bare) :]
  for length in range(len(prompt), 0, -1):
    if not prompt[:length].strip():
      break
    found = head.rfind(prompt[:length], previous_end)
    if found >= 0:
      return found + length
  return len(head)


def _common_start(first: str, second: str) -> str:
  length = 0
  for one, other in zip(first, second, strict=False):
    if one != other:
      break
    length += 1
  return first[:length]


def _try(render: Render, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False) -> str | None:
  """Renders a part of a conversation, which the template may refuse though it takes the whole."""
  try:
    return render(messages, prompt)
  except ChatTemplateError:
    return None
