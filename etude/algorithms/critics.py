# SPDX-License-Identifier: Apache-2.0
"""What offline algorithms with critics share: the columns that they need, and the targets of critics."""

import torch
from torch import Tensor

from etude import columns as col
from etude.connectors import Connector, NStep
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


def looking_ahead(n_step: int, gamma: float) -> list[Connector]:
    """The connectors of the learner that sum ``n_step`` rewards; none for one."""
    return [NStep(n_step, gamma)] if n_step > 1 else []


def target_of(batch: Batch, gamma: float, value: Tensor) -> Tensor:
    """``[B]``: reward + gamma * ``value`` ``[B]`` of what was observed next; none where it terminated.

    Where `NStep` has looked ahead, the reward is a sum, and ``discount`` stands for gamma.
    """
    if "discount" in batch:
        return torch.addcmul(batch.reward, batch.discount, value)
    return torch.add(batch.reward, torch.where(batch[col.TERMINATED], 0.0, value), alpha=gamma)
