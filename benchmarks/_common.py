"""What the benchmarks share: chat data and a tokenizer that both sides read, and numbers over repeated runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

VOCAB_SIZE = 8192

_BOS, _EOS, _PAD, _START, _END = "<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"

# ChatML with the assistant's part marked for the loss.
_CHAT_TEMPLATE = (
  "{% for message in messages %}"
  "{% if message['role'] == 'assistant' %}"
  "<|im_start|>assistant\n{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}\n"
  "{% else %}"
  "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
  "{% endif %}"
  "{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_chats(questions: Path, chats: Path) -> None:
  """Writes `question`/`answer` rows (JSONL) as rows of `messages`."""
  with chats.open("w", encoding="utf-8") as output:
    for row in _rows(questions):
      messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
      output.write(json.dumps({"messages": messages}) + "\n")


def write_tokenizer(questions: Path, folder: Path) -> None:
  """Trains a byte-level BPE of `VOCAB_SIZE` on `questions` and writes it as a HuggingFace folder with ChatML."""
  from maxtext_posttrain.tokenizers.own import train_byte_bpe, write_tokenizer_folder

  texts = (text for row in _rows(questions) for text in (row["question"], row["answer"]))
  tokenizer = train_byte_bpe(texts, vocab_size=VOCAB_SIZE, special_tokens=[_PAD, _BOS, _EOS, _START, _END])
  names = {"bos_token": _BOS, "eos_token": _EOS, "pad_token": _PAD}
  write_tokenizer_folder(tokenizer, folder, {**names, "chat_template": _CHAT_TEMPLATE})


def _rows(path: Path) -> Iterator[dict[str, str]]:
  with path.open(encoding="utf-8") as lines:
    for line in lines:
      yield json.loads(line)


@dataclass(frozen=True)
class Spread:
  """The median of repeated measurements, and the smallest and largest of them."""

  median: float
  low: float
  high: float

  @classmethod
  def of(cls, values: Sequence[float]) -> Spread:
    """Of at least one value."""
    return cls(statistics.median(values), min(values), max(values))

  def text(self, decimals: int) -> str:
    """`median [low .. high]`, or the one value that there is."""
    if self.low == self.high:
      return f"{self.median:,.{decimals}f}"
    return f"{self.median:,.{decimals}f} [{self.low:,.{decimals}f} .. {self.high:,.{decimals}f}]"
