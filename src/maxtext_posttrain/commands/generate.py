"""`posttrain generate`: completions of prompts, or a chat in the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from maxtext_posttrain.commands.arguments import ModelArgumentParser
from maxtext_posttrain.errors import ConfigError, GenerationError
from maxtext_posttrain.rollout.options import SamplingOptions

if TYPE_CHECKING:
  from maxtext_posttrain.models.loading import LoadedModel

_DESCRIPTION = """\
Completes each --prompt with a model, by default greedily; without --prompt, a chat: a line is the user's turn, the end
of input or /quit ends it, /reset begins a new conversation.
"""


def run(arguments: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  options = _parse(arguments)
  sampling = _sampling(options)

  from maxtext_posttrain.logs import quiet_imports

  with quiet_imports(show=options.debug):
    from maxtext_posttrain.models.loading import load_model
    from maxtext_posttrain.models.source import find_source
  loaded = load_model(find_source(options.path, options.config), options.overrides)
  session = _Session(loaded, options, sampling)
  if options.prompt:
    session.complete(options.prompt)
  else:
    session.chat(sys.stdin)
  return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
  parser = ModelArgumentParser("generate", _DESCRIPTION, others="prompts with --prompt")
  parser.add_argument("--prompt", action="append", metavar="TEXT", help="what to complete; may be repeated")
  parser.add_argument("--system", metavar="TEXT", help="the system's message, before each prompt")
  parser.add_argument("--raw", action="store_true", help="complete the prompt as it stands, without the chat template")
  parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="at most (default 128)")
  parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (the default) is greedy")
  parser.add_argument("--top-k", type=int, default=0, metavar="K", help="only the K most probable (default 0: all)")
  parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="only the nucleus of P (default 1: all)")
  parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the samples (default 0)")
  parser.add_argument("--samples", type=int, default=1, metavar="N", help="completions of each prompt (default 1)")
  parser.add_argument("--stop", action="append", default=[], metavar="TOKEN", help="end at this token too; repeatable")
  parser.add_argument("--json", action="store_true", help="print a line of JSON for each completion, ids and all")
  options = parser.parse(arguments)
  for text, name in ((options.prompt, "--prompt"), (options.stop, "--stop")):
    if text and not all(text):
      parser.error(f"{name} is empty")
  if options.raw and options.system is not None:
    parser.error("--system is a turn of a chat, which --raw leaves out; put it into the prompt")
  if options.raw and not options.prompt:
    parser.error("--raw needs --prompt: a chat goes through the chat template")
  if not options.prompt and (options.json or options.samples != 1):
    parser.error("--json and --samples need --prompt")
  return options


def _sampling(options: argparse.Namespace) -> SamplingOptions:
  try:
    return SamplingOptions(
      max_new_tokens=options.max_new_tokens,
      temperature=options.temperature,
      top_k=options.top_k,
      top_p=options.top_p,
      seed=options.seed,
      n=options.samples,
    )
  except GenerationError as error:
    raise ConfigError(f"posttrain generate: {error}") from error


class _Session:
  """A loaded model and what was asked of it."""

  def __init__(self, loaded: LoadedModel, options: argparse.Namespace, sampling: SamplingOptions):
    from maxtext_posttrain.rollout.chat import ChatModel

    self._options = options
    self._sampling = sampling
    self._model = ChatModel(loaded, raw=options.raw, stops=options.stop)

  def complete(self, texts: Sequence[str]) -> None:
    """Prints the completions of each text, under a heading where there are several."""
    answers = self._model.answer(texts, self._sampling, system=self._options.system)
    samples = self._sampling.n
    for number, answer in enumerate(answers):
      prompt, sample = divmod(number, samples)
      if self._options.json:
        completion = answer.completion
        ids = {"token_ids": completion.token_ids, "log_probs": completion.log_probs}
        fields = {"prompt": texts[prompt], "sample": sample, "completion": answer.text, **ids}
        print(json.dumps({**fields, "finish_reason": completion.finish_reason}, ensure_ascii=False))
        continue
      if len(answers) > 1:
        print(f"--- prompt {prompt + 1} of {len(texts)}" + (f", sample {sample + 1}" if samples > 1 else ""))
      print(answer.text, flush=True)

  def chat(self, lines: Iterable[str]) -> None:
    """Answers the lines one by one, each after all that was said before it."""
    from maxtext_posttrain.rollout.text import turn

    system = [] if self._options.system is None else [turn("system", self._options.system)]
    messages = [*system]
    self._ask()
    for line in lines:
      text = line.strip()
      if text == "/quit":
        return
      if text == "/reset":
        messages = [*system]
      elif text:
        messages.append(turn("user", text))
        answer = self._model.reply(messages, self._sampling)
        messages.append(turn("assistant", answer.text))
        print(answer.text, flush=True)
      self._ask()

  def _ask(self) -> None:
    if sys.stdin.isatty():
      print("> ", end="", file=sys.stderr, flush=True)
