"""Preference pairs as tokens, cut to length, and as rows of two halves."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from data_fakes import ASSISTANT, BOS, END, USER, VOCAB_SIZE, CharTokenizer, make_config, write_jsonl

from maxtext_posttrain.data import BATCH_KEYS, prepare_preferences
from maxtext_posttrain.data.options import PAIR_COLUMNS, DataOptions
from maxtext_posttrain.data.pairs import (
  DEFAULT_PAIRS_PER_ROW,
  TokenPair,
  pairs_per_row,
  tokenize_pair,
  tokenize_pairs,
  truncate_pair,
)
from maxtext_posttrain.data.pipeline import prepare_pair_rows
from maxtext_posttrain.data.records import Location, Row
from maxtext_posttrain.errors import ConfigError, DataError
from maxtext_posttrain.tokenizers import build_tokenizer

PAD = 9
A, B, C, D, Q, R = (ord(letter) for letter in "abcdqr")
TWO_PAIRS = [
  {"prompt": "q", "chosen": "a", "rejected": "bcd"},
  {"prompt": "qr", "chosen": "ab", "rejected": "c"},
]


def row(value) -> Row:
  return Row(Location("here", "row", 1), value)


def config(path="", **changes):
  columns = {"train_data_columns": ["prompt", "chosen", "rejected"], "eval_data_columns": []}
  return make_config(hf_train_files=str(path), **(columns | changes))


def options(**changes) -> DataOptions:
  return DataOptions.from_config(config("rows.jsonl", **changes), column_rule=PAIR_COLUMNS)


def prepared(tmp_path, rows, tokenizer=None, **changes):
  settings = config(write_jsonl(tmp_path / "pairs.jsonl", rows), **changes)
  return prepare_pair_rows(
    DataOptions.from_config(settings, column_rule=PAIR_COLUMNS), tokenizer or CharTokenizer(pad_id=PAD), settings
  )


def test_a_pair_by_hand():
  pair = tokenize_pair(row(TWO_PAIRS[0]), options(), CharTokenizer())
  assert pair.prompt == [BOS, USER, Q, END, ASSISTANT]
  assert pair.chosen == ([A, END], [True, True])
  assert pair.rejected == ([B, C, D, END], [True] * 4)


def test_earlier_answers_in_the_prompt_do_not_count():
  turns = [("user", "q"), ("assistant", "a"), ("user", "r")]
  prompt = [{"role": role, "content": text} for role, text in turns]
  pair = tokenize_pair(row({"prompt": prompt, "chosen": "b", "rejected": "c"}), options(), CharTokenizer())
  assert pair.prompt == [BOS, USER, Q, END, ASSISTANT, A, END, USER, R, END, ASSISTANT]
  assert pair.chosen == ([B, END], [True, True])


def test_what_both_completions_begin_with_counts_in_both():
  pair = tokenize_pair(row({"prompt": "q", "chosen": "ab", "rejected": "ac"}), options(), CharTokenizer())
  assert pair.prompt[-1] == ASSISTANT
  assert pair.chosen == ([A, B, END], [True] * 3)
  assert pair.rejected == ([A, C, END], [True] * 3)


class Rendered(NamedTuple):
  input_ids: list[int]
  assistant_mask: list[bool]


class TrailingTokenizer(CharTokenizer):
  """Its template ends with a line break; the generation prompt's last token merges with an answer that begins so."""

  def render_conversation(self, messages, tools=None, documents=None):
    ids, mask = super().render_conversation(messages, tools, documents)
    merged = ids.index(A) if A in ids else None
    if merged is not None:
      ids, mask = [*ids[: merged - 1], 100, *ids[merged + 1 :]], [*mask[: merged - 1], True, *mask[merged + 1 :]]
    return Rendered([*ids, 10], [*mask, False])

  def apply_chat_template(self, messages, add_generation_prompt=False, tools=None, documents=None):
    return [*CharTokenizer.render_conversation(self, messages).input_ids, ASSISTANT]


def test_a_token_that_spans_prompt_and_completion_belongs_to_the_completion():
  pair = tokenize_pair(row({"prompt": "q", "chosen": "ab", "rejected": "cd"}), options(), TrailingTokenizer())
  assert pair.prompt == [BOS, USER, Q, END]
  assert pair.chosen == ([100, B, END], [True, True, True])
  # Of the other completion that token is the prompt's still, and not trained. What stands behind its end is left out.
  assert pair.rejected == ([ASSISTANT, C, D, END], [False, True, True, True])


