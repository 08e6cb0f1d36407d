# SPDX-License-Identifier: Apache-2.0
"""What algorithms with critics share: the columns of steps that they need, the targets of critics, their modules."""

from typing import TypeVar

import torch
from torch import Tensor, nn

from etude import columns as col
from etude.connectors import Connector, NStep
from etude.errors import ModuleError, SettingsError
from etude.learners import Batch
from etude.modules import Module
from etude.modules.soft_module import SoftModule

M = TypeVar("M", bound=Module)

TRANSITION = (col.OBS, col.ACTION, col.REWARD, col.NEXT_OBS, col.TERMINATED)
"""The columns of single steps that critics learn from."""


def of_kind(module: Module, kind: type[M]) -> M:
    """The module, known to be of the kind that an algorithm needs.

    Raises:
        ModuleError: it is of another.
    """
    if not isinstance(module, kind):
        raise ModuleError(f"{type(module).__name__} is no {kind.__name__}: let make_module() give one.")
    return module


def groups_of(soft: SoftModule) -> dict[str, list[nn.Parameter]]:
    """The parameters of the optimizers ``actor``, ``critic`` and, where it is learned, ``temperature``."""
    groups = {
        "actor": [p for p in soft.net.parameters() if p.requires_grad],
        "critic": [p for p in soft.critic.parameters() if p.requires_grad],
    }
    return groups | ({"temperature": [soft.log_temperature]} if soft.log_temperature.requires_grad else {})


def not_recurrent(module: Module, name: str) -> Module:
    """The module.

    Raises:
        SettingsError: it is recurrent, which critics of single steps can't be.
    """
    if module.recurrent:
        raise SettingsError(
            f"{type(module.net).__name__} is recurrent, but {name} learns from single steps, which have no order in "
            "time: take a network without a memory, or BC."
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
