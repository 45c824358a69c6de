"""A tokenizer of one's own, as small as a demo or a benchmark needs: trained on its texts, written as a folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def train_byte_bpe(
  texts: Iterable[str], *, vocab_size: int, special_tokens: Sequence[str], single_digits: bool = False
) -> Tokenizer:
  """A byte-level BPE: any text has ids, and decodes to itself.

  Args:
    texts: to train on.
    vocab_size: ids in all, the special tokens and the 256 bytes included.
    special_tokens: the first ids, in this order.
    single_digits: each digit stands alone, so that numbers of one length have as many tokens.
  """
  tokenizer = Tokenizer(models.BPE())
  pre_tokenizer: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
  if single_digits:
    digits: Any = pre_tokenizers.Digits(individual_digits=True)
    pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizer])
  tokenizer.pre_tokenizer = pre_tokenizer
  decoder: Any = decoders.ByteLevel()
  tokenizer.decoder = decoder
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=list(special_tokens),
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  return tokenizer


def write_tokenizer_folder(tokenizer: Tokenizer, folder: Path, config: Mapping[str, Any]) -> Path:
  """Writes `tokenizer.json` and `tokenizer_config.json`, which transformers and `tokenizer_type=huggingface` load.

  Args:
    tokenizer: the vocabulary, with how text is cut.
    folder: made where it is missing.
    config: `bos_token`, `eos_token`, `pad_token`, `chat_template` and the like.

  Returns:
    The folder.
  """
  folder.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(folder / "tokenizer.json"))
  whole = {"tokenizer_class": "PreTrainedTokenizerFast", **config, "clean_up_tokenization_spaces": False}
  (folder / "tokenizer_config.json").write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
  return folder
