# SPDX-License-Identifier: Apache-2.0
"""What a module says of many rows, some at a time."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from etude.columns import Columns
from etude.modules.numpy_network import CHUNK
from etude.modules.output import Output
from etude.modules.tensors import as_tensor

if TYPE_CHECKING:
    from etude.modules.module import Module


def outputs_of(module: "Module", obs: Columns, state: Columns) -> Iterator[tuple[slice, Output]]:
    """Rows, and what ``module`` says of them, without gradients; nothing is dropped out, whatever mode it is in.

    Args:
        module: It is called with at most `CHUNK` rows at once.
        obs: Flat observation columns ``[n, ...]``, ``[n, T, ...]`` for a recurrent module.
        state: For a recurrent module: its state by name, ``[n, ...]``; else {}.
    """
    n, device, was_training = len(next(iter(obs.values()))), module.device, module.training

    def part(columns: Columns, rows: slice) -> dict[str, torch.Tensor]:
        return {name: as_tensor(column[rows]).to(device) for name, column in columns.items()}

    if was_training:
        module.eval()
    try:
        for start in range(0, n, CHUNK):
            rows = slice(start, start + CHUNK)
            with torch.inference_mode():
                output: Output = module(module.obs_from(part(obs, rows)), part(state, rows) or None)
            yield rows, output
    finally:
        if was_training:
            module.train()
