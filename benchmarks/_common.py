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
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

  special = [_PAD, _BOS, _EOS, _START, _END]
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=VOCAB_SIZE,
    special_tokens=special,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  texts = (text for row in _rows(questions) for text in (row["question"], row["answer"]))
  tokenizer.train_from_iterator(texts, trainer)
  folder.mkdir(parents=True)
  tokenizer.save(str(folder / "tokenizer.json"))
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": _BOS,
    "eos_token": _EOS,
    "pad_token": _PAD,
    "chat_template": _CHAT_TEMPLATE,
    "clean_up_tokenization_spaces": False,
  }
  (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


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
