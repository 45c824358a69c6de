"""From rows of chat data to batches of tokens, masks and positions, and to exactly as many as a run needs."""

from maxtext_posttrain.data.batches import BATCH_KEYS, Batch
from maxtext_posttrain.data.options import DataOptions
from maxtext_posttrain.data.pipeline import (
  BatchIterator,
  PreparedData,
  PreparedRows,
  RowDataset,
  prepare_chats,
  prepare_eval_rows,
  prepare_preferences,
  prepare_rows,
  prepare_train_rows,
)
from maxtext_posttrain.data.records import find_columns
from maxtext_posttrain.data.report import DataReport
from maxtext_posttrain.data.step_budget import StepBudgetedIterator, group_batches

__all__ = [
  "BATCH_KEYS",
  "Batch",
  "BatchIterator",
  "DataOptions",
  "DataReport",
  "PreparedData",
  "PreparedRows",
  "RowDataset",
  "StepBudgetedIterator",
  "find_columns",
  "group_batches",
  "prepare_chats",
  "prepare_eval_rows",
  "prepare_preferences",
  "prepare_rows",
  "prepare_train_rows",
]
