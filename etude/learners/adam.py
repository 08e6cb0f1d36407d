# SPDX-License-Identifier: Apache-2.0
"""Adam over one flat tensor."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from etude.learners.flat import FlatParameters

Rates: TypeAlias = float | Sequence[tuple[slice, float]]
"""A learning rate; or one for each of some slices of flat parameters, which together are all."""


class Adam:
    """Adam (Kingma & Ba 2015, algorithm 1) over flat parameters, in one fused kernel.

    ``torch.optim.Adam`` gives the same numbers; its bookkeeping around the same kernel costs as much as a small
    network's backward pass (see the benchmarks).

    Args:
        parameters: What to optimise; their gradients are read from ``parameters.grad``.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Added to the gradient, times the parameters (L2).
    """

    def __init__(
        self,
        parameters: FlatParameters,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.parameters = parameters
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.first_moment = torch.zeros_like(parameters.flat.data)
        self.second_moment = torch.zeros_like(parameters.flat.data)
        self.steps = torch.zeros((), dtype=torch.float32, device=self.first_moment.device)

    def step(self, lr: Rates) -> None:
        """One update with learning rate ``lr``."""
        self.steps += 1
        if isinstance(lr, int | float):
            self._step(self.parameters.flat.data, self.parameters.grad, self.first_moment, self.second_moment, lr)
            return
        for own, rate in lr:
            flat, grad = self.parameters.flat.data[own], self.parameters.grad[own]
            self._step(flat, grad, self.first_moment[own], self.second_moment[own], rate)

    def _step(
        self, flat: torch.Tensor, grad: torch.Tensor, first: torch.Tensor, second: torch.Tensor, lr: float
    ) -> None:
        torch._fused_adam_(
            [flat],
            [grad],
            [first],
            [second],
            [],
            [self.steps],
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )

    def traced_step(self, grad: torch.Tensor, lr: torch.Tensor, is_fine: torch.Tensor) -> None:
        """The same update written out, for ``torch.compile`` to fuse with what surrounds it.

        ``lr`` is one number, or one for each parameter. Where ``is_fine`` is False, nothing changes.
        """
        flat, (beta1, beta2) = self.parameters.flat.data, self.betas
        if self.weight_decay:
            grad = grad + self.weight_decay * flat
        steps = self.steps + 1
        first = self.first_moment.lerp(grad, 1 - beta1)
        second = (self.second_moment * beta2).addcmul(grad, grad, value=1 - beta2)
        correction = (1 - beta2**steps).sqrt()
        moved = flat - lr / (1 - beta1**steps) * first / (second.sqrt() / correction + self.eps)
        for own, new in ((self.steps, steps), (self.first_moment, first), (self.second_moment, second), (flat, moved)):
            own.copy_(torch.where(is_fine, new, own))

    def state_dict(self) -> dict[str, Any]:
        """The moments and the count of steps."""
        return {
            "first_moment": self.first_moment.clone(),
            "second_moment": self.second_moment.clone(),
            "steps": self.steps.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        for name in ("first_moment", "second_moment", "steps"):
            getattr(self, name).copy_(state[name])