@pytest.mark.parametrize("template", ["llama2", "llama3", "chatml", "gemma", "mistral", "plain"])
def test_with_every_template_the_halves_are_what_sft_sees(template):
  """Prompt and completion together are the ids SFT trains on, and the mask is SFT's last assistant turn."""
  tokenizer = build_tokenizer("maxtext://tokenizers/tokenizer.llama2", "sentencepiece", chat_template=template)
  turns = [("user", "Where is\nParis?"), ("assistant", "In France."), ("user", "And Rome?")]
  prompt = [{"role": role, "content": text} for role, text in turns]
  value = {"prompt": prompt, "chosen": "In Italy, of course.", "rejected": "In France, too."}
  pair = tokenize_pair(row(value), options(vocab_size=32000), tokenizer)
  for ids, mask in ((pair.chosen), (pair.rejected)):
    text = value["chosen"] if ids is pair.chosen[0] else value["rejected"]
    rendered = tokenizer.render_conversation([*prompt, {"role": "assistant", "content": text}])
    whole = pair.prompt + ids
    assert whole == rendered.input_ids[: len(whole)]
    assert not any(rendered.assistant_mask[len(whole) :])
    assert mask == rendered.assistant_mask[len(pair.prompt) : len(whole)]
    assert (
      tokenizer.decode([token for token, trained in zip(ids, mask, strict=True) if trained]).lstrip().startswith(text)
    )
    assert mask[-1]


def make_pair(prompt: int, chosen: int, rejected: int) -> TokenPair:
  sequence = lambda length, start: (list(range(start, start + length)), [True] * length)  # noqa: E731
  return TokenPair(list(range(prompt)), sequence(chosen, 1000), sequence(rejected, 2000))


@pytest.mark.parametrize(
  ("lengths", "max_length", "max_prompt", "expected"),
  [
    ((5, 3, 4), 9, None, (5, 3, 4)),  # fits
    ((6, 3, 4), 9, None, (5, 3, 4)),  # the prompt gives way
    ((20, 3, 8), 9, None, (1, 3, 8)),  # to its last token
    ((20, 3, 9), 9, None, (4, 3, 5)),  # a completion that fits behind no prompt: half is the prompt's
    ((2, 3, 20), 9, None, (2, 3, 7)),  # or less where it has less
    ((5, 3, 4), 90, 2, (2, 3, 4)),  # never longer than max_prompt_length
    ((20, 3, 30), 9, 6, (6, 3, 3)),
    ((20, 30, 30), 9, 60, (8, 1, 1)),
    ((20, 30, 1), 2, None, (1, 1, 1)),
  ],
)
def test_what_is_cut(lengths, max_length, max_prompt, expected):
  whole = make_pair(*lengths)
  kept = truncate_pair(whole, max_length, max_prompt)
  assert (len(kept.prompt), len(kept.chosen[0]), len(kept.rejected[0])) == expected
  assert (kept is whole) == (lengths == expected)
  assert kept.prompt == whole.prompt[len(whole.prompt) - expected[0] :]
  for half, before in ((kept.chosen, whole.chosen), (kept.rejected, whole.rejected)):
    assert half == (before[0][: len(half[0])], before[1][: len(half[0])])


def test_the_unpacked_layout_by_hand(tmp_path):
  rows = prepared(tmp_path, TWO_PAIRS, max_target_length=9)
  batch = rows.source.assemble([0, 1])
  assert batch["inputs"][0].tolist() == [
    [BOS, USER, Q, END, ASSISTANT, A, PAD, PAD, PAD],
    [BOS, USER, Q, END, ASSISTANT, B, C, D, PAD],
  ]
  assert batch["targets"][0].tolist() == [
    [USER, Q, END, ASSISTANT, A, END, PAD, PAD, PAD],
    [USER, Q, END, ASSISTANT, B, C, D, END, PAD],
  ]
  assert batch["targets_segmentation"][0].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1, 0]]
  assert batch["inputs_segmentation"][0].tolist() == [[1] * 6 + [0] * 3, [1] * 8 + [0]]
  assert tuple(batch) == BATCH_KEYS
  for values in batch.values():
    assert values.shape == (2, 2, 9)
    assert values.dtype == np.int32


def test_the_packed_layout_by_hand(tmp_path):
  rows = prepared(tmp_path, TWO_PAIRS, max_target_length=17, packing=True)
  (row_count,) = {len(rows.source)}
  assert row_count == 1
  batch = rows.source.assemble([0])
  # The second pair begins where the longer half of the first ends, in both halves.
  assert batch["inputs_segmentation"][0].tolist() == [
    [1] * 6 + [0] * 2 + [2] * 8 + [0],
    [1] * 8 + [2] * 7 + [0] * 2,
  ]
  assert batch["inputs_position"][0, 0].tolist() == [*range(6), 0, 0, *range(8), 0]
  assert batch["inputs"][0, 1, 8:15].tolist() == [BOS, USER, Q, R, END, ASSISTANT, C]
  assert batch["targets_segmentation"][0, 0].tolist() == [0] * 4 + [1] * 2 + [0] * 7 + [2] * 3 + [0]


def test_padding_rows_hold_nothing(tmp_path):
  source = prepared(tmp_path, TWO_PAIRS, max_target_length=9).source
  batch = source.assemble([1, -1])
  assert not any(batch[key][1].any() for key in BATCH_KEYS if key not in ("inputs", "targets"))
  np.testing.assert_array_equal(batch["inputs"][0], source.assemble([1])["inputs"][0])


