# SPDX-License-Identifier: Apache-2.0
"""What offline algorithms with critics share: the columns that they need, and targets of one step."""

import torch
from torch import Tensor

from etude import columns as col
from etude.errors import SettingsError
from etude.learners import Batch
from etude.modules import Module

TRANSITION = (col.OBS, col.ACTION, col.REWARD, col.NEXT_OBS, col.TERMINATED)
"""The columns of single steps that critics learn from."""


def not_recurrent(module: Module, name: str) -> Module:
    """The module.

    Raises:
        SettingsError: it is recurrent, which critics of single steps can't be.
    """
    if module.recurrent:
        raise SettingsError(
            f"{type(module.net).__name__} is recurrent, but {name} learns from single steps, which have no order in "
            "time: take a network without a memory, or BC or MARWIL."
        )
    return module


def one_step_target(batch: Batch, gamma: float, value: Tensor) -> Tensor:
    """``[B]``: reward + gamma * ``value`` ``[B]`` of what was observed next; none where it terminated."""
    return torch.add(batch.reward, torch.where(batch[col.TERMINATED], 0.0, value), alpha=gamma)
