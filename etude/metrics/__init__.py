# SPDX-License-Identifier: Apache-2.0
"""Metrics: running statistics, writers (JSON lines, CSV, TensorBoard, W&B, MLflow) and plots."""

from etude.metrics.plot import plot_runs
from etude.metrics.stats import Ema, Metrics, Window
from etude.metrics.writers import JSONLines, MLflow, TensorBoard, WandB, cut_jsonl, read_jsonl, write_csv

__all__ = [
    "Ema",
    "JSONLines",
    "MLflow",
    "Metrics",
    "TensorBoard",
    "WandB",
    "Window",
    "cut_jsonl",
    "plot_runs",
    "read_jsonl",
    "write_csv",
]
