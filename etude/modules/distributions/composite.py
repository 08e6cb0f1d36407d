# SPDX-License-Identifier: Apache-2.0
"""A distribution over Dict and Tuple actions: independent parts."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

from etude.columns import Columns
from etude.modules.distributions.base import Distribution, Floats, Logits
from etude.spaces import Space


class Composite(Distribution):
    """Independent parts, in the order of the space's leaves. Inputs and noise are those of the parts, concatenated."""

    def __init__(self, space: Space, root: str, parts: Sequence[Distribution]) -> None:
        self._parts: list[tuple[Distribution, slice, slice]] = []
        inputs = noise = 0
        log_std: list[int] = []
        logits: list[Logits] = []
        for part in parts:
            log_std += [inputs + int(i) for i in part.log_std]
            logits += [run._replace(start=inputs + run.start) for run in part.logits]
            ends = inputs + part.num_inputs, noise + part.num_noise
            self._parts.append((part, slice(inputs, ends[0]), slice(noise, ends[1])))
            inputs, noise = ends
        super().__init__(space, root, num_inputs=inputs, num_noise=noise, log_std=log_std, logits=logits)

    def noise(self, rng: np.random.Generator, rows: tuple[int, ...]) -> Floats:
        """The parts' noise, concatenated; `Distribution.noise`."""
        return np.concatenate([part.noise(rng, rows) for part, _, _ in self._parts], axis=-1)

    def act(self, inputs: Floats, noise: Floats | None) -> Columns:
        """The columns of all parts; `Distribution.act`."""
        action: Columns = {}
        for part, of_inputs, of_noise in self._parts:
            action |= part.act(inputs[:, of_inputs], None if noise is None else noise[:, of_noise])
        return action

    def logp(self, inputs: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        """The sum over the parts; `Distribution.logp`."""
        return _sum(part.logp(inputs[..., at], action) for part, at, _ in self._parts)

    def entropy(self, inputs: Tensor) -> Tensor:
        """The sum over the parts; `Distribution.entropy`."""
        return _sum(part.entropy(inputs[..., at]) for part, at, _ in self._parts)

    def kl(self, p_inputs: Tensor, q_inputs: Tensor) -> Tensor:
        """The sum over the parts; `Distribution.kl`."""
        return _sum(part.kl(p_inputs[..., at], q_inputs[..., at]) for part, at, _ in self._parts)


def _sum(terms: Iterator[Tensor]) -> Tensor:
    total = next(terms)
    for term in terms:
        total = total + term
    return total
