# SPDX-License-Identifier: Apache-2.0
"""The mean of a team's gradients, weighted by rows: that of one learner that has all rows."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from etude.learners.flat import FlatParameters
from etude.learners.optimizers import Optimizer
from etude.learners.team import Team
from etude.modules import Module


class Averaged(NamedTuple):
    """What a step of a team is about, the same for all."""

    weight: float
    """Of all batches that it is made of."""
    loss: float
    """Their mean."""
    resting: frozenset[str]
    """Optimizers that the latest batch lets rest."""


class Averaging:
    """Sums what the learners of a team bring to a step at once: the gradients of all optimizers, and a few numbers.

    Gradients are moved into one block of memory, so that nothing is copied for it. Each learner has multiplied the loss
    of its batches, and so their gradients, by their weight; the sums are divided by that of the weights.

    Args:
        team: Who.
        optimizers: Whose gradients.
        device: Where the module is.
    """

    def __init__(self, team: Team, optimizers: Mapping[str, Optimizer], device: torch.device) -> None:
        self._team, self._names = team, list(optimizers)
        numbers = 2 + len(self._names)
        main = (torch.float32, device)
        kinds: dict[tuple[torch.dtype, torch.device], list[FlatParameters]] = {main: []}
        for optimizer in optimizers.values():
            flat = optimizer.parameters
            kinds.setdefault((flat.grad.dtype, flat.grad.device), []).append(flat)
        self._blocks, self._grads = [], []
        for (dtype, where), members in kinds.items():
            sizes = [sum(grad.numel() for grad in member.grads) for member in members]
            size = sum(sizes)
            extra = numbers if (dtype, where) == main else 0
            block = torch.zeros(size + extra, dtype=dtype, device=where)
            start = 0
            for member, own in zip(members, sizes, strict=True):
                member.keep_grads_in(block[start : start + own])
                start += own
            self._blocks.append(block)
            self._grads.append(block[:size])
        self._numbers = self._blocks[0][-numbers:]
        """The weights, the losses times these, and for each optimizer whether it is to rest."""

    def begin(self) -> None:
        """Begin a step; gradients are set to 0 by whoever has them."""
        self._numbers.zero_()

    def add(self, weight: float, loss: torch.Tensor, resting: frozenset[str]) -> None:
        """Note a batch: its weight, and its loss times that."""
        self._numbers[0] += weight
        self._numbers[1] += loss
        for i, name in enumerate(self._names):
            self._numbers[2 + i] = float(name in resting)

    def add_none(self) -> None:
        """Note that others have a batch, but this learner has no row of it."""
        self._numbers[2:] = 0.0

    def average(self) -> Averaged:
        """Let the gradients be everyone's mean. All learners of the team must come here."""
        for block in self._blocks:
            self._team.sum_(block)
        weight, loss, *rests = self._numbers.tolist()
        for grads in self._grads:
            grads.div_(weight)  # by 0 where nobody had a row: not finite, as the loss of no rows is
        mean = loss / weight if weight else float("nan")
        return Averaged(weight, mean, frozenset(n for n, rest in zip(self._names, rests, strict=True) if rest))


def share_buffers(team: Team, module: Module, rows: Sequence[int]) -> None:
    """Let all have the buffers of the learner that had the most rows, as no gradient keeps these alike."""
    buffers = list(module.buffers())
    if buffers:
        team.take_from(rows.index(max(rows)), buffers)
