# SPDX-License-Identifier: Apache-2.0
"""Distributions over Discrete, MultiDiscrete and MultiBinary actions; the inputs are logits."""

from collections.abc import Mapping

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional as F

from etude.columns import Columns
from etude.modules.distributions.base import FORBIDDEN, Distribution, Floats, Logits

# float32 draws come in steps of about 2**-23, so an exact zero stands for about half of one step.
_SMALLEST = np.float32(2.0**-24)


def _gumbel(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    draws = rng.standard_exponential(shape, dtype=np.float32)
    np.maximum(draws, _SMALLEST, out=draws)
    np.log(draws, out=draws)
    return np.negative(draws, out=draws)


def _logistic(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    draws = rng.random(shape, dtype=np.float32)
    np.maximum(draws, _SMALLEST, out=draws)
    result: Floats = np.log(draws)
    np.negative(draws, out=draws)
    result -= np.log1p(draws, out=draws)
    return result


class Categorical(Distribution):
    """One of ``n`` choices of a Discrete space. Inputs: ``n`` logits, not normalised.

    Sampling is the Gumbel-max trick: argmax(logits + Gumbel noise).
    """

    def __init__(self, space: spaces.Discrete, root: str) -> None:
        n = int(space.n)
        super().__init__(space, root, num_inputs=n, num_noise=n, logits=[Logits(0, n, True)])
        self._name = root
        self._start = int(space.start)
        self._dtype = np.dtype(space.dtype)
        self._convert = self._dtype != np.int64

    def noise(self, rng: np.random.Generator, rows: tuple[int, ...]) -> Floats:
        """Gumbel noise ``[*rows, n]``."""
        return _gumbel(rng, (*rows, self.num_noise))

    def act(self, inputs: Floats, noise: Floats | None) -> Columns:
        """The choices ``[N]``; `Distribution.act`."""
        chosen = (inputs if noise is None else inputs + noise).argmax(1)
        if self._convert:
            chosen = chosen.astype(self._dtype)
        if self._start:
            chosen += self._start
        return {self._name: chosen}

    def logp(self, inputs: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        """log softmax(inputs) at the action; `Distribution.logp`."""
        index = action[self._name].long()
        if self._start:
            index = index - self._start
        # one fused operation where log_softmax and gather would be two, forward and backward
        return -F.cross_entropy(inputs.movedim(-1, 1) if inputs.dim() > 2 else inputs, index, reduction="none")

    def entropy(self, inputs: Tensor) -> Tensor:
        """Between 0 and log(n); `Distribution.entropy`."""
        logp = torch.log_softmax(inputs, -1)
        return -(logp.exp() * logp).sum(-1)

    def kl(self, p_inputs: Tensor, q_inputs: Tensor) -> Tensor:
        """KL(p || q); `Distribution.kl`."""
        p, q = torch.log_softmax(p_inputs, -1), torch.log_softmax(q_inputs, -1)
        return (p.exp() * (p - q)).sum(-1)


class MultiCategorical(Distribution):
    """Independent choices of a MultiDiscrete space. Inputs: all their logits, one choice after the other."""

    def __init__(self, space: spaces.MultiDiscrete, root: str) -> None:
        sizes = space.nvec.reshape(-1).astype(np.int64)
        total = int(sizes.sum())
        first = np.cumsum(sizes) - sizes
        logits = [Logits(int(start), int(size), True) for start, size in zip(first, sizes, strict=True)]
        super().__init__(space, root, num_inputs=total, num_noise=total, logits=logits)
        self._name = root
        self._shape = space.nvec.shape
        self._start = np.asarray(space.start, np.int64)
        self._dtype = np.dtype(space.dtype)
        self._groups = (len(sizes), int(sizes.max()))
        # Where choices differ in size, each is padded to the widest: position `total` is the padding.
        place = np.arange(self._groups[1])
        self._index = np.where(place < sizes[:, None], first[:, None] + place, total).reshape(-1)
        self._padded = bool((sizes != sizes[0]).any())

    def noise(self, rng: np.random.Generator, rows: tuple[int, ...]) -> Floats:
        """Gumbel noise ``[*rows, sum of sizes]``."""
        return _gumbel(rng, (*rows, self.num_noise))

    def act(self, inputs: Floats, noise: Floats | None) -> Columns:
        """The choices ``[N, *shape]``; `Distribution.act`."""
        n = len(inputs)
        logits = inputs if noise is None else inputs + noise
        if self._padded:
            padding = np.full((n, 1), FORBIDDEN, np.float32)
            logits = np.concatenate((logits, padding), axis=1).take(self._index, axis=1)
        chosen = logits.reshape(n, *self._groups).argmax(2).reshape(n, *self._shape)
        chosen += self._start
        return {self._name: chosen.astype(self._dtype, copy=False)}

    def _log_softmax(self, inputs: Tensor) -> Tensor:
        lead = inputs.shape[:-1]
        if self._padded:
            index = torch.from_numpy(self._index).to(inputs.device)
            inputs = F.pad(inputs, (0, 1), value=FORBIDDEN).index_select(-1, index)
        return torch.log_softmax(inputs.reshape(*lead, *self._groups), -1)

    def logp(self, inputs: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        """The sum over the choices; `Distribution.logp`."""
        lead = inputs.shape[:-1]
        start = torch.from_numpy(self._start).to(inputs.device)
        index = (action[self._name].long() - start).reshape(*lead, self._groups[0], 1)
        return self._log_softmax(inputs).gather(-1, index).squeeze(-1).sum(-1)

    def entropy(self, inputs: Tensor) -> Tensor:
        """The sum over the choices; `Distribution.entropy`."""
        logp = self._log_softmax(inputs)
        return -(logp.exp() * logp).sum((-2, -1))

    def kl(self, p_inputs: Tensor, q_inputs: Tensor) -> Tensor:
        """The sum over the choices; `Distribution.kl`."""
        p, q = self._log_softmax(p_inputs), self._log_softmax(q_inputs)
        return (p.exp() * (p - q)).sum((-2, -1))


class Bernoulli(Distribution):
    """Independent bits of a MultiBinary space. Inputs: a logit for each; sigmoid(logit) is the probability of 1."""

    def __init__(self, space: spaces.MultiBinary, root: str) -> None:
        self._name = root
        self._shape = space.shape
        self._dtype = np.dtype(space.dtype)
        size = int(np.prod(self._shape))
        super().__init__(space, root, num_inputs=size, num_noise=size, logits=[Logits(0, size, False)])

    def noise(self, rng: np.random.Generator, rows: tuple[int, ...]) -> Floats:
        """Logistic noise ``[*rows, bits]``."""
        return _logistic(rng, (*rows, self.num_noise))

    def act(self, inputs: Floats, noise: Floats | None) -> Columns:
        """The bits ``[N, *shape]``; `Distribution.act`."""
        bits = (inputs > (0.0 if noise is None else noise)).astype(self._dtype)
        return {self._name: bits.reshape(len(inputs), *self._shape)}

    def logp(self, inputs: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        """The sum over the bits; `Distribution.logp`."""
        bits = action[self._name].reshape(inputs.shape).to(inputs.dtype)
        return -F.binary_cross_entropy_with_logits(inputs, bits, reduction="none").sum(-1)

    def entropy(self, inputs: Tensor) -> Tensor:
        """The sum over the bits; `Distribution.entropy`."""
        return (F.softplus(inputs) - inputs * torch.sigmoid(inputs)).sum(-1)

    def kl(self, p_inputs: Tensor, q_inputs: Tensor) -> Tensor:
        """The sum over the bits; `Distribution.kl`."""
        parts = torch.sigmoid(p_inputs) * (p_inputs - q_inputs) + F.softplus(q_inputs) - F.softplus(p_inputs)
        return parts.sum(-1)
