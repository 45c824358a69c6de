"""An evaluation on disk and on the screen: `eval-<step>.json`, the answers beside it, and a table."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxtext_posttrain import __version__
from maxtext_posttrain.data.report import BadRows, DataReport
from maxtext_posttrain.errors import EvaluationError
from maxtext_posttrain.evaluation.likelihood import Likelihood
from maxtext_posttrain.evaluation.maths import AnswerFigures, GradedAnswer
from maxtext_posttrain.evaluation.output import FORMAT, answers_path
from maxtext_posttrain.evaluation.questions import Question, Questions
from maxtext_posttrain.files import write_atomically
from maxtext_posttrain.models.source import ModelSource

GREEDY = "greedy"


@dataclasses.dataclass(frozen=True)
class Answers:
  """Generated answers by how they were generated (`greedy`, `sampled`), one list for each question."""

  questions: Questions
  graded: Mapping[str, Sequence[Sequence[GradedAnswer]]]
  figures: Mapping[str, AnswerFigures]


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """What an evaluation came to.

  Attributes:
    source: the model.
    report: what became of the data's rows.
    fingerprint: of the tokens that were evaluated.
    likelihood: of the trained tokens.
    answers: None where none were generated.
    settings: what was asked for.
    seconds: time by part.
  """

  source: ModelSource
  report: DataReport
  fingerprint: str
  likelihood: Likelihood
  answers: Answers | None
  settings: Mapping[str, Any]
  seconds: Mapping[str, float]


def write(evaluation: Evaluation, path: Path) -> None:
  """Writes the answers, then the figures.

  Raises:
    EvaluationError: they can't be written.
  """
  try:
    if evaluation.answers is not None:
      write_atomically(answers_path(path), "".join(_answer_lines(evaluation.answers)))
    content = json.dumps(_finite(as_dict(evaluation, path)), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(path, content + "\n")
  except OSError as error:
    raise EvaluationError(f"{path}: can't be written: {error.strerror or error}; make room, or name another") from error


def as_dict(evaluation: Evaluation, path: Path) -> dict[str, Any]:
  """The figures, and what they are of, as values that JSON holds."""
  source, report, likelihood = evaluation.source, evaluation.report, evaluation.likelihood
  answers = evaluation.answers
  return {
    "format": FORMAT,
    "program": f"maxtext-posttrain {__version__}",
    "model": {"items": str(source.items), "step": source.step, "config": str(source.config)},
    "data": {
      "source": report.source,
      "fingerprint": evaluation.fingerprint,
      "rows_read": report.rows_read,
      "rows_evaluated": report.examples,
      "rows_truncated": report.truncated,
      "rows_left_out": _rows(report.bad_rows),
    },
    "tokens": {**dataclasses.asdict(likelihood), "perplexity": likelihood.perplexity},
    "answers": None
    if answers is None
    else {
      **{name: dataclasses.asdict(figures) for name, figures in answers.figures.items()},
      "rows_read": answers.questions.rows,
      "rows_left_out": _rows(answers.questions.left_out),
      "rows_fingerprint": answers.questions.fingerprint,
      "file": answers_path(path).name,
    },
    "settings": dict(evaluation.settings),
    "seconds": {name: round(seconds, 3) for name, seconds in evaluation.seconds.items()},
  }


def _rows(reasons: Mapping[str, BadRows]) -> dict[str, Any]:
  return {reason: dataclasses.asdict(rows) for reason, rows in reasons.items()}


def _finite(value: Any) -> Any:
  """The value with null for numbers that are not finite, which JSON has no word for."""
  if isinstance(value, dict):
    return {key: _finite(item) for key, item in value.items()}
  return None if isinstance(value, float) and not math.isfinite(value) else value


def _answer_lines(answers: Answers) -> list[str]:
  lines = []
  for index, question in enumerate(answers.questions.asked):
    given = [
      _answer(answer, name, sample)
      for name, graded in answers.graded.items()
      for sample, answer in enumerate(graded[index])
    ]
    lines.append(json.dumps(_question(question) | {"answers": given}, ensure_ascii=False) + "\n")
  return lines


def _question(question: Question) -> dict[str, Any]:
  return {
    "row": question.location,
    "question": question.text,
    "reference": question.reference,
    "reference_value": str(question.answer.value),
  }


def _answer(answer: GradedAnswer, name: str, sample: int) -> dict[str, Any]:
  found = answer.answer
  return {
    "by": name,
    "sample": sample,
    "text": answer.text,
    "extracted": None if found is None else found.text,
    "value": None if found is None else str(found.value),
    "rule": None if found is None else found.rule,
    "correct": answer.correct,
    "tokens": answer.tokens,
    "finish_reason": answer.finish_reason,
  }


def table(evaluation: Evaluation) -> list[str]:
  """The figures as lines of text: a name, a value, and what it is of."""
  likelihood, report, answers = evaluation.likelihood, evaluation.report, evaluation.answers
  rows = [
    ("loss", f"{likelihood.loss:.4f}", f"of {likelihood.trained_tokens:,} trained tokens"),
    ("perplexity", f"{likelihood.perplexity:,.3f}", ""),
    ("token accuracy", f"{likelihood.token_accuracy:.2%}", ""),
  ]
  for name, figures in ({} if answers is None else answers.figures).items():
    samples = figures.answers // figures.questions
    title = "exact match, greedy" if name == GREEDY else f"pass@1 of {samples} samples"
    error = "" if figures.standard_error is None else f"±{figures.standard_error:.2%}, "
    notes = [f"{error}{figures.correct:,} of {figures.answers:,} answers to {figures.questions:,} questions"]
    notes += [f"{figures.without_number:,} with no number"] if figures.without_number else []
    notes += [f"{figures.cut:,} cut at their length"] if figures.cut else []
    rows.append((title, f"{figures.accuracy:.2%}", "; ".join(notes)))
  widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
  lines = [f"{name:<{widths[0]}}  {value:>{widths[1]}}  {note}".rstrip() for name, value, note in rows]
  lines += _left_out("rows not evaluated", report.bad_rows, report.rows_read)
  if report.truncated:
    lines.append(f"rows cut to {report.sequence_length:,} tokens: {report.truncated:,} of {report.rows_read:,}")
  if answers is not None:
    lines += _left_out("questions not asked", answers.questions.left_out, answers.questions.rows)
  return lines


def _left_out(title: str, reasons: Mapping[str, BadRows], rows: int) -> list[str]:
  if not reasons:
    return []
  count = sum(bad.count for bad in reasons.values())
  lines = [f"{title}: {count:,} of {rows:,}"]
  for reason, bad in reasons.items():
    lines.append(f"  {bad.count:,} {reason}, as {bad.first[0]}")
  return lines
