"""`posttrain eval`: loss, perplexity and token accuracy of a model on data; for mathematics, generated answers too."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_posttrain.commands.arguments import ModelArgumentParser
from maxtext_posttrain.errors import ConfigError, DataError, GenerationError
from maxtext_posttrain.rollout.options import SamplingOptions

if TYPE_CHECKING:
  from maxtext_posttrain.config import Config
  from maxtext_posttrain.data import DataOptions, PreparedRows
  from maxtext_posttrain.evaluation.questions import Questions
  from maxtext_posttrain.evaluation.record import Evaluation
  from maxtext_posttrain.models.source import ModelSource
  from maxtext_posttrain.tokenizers import Tokenizer

_DESCRIPTION = """\
Evaluates a model on data: the loss, the perplexity and the accuracy of each next token, over the tokens that training
would count. Questions in mathematics are answered too, and graded by the number an answer ends with: after ####, in
\\boxed{}, or the last. Figures go to a table, to eval-<step>.json in the run's folder, and the answers beside it.
"""
_BATCH = 32
_PROGRESS_SECONDS = 10.0


def run(arguments: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  options = _parse(arguments)
  samplings = _samplings(options)
  job = _Job.prepare(options, samplings)
  evaluation = _evaluate(job)

  from maxtext_posttrain.evaluation.output import answers_path
  from maxtext_posttrain.evaluation.record import table, write

  write(evaluation, job.output)
  print(f"{evaluation.source.items.parent}, step {evaluation.source.step}, on {evaluation.report.source}")
  for line in table(evaluation):
    print(line)
  print(f"figures: {job.output}")
  if evaluation.answers is not None:
    print(f"answers: {answers_path(job.output)}")
  return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
  parser = ModelArgumentParser("eval", _DESCRIPTION, others="data with --data")
  parser.add_argument("--data", metavar="FILE", help="a .jsonl, .json or .parquet file (default: the run's own)")
  parser.add_argument(
    "--columns",
    metavar="A[,B]",
    help="its column of messages, or the user's and the assistant's (default: as configured, else those there are)",
  )
  parser.add_argument("--limit", type=int, metavar="N", help="only its first N rows")
  parser.add_argument("--generate", action=argparse.BooleanOptionalAction, help="whether questions are answered")
  parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="of an answer (default 256)")
  parser.add_argument("--samples", type=int, default=1, metavar="N", help="above 1: as many sampled answers too")
  parser.add_argument("--temperature", type=float, metavar="T", help="of the samples (default 1)")
  parser.add_argument("--top-k", type=int, metavar="K", help="of the samples (default 0: all tokens)")
  parser.add_argument("--top-p", type=float, metavar="P", help="of the samples (default 1: all tokens)")
  parser.add_argument("--seed", type=int, metavar="S", help="of the samples (default 0)")
  parser.add_argument("--batch", type=int, metavar="N", help="sequences at once (default: the run's, and 32 answers)")
  parser.add_argument("--output", metavar="FILE", help="the figures' file (default: eval-<step>.json of the run)")
  options = parser.parse(arguments)
  for value, name in ((options.limit, "--limit"), (options.samples, "--samples"), (options.batch, "--batch")):
    if value is not None and value < 1:
      parser.error(f"{name} is {value}: it must be at least 1")
  for value, name in ((options.data, "--data"), (options.columns, "--columns"), (options.output, "--output")):
    if value is not None and not value.strip(", "):
      parser.error(f"{name} is empty")
  sampling = ("temperature", "top_k", "top_p", "seed")
  given = [name for name in sampling if getattr(options, name) is not None]
  if given and options.samples == 1:
    parser.error(f"--{given[0].replace('_', '-')} is of samples: give --samples, at least 2")
  if options.generate is False and options.samples > 1:
    parser.error("--samples are generated: leave --no-generate out")
  if options.temperature == 0:
    parser.error("--temperature is 0: each sample would be the greedy answer, which is generated in any case")
  return options


def _samplings(options: argparse.Namespace) -> dict[str, SamplingOptions]:
  """How answers are generated, by name."""
  try:
    found = {"greedy": SamplingOptions(max_new_tokens=options.max_new_tokens, temperature=0.0)}
    if options.samples > 1:
      names = ("temperature", "top_k", "top_p", "seed")
      given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
      found["sampled"] = SamplingOptions(max_new_tokens=options.max_new_tokens, n=options.samples, **given)
  except GenerationError as error:
    raise ConfigError(f"posttrain eval: {error}") from error
  return found


@dataclasses.dataclass(frozen=True)
class _Job:
  """All that is to be done, with the data read; none of it needs JAX."""

  source: ModelSource
  overrides: list[str]
  tokenizer: Tokenizer
  rows: PreparedRows
  questions: Questions | None
  samplings: dict[str, SamplingOptions]
  batch: int | None
  output: Path
  settings: dict[str, Any]

  @classmethod
  def prepare(cls, options: argparse.Namespace, samplings: dict[str, SamplingOptions]) -> _Job:
    """Finds the model, reads the data, and refuses what can't be done, before anything heavy is imported."""
    from maxtext_posttrain.logs import quiet_imports

    with quiet_imports(show=options.debug):
      from maxtext_posttrain.data import DataOptions, find_columns, prepare_rows
      from maxtext_posttrain.evaluation.output import check_output, default_output
      from maxtext_posttrain.models.source import find_source
      from maxtext_posttrain.tokenizers import configured_tokenizer
    source = find_source(options.path, options.config)
    output = default_output(source) if options.output is None else Path(options.output)
    check_output(output)
    config, overrides = _configuration(source, options)
    data = dataclasses.replace(DataOptions.from_config(config, "eval"), limit=options.limit)
    if data.dataset_type == "synthetic" or not data.configured:
      raise ConfigError(f"{source.config} names no evaluation data: give --data FILE")
    named = {"eval_data_columns", "train_data_columns"} & config.beyond_defaults
    if options.data is not None and not named and (columns := find_columns(data)):
      data = dataclasses.replace(data, columns=columns)
    tokenizer = configured_tokenizer(config)
    if tokenizer is None:
      raise ConfigError(f"{source.config} names no tokenizer: give tokenizer_path=… and tokenizer_type=…")
    with quiet_imports(show=options.debug):
      rows = prepare_rows(data, tokenizer)
      questions = _questions(options.generate, data, tokenizer)
    settings = {
      "max_target_length": data.max_target_length,
      "packing": data.packing,
      "completion_only": data.completion_only,
      "columns": list(data.columns),
      "limit": options.limit,
      "tokenizer": tokenizer.fingerprint,
      "overrides": overrides,
    }
    if questions is not None:
      settings |= {name: dataclasses.asdict(sampling) for name, sampling in samplings.items()}
    return cls(source, overrides, tokenizer, rows, questions, samplings, options.batch, output, settings)


