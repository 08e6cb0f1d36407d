# SPDX-License-Identifier: Apache-2.0
"""Running statistics, where they are written, and pictures of them."""

from etude.metrics.plot import plot_runs
from etude.metrics.sinks import JSONLines, TensorBoard, cut_jsonl, read_jsonl
from etude.metrics.window import Ema, Window

__all__ = ["Ema", "JSONLines", "TensorBoard", "Window", "cut_jsonl", "plot_runs", "read_jsonl"]
