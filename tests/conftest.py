# SPDX-License-Identifier: Apache-2.0
"""One thread for everything: tests run beside other work, and two thread pools make each other crawl."""

import importlib.util
import sys

import hypothesis
import threadpoolctl
import torch

torch.set_num_threads(1)
threadpoolctl.threadpool_limits(1)
hypothesis.settings.register_profile("etude", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("etude")

_found = importlib.util.find_spec("ray")
if _found is None or _found.origin is None:
    sys.modules["ray"] = None  # type: ignore[assignment]  # and the folder tests/ray, which pytest lets one import, is not it
