"""Figures worked by hand: of tokens, of answers, and where they are written."""

from __future__ import annotations

import json
import math
import re
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from flax import nnx

from maxtext_posttrain.data.report import DataReport
from maxtext_posttrain.errors import ConfigError
from maxtext_posttrain.evaluation.answers import Answer
from maxtext_posttrain.evaluation.likelihood import Likelihood
from maxtext_posttrain.evaluation.maths import answer_figures, grade
from maxtext_posttrain.evaluation.output import answers_path, check_output, default_output
from maxtext_posttrain.evaluation.questions import Question, Questions
from maxtext_posttrain.evaluation.record import Answers, Evaluation, table, write
from maxtext_posttrain.models.source import ModelSource
from maxtext_posttrain.trainers.objective import Batch, LossContext, LossOutput
from maxtext_posttrain.trainers.sft import SFT
from maxtext_posttrain.trainers.train_step import make_eval_step

FIVE = Answer(Fraction(5), "5", "####")


class Fixed(nnx.Module):
  """Answers with the same logits whatever is asked."""

  def __init__(self, logits: np.ndarray):
    self.logits = nnx.Param(jnp.asarray(logits))

  def __call__(self, **inputs: object) -> jnp.ndarray:
    return self.logits.get_value()


def test_loss_and_accuracy_over_the_trained_tokens():
  # Of three tokens, probabilities 1/2, 1/4, 1/4 at each of four places; the last is not trained.
  logits = np.log(np.array([[[2, 1, 1], [1, 2, 1], [1, 1, 2], [2, 1, 1]]], np.float32) / 4)
  ones = np.ones((1, 1, 4), np.int32)
  batch = {
    "inputs": ones,
    "inputs_position": ones,
    "inputs_segmentation": ones,
    "targets": np.array([[[0, 0, 2, 0]]]),
    "targets_segmentation": np.array([[[1, 1, 1, 0]]]),
  }
  # A quantised head is applied to all positions at once.
  config = SimpleNamespace(enable_dropout=False, z_loss_multiplier=0.0, quantization="int8")
  graphdef, state = nnx.split(nnx.Dict(model=Fixed(logits)))

  def loss(model: nnx.Module, frozen: object, batch: Batch, step: jax.Array, is_train: bool) -> LossOutput:
    return SFT().loss(model, batch, LossContext(None, config, step, is_train))  # type: ignore[arg-type]

  sums = make_eval_step(graphdef, loss, SFT().weight)(state, {}, batch)  # type: ignore[arg-type]
  assert float(sums["loss_sum"]) == pytest.approx(math.log(2) + math.log(4) + math.log(2))
  assert (float(sums["weight"]), float(sums["means"]["token_accuracy"])) == (3, 2)
  assert Likelihood(math.log(16) / 3, 2 / 3, 3).perplexity == pytest.approx(16 ** (1 / 3))


def test_figures_of_answers():
  texts = [["#### 5", "#### 5.0"], ["5", "6"], ["none", "#### 50"], [r"\boxed{10/2}", "-5"]]
  graded = [[grade(FIVE, text, 3, "length" if text == "6" else "stop") for text in each] for each in texts]
  figures = answer_figures(graded)
  # Means of the questions: 1, 1/2, 0, 1/2. Their variance is (1/4 + 0 + 1/4 + 0) / 3 = 1/6.
  assert figures.accuracy == 0.5
  assert figures.standard_error == pytest.approx(math.sqrt(1 / 6 / 4))
  assert (figures.questions, figures.answers, figures.correct) == (4, 8, 4)
  assert (figures.without_number, figures.cut) == (1, 1)
  assert answer_figures(graded[:1]).standard_error is None


def evaluation(likelihood: Likelihood) -> Evaluation:
  question = Question("rows.jsonl line 1", "what", "#### 5", FIVE, [1, 2])
  graded = {"greedy": [[grade(FIVE, "it is 5 é", 4, "stop")]]}
  report = DataReport("rows.jsonl", rows_read=2, examples=1)
  report.add_bad_row("rows.jsonl line 2", "wrong type", "5")
  questions = Questions([question], 2, 1, {}, "f00d")
  figures = {name: answer_figures(each) for name, each in graded.items()}
  source = ModelSource(epath.Path("run/checkpoints/4/items"), 4, Path("run/config.yml"))
  return Evaluation(
    source, report, "beef", likelihood, Answers(questions, graded, figures), {"limit": 2}, {"load": 1.0}
  )


def test_the_files(tmp_path: Path):
  path = tmp_path / "eval-4.json"
  write(evaluation(Likelihood(0.5, 0.25, 12)), path)
  check_output(path)  # An evaluation may be replaced.
  content = json.loads(path.read_text())
  assert content["model"] == {"items": "run/checkpoints/4/items", "step": 4, "config": "run/config.yml"}
  assert content["tokens"] == {
    "loss": 0.5,
    "perplexity": pytest.approx(1.6487212707),
    "token_accuracy": 0.25,
    "trained_tokens": 12,
  }
  assert content["data"]["fingerprint"] == "beef"
  assert content["data"]["rows_left_out"] == {
    "wrong type": {"count": 1, "first": ["rows.jsonl line 2: wrong type (5)"]},
  }
  assert content["answers"]["file"] == "eval-4-answers.jsonl"
  (line,) = (tmp_path / "eval-4-answers.jsonl").read_text(encoding="utf-8").splitlines()
  assert json.loads(line) == {
    "row": "rows.jsonl line 1",
    "question": "what",
    "reference": "#### 5",
    "reference_value": "5",
    "answers": [
      {
        "by": "greedy",
        "sample": 0,
        "text": "it is 5 é",
        "extracted": "5",
        "value": "5",
        "rule": "last number",
        "correct": True,
        "tokens": 4,
        "finish_reason": "stop",
      }
    ],
  }
  assert sorted(file.name for file in tmp_path.iterdir()) == ["eval-4-answers.jsonl", "eval-4.json"]


def test_the_table():
  lines = table(evaluation(Likelihood(0.5, 0.25, 12)))
  assert [re.split("  +", line) for line in lines[:4]] == [
    ["loss", "0.5000", "of 12 trained tokens"],
    ["perplexity", "1.649"],
    ["token accuracy", "25.00%"],
    ["exact match, greedy", "100.00%", "1 of 1 answers to 1 questions"],
  ]
  assert lines[4:] == [
    "rows not evaluated: 1 of 2",
    "  1 wrong type, as rows.jsonl line 2: wrong type (5)",
  ]


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path):
  path = tmp_path / "eval-4.json"
  write(evaluation(Likelihood(math.nan, 0.0, 12)), path)
  assert json.loads(path.read_text())["tokens"]["loss"] is None
  assert "nan" in table(evaluation(Likelihood(math.nan, 0.0, 12)))[0]


@pytest.mark.parametrize(
  ("items", "output"),
  [
    ("/a/run/checkpoints/30/items", "/a/run/eval-7.json"),
    ("/a/run/checkpoints/actor/30/items", "/a/run/eval-7.json"),
    ("/a/imported/0/items", "/a/imported/eval-7.json"),
    ("/a/alone/items", "/a/alone/eval-7.json"),
  ],
)
def test_where_figures_go(items: str, output: str):
  found = default_output(ModelSource(epath.Path(items), 7, Path("config.yml")))
  assert str(found) == output
  assert answers_path(found).name == "eval-7-answers.jsonl"


def test_a_bucket_needs_a_name():
  with pytest.raises(ConfigError, match="name the figures' file with --output"):
    default_output(ModelSource(epath.Path("gs://bucket/run/0/items"), 0, Path("config.yml")))