def _configuration(source: ModelSource, options: argparse.Namespace) -> tuple[Config, list[str]]:
  """The model's configuration with the data that were named, and the keys that say so."""
  from maxtext_posttrain.config import load_model_config

  overrides = list(options.overrides)
  if options.data is not None:
    overrides += ["dataset_type=hf", "hf_path=json", f"hf_eval_files={options.data}"]
  columns = None if options.columns is None else [name.strip() for name in options.columns.split(",") if name.strip()]
  config = load_model_config([str(source.config), *overrides])
  if columns is None and not config.beyond_defaults & {"eval_data_columns"}:
    columns = config.train_data_columns if "train_data_columns" in config.beyond_defaults else None
  if columns is not None:
    overrides.append(f"eval_data_columns={json.dumps(columns)}")
    config = load_model_config([str(source.config), *overrides])
  return config, overrides


def _questions(generate: bool | None, data: DataOptions, tokenizer: Tokenizer) -> Questions | None:
  """The questions to ask; None where none are.

  Left to itself, the command asks where most references say which number is their final one.

  Raises:
    DataError: questions were asked for, and there are none.
  """
  from maxtext_posttrain.evaluation.questions import read_questions

  if generate is False:
    return None
  longest = data.max_target_length - 1
  questions = read_questions(data, tokenizer, longest_prompt=longest, marked_only=generate is None)
  if generate is None and 2 * questions.with_number <= questions.rows:
    return None
  if not questions.with_number:
    raise DataError(
      f"{', '.join(data.files) or data.hub_path}: no reference ends with a number to compare answers with; leave"
      " --generate out, or name other --columns"
    )
  if not questions.asked:
    reasons = "; ".join(bad.first[0] for bad in questions.left_out.values())
    raise DataError(f"no question can be asked: {reasons}; raise max_target_length, or give --no-generate")
  return questions


def _evaluate(job: _Job) -> Evaluation:
  from maxtext_posttrain.logs import quiet_imports

  with quiet_imports(show=False):
    from maxtext_posttrain.evaluation.likelihood import evaluate_likelihood
    from maxtext_posttrain.evaluation.maths import Answerer, answer_figures
    from maxtext_posttrain.evaluation.record import Answers, Evaluation
    from maxtext_posttrain.models.loading import load_model
  seconds: dict[str, float] = {}
  started = time.perf_counter()
  loaded = load_model(job.source, job.overrides)
  seconds["load"] = time.perf_counter() - started
  devices = loaded.mesh.size
  batch = job.batch
  if batch is None and {"per_device_batch_size", "eval_per_device_batch_size"} & loaded.config.beyond_defaults:
    batch = loaded.maxtext.micro_batch_size_to_eval_on
  started = time.perf_counter()
  likelihood = evaluate_likelihood(
    loaded, job.rows, -(-(batch or 1) // devices) * devices, progress=_progress("sequence batches")
  )
  seconds["tokens"] = time.perf_counter() - started
  answers = None
  if job.questions is not None:
    answerer = Answerer(loaded, job.tokenizer, batch_size=job.batch or _BATCH)
    graded = {}
    for name, sampling in job.samplings.items():
      started = time.perf_counter()
      graded[name] = answerer.answer(job.questions.asked, sampling, progress=_progress(f"{name} answers"))
      seconds[name] = time.perf_counter() - started
    answers = Answers(job.questions, graded, {name: answer_figures(each) for name, each in graded.items()})
  return Evaluation(
    source=job.source,
    report=job.rows.report,
    fingerprint=job.rows.source.fingerprint(),
    likelihood=likelihood,
    answers=answers,
    settings=job.settings,
    seconds=seconds,
  )


def _progress(what: str) -> Callable[[int, int], None]:
  """Prints how far it has come, each few seconds, to standard error."""
  last = time.perf_counter()

  def show(done: int, total: int) -> None:
    nonlocal last
    if done < total and time.perf_counter() - last > _PROGRESS_SECONDS:
      last = time.perf_counter()
      print(f"{what}: {done:,} of {total:,}", file=sys.stderr, flush=True)

  return show