def test_packing_loses_no_pair_and_keeps_the_limit(tmp_path):
  rng = np.random.default_rng(0)
  text = lambda: "".join(rng.choice(list("abcd"), size=rng.integers(1, 20)))  # noqa: E731
  rows = [{"prompt": "q" * int(rng.integers(1, 9)), "chosen": f"{text()}x", "rejected": text()} for _ in range(60)]
  packed = prepared(tmp_path, rows, max_target_length=100, packing=True, max_segments_per_seq=3)
  alone = prepared(tmp_path, rows, max_target_length=100)
  assert len(packed.source) < len(alone.source) == 60
  assert packed.report.padding_share < alone.report.padding_share

  def completions(source):
    found = []
    for number in range(len(source)):
      batch = source.assemble([number])
      segments = batch["targets_segmentation"][0]
      assert segments.max() <= 3
      for segment in range(1, segments.max() + 1):
        found.append(tuple(tuple(batch["targets"][0, half][segments[half] == segment]) for half in (0, 1)))
    return sorted(found)

  assert completions(packed.source) == completions(alone.source)


def test_the_report_counts_pairs_cuts_and_bad_rows(tmp_path):
  rows = [
    *TWO_PAIRS,
    {"prompt": "q" * 50, "chosen": "a", "rejected": "b"},
    {"prompt": "q", "chosen": "", "rejected": "b"},
    {"prompt": "q", "chosen": "a", "rejected": "a"},
    "not JSON",
    {"prompt": [{"role": "system", "content": "s"}], "chosen": "a", "rejected": "b"},
    # Equal as far as they fit.
    {"prompt": "q", "chosen": "a" * 20 + "b", "rejected": "a" * 20 + "c"},
  ]
  report = prepared(tmp_path, rows, max_target_length=12, max_bad_rows=5).report
  assert (report.rows_read, report.examples, report.truncated) == (8, 3, 1)
  assert {reason: bad.count for reason, bad in report.bad_rows.items()} == {
    "empty completion": 1,
    "chosen and rejected are equal": 2,
    "not valid JSON": 1,
    "refused by the chat template": 1,
  }
  assert report.trained_tokens == (2 + 4) + (3 + 2) + (2 + 2)


def test_more_bad_rows_than_allowed_stop(tmp_path):
  rows = [*TWO_PAIRS, {"prompt": "q", "chosen": "a", "rejected": "a"}]
  with pytest.raises(DataError, match=r"1 of 3 rows cannot be used .*line 3: chosen and rejected are equal"):
    prepared(tmp_path, rows)


def test_nothing_usable_stops(tmp_path):
  with pytest.raises(DataError, match="none of 1 rows can be used"):
    prepared(tmp_path, [{"prompt": "q", "chosen": "", "rejected": ""}], max_bad_rows=5)


def test_missing_columns_are_named(tmp_path):
  with pytest.raises(DataError, match=r"no column 'prompt'.*set train_data_columns=\[\"chosen\", \"rejected\"\]"):
    prepared(tmp_path, [{"chosen": [], "rejected": []}])


def test_ids_outside_the_vocabulary_are_an_error():
  with pytest.raises(DataError, match=f"token id {ord('q')} .*vocab_size=64"):
    tokenize_pairs([row(TWO_PAIRS[0])], options(vocab_size=64), CharTokenizer(), None)


def test_synthetic_pairs_are_refused():
  with pytest.raises(ConfigError, match="can't be made up"):
    prepare_preferences(config(dataset_type="synthetic"))


@pytest.mark.parametrize("columns", [["prompt"], ["chosen", "chosen"], ["a", "b", "c", "d"]])
def test_wrong_numbers_of_columns_are_refused(columns):
  with pytest.raises(ConfigError, match="train_data_columns"):
    options(train_data_columns=columns)


def test_most_pairs_of_a_row():
  assert pairs_per_row(config()) == 1
  assert pairs_per_row(config(packing=True)) == DEFAULT_PAIRS_PER_ROW
  assert pairs_per_row(config(packing=True, max_segments_per_seq=5)) == 5


def test_fingerprints_tell_pairs_lengths_and_packing_apart(tmp_path):
  base = {"max_target_length": 40}
  sources = [
    prepared(tmp_path, TWO_PAIRS, **base),
    prepared(tmp_path, TWO_PAIRS, **base, packing=True),
    prepared(tmp_path, TWO_PAIRS, max_target_length=41),
    prepared(tmp_path, TWO_PAIRS[::-1], **base),
    prepared(tmp_path, TWO_PAIRS, CharTokenizer(pad_id=8), **base),
  ]
  assert len({rows.source.fingerprint() for rows in sources}) == len(sources)
  again = prepared(tmp_path, TWO_PAIRS, **base)
  assert again.source.fingerprint() == sources[0].source.fingerprint()


def test_samples_show_both_halves(tmp_path):
  samples = prepared(tmp_path, TWO_PAIRS, max_target_length=20).samples
  shown = ["".join(span.text for span in sample.spans if span.trained) for sample in samples]
  assert shown == ["a\x02", "bcd\x02", "ab\x02", "c\x02"]
  assert VOCAB_SIZE == 128
