# SPDX-License-Identifier: Apache-2.0
"""Torch's random stream, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int, device: torch.device | str) -> Iterator[None]:
    """Torch draws from ``seed`` within a ``with`` block, on the CPU and on ``device``, and as before after it."""
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield
