# SPDX-License-Identifier: Apache-2.0
"""What every action distribution offers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from etude.columns import Columns
from etude.spaces import Flattener, Space

Floats: TypeAlias = NDArray[np.float32]

FORBIDDEN = -1e30
"""The logit of a choice that is not to be made: no softmax gives it any weight, yet 0 * log(0) stays 0, as finite."""


class Logits(NamedTuple):
    """Inputs next to each other that are logits."""

    start: int
    """The position of the first one."""
    size: int
    exclusive: bool
    """Exactly one of them is chosen, so that one must be allowed; else each is a choice by itself."""


class Distribution(ABC):
    """A family of action distributions over one action space; stateless, made once.

    Acting is NumPy and only NumPy; learning (`logp`, `entropy`, `kl`) is torch and differentiable. The parameters of
    one distribution are the last axis of ``inputs``; for torch any axes may come before it (``[B]`` or ``[B, T]``).
    Logarithms are natural, densities are with respect to the action's own units.

    Attributes:
        num_inputs: Numbers that parameterise the distribution of one action.
        num_noise: Random numbers that one action takes.
        log_std: int64: the positions in ``inputs`` that are logarithms of standard deviations.
        logits: The ``inputs`` that are logits, from first to last: what an action mask governs.
        flatten: Takes a nested action apart into columns.
    """

    def __init__(
        self,
        space: Space,
        root: str,
        *,
        num_inputs: int,
        num_noise: int,
        log_std: Sequence[int] | range = (),
        logits: Sequence[Logits] = (),
    ) -> None:
        self.num_inputs = num_inputs
        self.num_noise = num_noise
        self.log_std = np.asarray(log_std, np.int64)
        self.logits = tuple(logits)
        self.flatten = Flattener(space, root)

    @abstractmethod
    def noise(self, rng: np.random.Generator, rows: tuple[int, ...]) -> Floats:
        """float32 ``[*rows, num_noise]``: the random numbers of ``rows`` actions, drawn at once."""

    @abstractmethod
    def act(self, inputs: Floats, noise: Floats | None) -> Columns:
        """Actions by column, ``[N, ...]`` in the space's dtypes: samples, or the modes where ``noise`` is None.

        Args:
            inputs: float32 ``[N, num_inputs]``.
            noise: float32 ``[N, num_noise]`` from `noise`; the same noise and inputs give the same actions.
        """

    @abstractmethod
    def logp(self, inputs: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        """``[...]``: the log-probability (log-density) of the actions, given by column."""

    @abstractmethod
    def entropy(self, inputs: Tensor) -> Tensor:
        """``[...]``: the (differential) entropy."""

    @abstractmethod
    def kl(self, p_inputs: Tensor, q_inputs: Tensor) -> Tensor:
        """``[...]``: the divergence KL(p || q)."""
