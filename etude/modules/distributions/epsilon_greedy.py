# SPDX-License-Identifier: Apache-2.0
"""Epsilon-greedy choices of a Discrete action; the inputs are the values of the choices."""

from collections.abc import Mapping

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from etude.columns import Columns
from etude.modules.distributions.base import FORBIDDEN, Distribution, Floats, Logits

_ALLOWED_ABOVE = FORBIDDEN / 2


class EpsilonGreedy(Distribution):
    """The best of ``n`` choices of a Discrete space; with probability ``epsilon``, any of them alike (the best, too).

    Inputs: ``n`` values; what an action mask forbids (`FORBIDDEN`) is never chosen. Where several are best, the first
    is taken. The entropy and the divergence are those of these probabilities.

    Attributes:
        epsilon: 0 to 1; may be set at any time.
    """

    def __init__(self, space: spaces.Discrete, root: str, epsilon: float = 0.0) -> None:
        n = int(space.n)
        super().__init__(space, root, num_inputs=n, num_noise=2, logits=[Logits(0, n, True)])
        self.epsilon = epsilon
        self._name = root
        self._start = int(space.start)
        self._dtype = np.dtype(space.dtype)

    def noise(self, rng: np.random.Generator, rows: tuple[int, ...]) -> Floats:
        """Uniform numbers ``[*rows, 2]`` in [0, 1): whether to take any choice, and which."""
        return rng.random((*rows, 2), dtype=np.float32)

    def act(self, inputs: Floats, noise: Floats | None) -> Columns:
        """The choices ``[N]``; `Distribution.act`."""
        chosen = inputs.argmax(1)
        if noise is not None:
            rows = np.flatnonzero(noise[:, 0] < self.epsilon)
            if len(rows):
                allowed = inputs[rows] > _ALLOWED_ABOVE
                counts = np.count_nonzero(allowed, axis=1)
                which = (noise[rows, 1].astype(np.float64) * counts).astype(np.int64)
                chosen[rows] = (allowed.cumsum(1) > which[:, None]).argmax(1)
        if self._start:
            chosen += self._start
        return {self._name: chosen.astype(self._dtype, copy=False)}

    def probabilities(self, inputs: Tensor) -> Tensor:
        """``[..., n]``: the probability of each choice."""
        allowed = inputs > _ALLOWED_ABOVE
        any_of_them = allowed.float() / allowed.sum(-1, keepdim=True).clamp(min=1)
        best = torch.zeros_like(any_of_them).scatter_(-1, inputs.argmax(-1, keepdim=True), 1.0)
        return self.epsilon * any_of_them + (1.0 - self.epsilon) * best

    def index_of(self, action: Tensor) -> Tensor:
        """int64 ``[...]``: the positions of actions among the inputs."""
        index = action.long()
        return index - self._start if self._start else index

    def logp(self, inputs: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        """log probability of the choice; `Distribution.logp`."""
        index = self.index_of(action[self._name]).unsqueeze(-1)
        return self.probabilities(inputs).gather(-1, index).squeeze(-1).log()

    def entropy(self, inputs: Tensor) -> Tensor:
        """Between 0 and log(n); `Distribution.entropy`."""
        p = self.probabilities(inputs)
        return -torch.xlogy(p, p).sum(-1)

    def kl(self, p_inputs: Tensor, q_inputs: Tensor) -> Tensor:
        """KL(p || q), infinite where q never makes a choice that p makes; `Distribution.kl`."""
        p, q = self.probabilities(p_inputs), self.probabilities(q_inputs)
        return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)
