# SPDX-License-Identifier: Apache-2.0
"""Loss: named parts that are summed, and figures that are only logged."""

import torch


class Loss:
    """The parts of a loss by name; their sum is what is minimised, and each is logged.

    Each is a mean over the rows of the batch: where several learners share a step, what they find is averaged in
    proportion to their rows (see `ModuleLearner.team`).

    >>> Loss(policy=policy_loss, value=0.5 * value_loss).log(kl=kl)

    Args:
        parts: Scalar tensors, already weighted.
    """

    def __init__(self, **parts: torch.Tensor) -> None:
        if not parts:
            raise ValueError("a Loss needs at least one part, such as Loss(policy=...).")
        self.parts = parts
        self.logged: dict[str, torch.Tensor] = {}
        self.kept: dict[str, torch.Tensor] = {}
        self.resting: frozenset[str] = frozenset()

    def log(self, **figures: torch.Tensor) -> "Loss":
        """Scalar tensors to be logged beside the parts, without a say in the gradient."""
        self.logged.update({name: figure.detach() for name, figure in figures.items()})
        return self

    def keep(self, **rows: torch.Tensor) -> "Loss":
        """Tensors ``[B, ...]``, a result for each row, for whoever made the batch (`ModuleLearner.kept`)."""
        self.kept.update({name: row.detach() for name, row in rows.items()})
        return self

    def rest(self, *optimizers: str) -> "Loss":
        """Optimizers that make no step this time, such as that of a policy that is trained every other step only."""
        self.resting = self.resting.union(optimizers)
        return self

    @property
    def total(self) -> torch.Tensor:
        """The sum of the parts."""
        first, *rest = self.parts.values()
        for part in rest:
            first = first + part
        return first
