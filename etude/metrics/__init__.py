# SPDX-License-Identifier: Apache-2.0
"""Figures and their running statistics, where they are written, and pictures of them."""

from etude.metrics.metrics import Delta, Metrics
from etude.metrics.plot import plot_runs
from etude.metrics.sinks import JSONLines, TensorBoard, cut_jsonl, read_jsonl
from etude.metrics.table import CSV, cut_csv
from etude.metrics.trackers import MLflow, WandB
from etude.metrics.window import Ema, Window

__all__ = [
    "CSV",
    "Delta",
    "Ema",
    "JSONLines",
    "MLflow",
    "Metrics",
    "TensorBoard",
    "WandB",
    "Window",
    "cut_csv",
    "cut_jsonl",
    "plot_runs",
    "read_jsonl",
]
