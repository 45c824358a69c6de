"""What a run tells: `metrics.jsonl`, TensorBoard, Weights & Biases, progress, and the page it leaves.

A logger is one module with one class (`logger.Logger`); `Reporter` hands each what the trainer measures. `run_file` and
`run_folder` hold and read what the page needs, `page` renders it, for a run that ends and for `posttrain report`.
"""

from __future__ import annotations

from maxtext_posttrain.report.logger import Logger
from maxtext_posttrain.report.metrics_file import MetricsFile, read_metrics
from maxtext_posttrain.report.reporter import Reporter

__all__ = ["Logger", "MetricsFile", "Reporter", "read_metrics"]
