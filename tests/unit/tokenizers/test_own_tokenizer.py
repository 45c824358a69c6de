"""Tokenizers that demos and benchmarks make for themselves, as transformers reads them."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from maxtext_posttrain.tokenizers import build_tokenizer
from maxtext_posttrain.tokenizers.own import train_byte_bpe, write_tokenizer_folder

NAMES = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
TEXTS = ["What is 123 + 4?", "The sum is 127."] * 4


def test_a_folder_reads_alike_in_transformers_and_here(tmp_path: Path):
  tokenizer = train_byte_bpe(TEXTS, vocab_size=300, special_tokens=list(NAMES.values()))
  folder = write_tokenizer_folder(tokenizer, tmp_path / "new" / "tokenizer", NAMES)
  theirs, ours = AutoTokenizer.from_pretrained(folder), build_tokenizer(str(folder), "huggingface")
  assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2)
  assert (ours.pad_id, ours.bos_id, ours.eos_id) == (0, 1, 2)
  for text in (*TEXTS, "naïve 🙂 \t\n"):
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    assert ours.decode(ours.encode(text)) == text
  assert len(ours.encode("What is")) < len("What is")


def test_single_digits_stand_alone():
  for single in (False, True):
    tokenizer = train_byte_bpe(["123 123 123"] * 9, vocab_size=300, special_tokens=["<pad>"], single_digits=single)
    tokens = tokenizer.encode("123").tokens
    assert tokens == (["1", "2", "3"] if single else ["123"])
