# SPDX-License-Identifier: Apache-2.0
"""Optimizers over flat parameters: Adam, or any of torch's that works element by element."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from etude.errors import EtudeError
from etude.learners.adam import Adam, Rates
from etude.learners.flat import FlatParameters

MakeOptimizer: TypeAlias = Callable[..., torch.optim.Optimizer]
"""Makes a torch optimizer, called with ``([parameter], lr=...)``."""


class Optimizer(Protocol):
    """What moves some parameters along their gradients."""

    parameters: FlatParameters

    def step(self, lr: Rates) -> None:
        """One step with learning rate ``lr``, along ``parameters.grad``."""

    def state_dict(self) -> dict[str, Any]:
        """What it remembers: plain data and tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""


class TorchOptimizer:
    """A torch optimizer over flat parameters."""

    def __init__(self, parameters: FlatParameters, make: MakeOptimizer) -> None:
        self.parameters = parameters
        self.optimizer = make([parameters.flat], lr=1.0)

    def step(self, lr: Rates) -> None:
        """See `Optimizer.step`; one rate for all parameters."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """See `Optimizer.state_dict`; empty before the first step."""
        state = self.optimizer.state.get(self.parameters.flat, {})
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Optimizer.load_state_dict`."""
        device = self.parameters.flat.device
        self.optimizer.state[self.parameters.flat] = {
            # counts of steps stay on the CPU, where torch keeps them
            name: value.to(device if value.ndim else "cpu").clone() if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }


def make_optimizer(
    make: MakeOptimizer | None, params: Sequence[nn.Parameter], *, betas: tuple[float, float], eps: float
) -> Optimizer:
    """An optimizer of some parameters, which are moved into flat memory; None is Adam with these settings."""
    if not params:
        raise EtudeError("an optimizer has no parameters: give it some, or leave it out.")
    flat = FlatParameters(params)
    return Adam(flat, betas=betas, eps=eps) if make is None else TorchOptimizer(flat, make)


def check_owners(module: nn.Module, parameters: Mapping[str, Sequence[nn.Parameter]]) -> None:
    """Raise an EtudeError where a parameter that needs a gradient has no optimizer, or two; it is named."""
    needed = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    if not needed:
        raise EtudeError("the module has no parameter to train.")
    owner: dict[int, str] = {}
    for group, members in parameters.items():
        if not members:
            raise EtudeError(f"optimizer `{group}` has no parameters: give it some, or leave it out.")
        for p in members:
            if id(p) in owner:
                raise EtudeError(f"parameter `{needed.get(id(p), '?')}` has two optimizers: {owner[id(p)]}, {group}.")
            owner[id(p)] = group
    for key, name in needed.items():
        if key not in owner:
            raise EtudeError(f"parameter `{name}` has no optimizer: give it one, or set requires_grad to False.")
