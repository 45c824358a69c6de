"""Generated answers to questions in mathematics, graded by the number that each ends with."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

from maxtext_posttrain.evaluation.answers import Answer, find_answer
from maxtext_posttrain.evaluation.questions import Question
from maxtext_posttrain.models.loading import LoadedModel
from maxtext_posttrain.rollout.native import NativeEngine
from maxtext_posttrain.rollout.options import FinishReason, SamplingOptions
from maxtext_posttrain.rollout.text import completion_ends, completion_text
from maxtext_posttrain.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class GradedAnswer:
  """One generated answer.

  Attributes:
    text: what was generated.
    answer: the number that it ends with, or None.
    correct: whether that is the reference's.
    tokens: tokens generated.
    finish_reason: as the engine says; `length` is an answer that was cut.
  """

  text: str
  answer: Answer | None
  correct: bool
  tokens: int
  finish_reason: FinishReason


@dataclasses.dataclass(frozen=True)
class AnswerFigures:
  """Exact-match accuracy over questions, each the mean over its answers (pass@1).

  Attributes:
    accuracy: from 0 to 1.
    standard_error: of the accuracy as an estimate over questions like these; None for a single question.
    questions: how many were asked.
    answers: how many were generated.
    correct: answers that end with the reference's number.
    without_number: answers that end with none; they count as wrong.
    cut: answers that reached the length before their end; they count as what they end with.
  """

  accuracy: float
  standard_error: float | None
  questions: int
  answers: int
  correct: int
  without_number: int
  cut: int


class Answerer:
  """Asks one model, in batches."""

  def __init__(self, loaded: LoadedModel, tokenizer: Tokenizer, *, batch_size: int):
    """Builds the engine; answers end at eos and at the chat template's end of turn.

    Args:
      loaded: the model.
      tokenizer: of the prompts and answers.
      batch_size: answers generated at once, at most.

    Raises:
      GenerationError: the model's architecture is none we generate with.
    """
    self._tokenizer = tokenizer
    self._engine = NativeEngine(loaded.maxtext, loaded.mesh, loaded.model, max_batch=batch_size)
    self._ends = completion_ends(tokenizer, self._engine.vocab_size)

  def answer(
    self, questions: Sequence[Question], sampling: SamplingOptions, *, progress: Callable[[int, int], None]
  ) -> list[list[GradedAnswer]]:
    """Answers each question `sampling.n` times.

    Args:
      questions: at least one.
      sampling: how tokens are chosen; its stop tokens are this class's.
      progress: is told how many answers there are, and how many there will be.
    """
    prompts = [question.prompt for question in questions]
    completions = self._engine.generate(prompts, self._ends.on(sampling), progress=progress)
    graded: list[list[GradedAnswer]] = []
    for index, question in enumerate(questions):
      answers = []
      for completion in completions[index * sampling.n : (index + 1) * sampling.n]:
        text = completion_text(self._tokenizer, completion, self._ends.written)
        answers.append(grade(question.answer, text, len(completion.token_ids), completion.finish_reason))
      graded.append(answers)
    return graded


def grade(reference: Answer, text: str, tokens: int, finish_reason: FinishReason) -> GradedAnswer:
  """Compares what was generated with the reference's number."""
  answer = find_answer(text)
  correct = answer is not None and answer.value == reference.value
  return GradedAnswer(text, answer, correct, tokens, finish_reason)


def answer_figures(graded: Sequence[Sequence[GradedAnswer]]) -> AnswerFigures:
  """The figures of at least one question with at least one answer each."""
  means = [statistics.fmean(answer.correct for answer in answers) for answers in graded]
  flat = [answer for answers in graded for answer in answers]
  return AnswerFigures(
    accuracy=statistics.fmean(means),
    standard_error=statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
    questions=len(graded),
    answers=len(flat),
    correct=sum(answer.correct for answer in flat),
    without_number=sum(answer.answer is None for answer in flat),
    cut=sum(answer.finish_reason == "length" for answer in flat),
  )
