# SPDX-License-Identifier: Apache-2.0
"""Action distributions: NumPy or torch while acting, torch while learning, one object for each action space. Also
action masks, which say which choices an observation allows."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from etude.columns import ACTION, ACTION_MASK, OBS_MASK, Columns
from etude.errors import EnvError, ModuleError, SpaceError
from etude.experience.arrays import Array, Constant, cast, clip, copied, library
from etude.spaces import Flattener, Space, leaf_shape, leaves

Floats: TypeAlias = NDArray[np.float32]

FORBIDDEN = -1e30
"""The logit of a forbidden choice: its probability is 0 after softmax, and since it is finite, 0 * log(0) stays 0."""

ALLOWED_ABOVE = FORBIDDEN / 2
"""Logits above this belong to allowed choices."""

LOG_STD_RANGE = (-20.0, 2.0)
"""The range to which a squashed Gaussian's log standard deviations are clamped (code of Haarnoja et al. 2018)."""

# float32 draws are multiples of about 2**-23, so an exact zero stands for about half of that.
_SMALLEST = np.float32(2.0**-24)
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_SPACINGS = 16
"""Number of floating-point spacings from a bound within which actions count as being at the bound: tanh maps many
arguments to these numbers."""


class Logits(NamedTuple):
    """A range of inputs that are logits."""

    start: int
    """The position of the first one."""
    size: int
    exclusive: bool
    """True: exactly one of them is chosen, so at least one must be allowed. False: each is a separate choice."""
    copies: int = 1
    """Number of inputs per choice: the whole list of choices is repeated this many times."""


class Distribution(ABC):
    """A family of action distributions over one action space. It has no state.

    Acting (`act`) works on NumPy arrays, and on tensors where observations are tensors. Learning (`logp`, `entropy`,
    `kl`) is torch and differentiable. The parameters of one distribution are the last axis of ``inputs``; for learning,
    any axes may come before it (``[B]`` or ``[B, T]``). Logarithms are natural, densities are with respect to the
    action's own units.

    Attributes:
        num_inputs: The number of parameters of the distribution of one action.
        num_noise: The number of random numbers needed to sample one action.
        log_std: int64: the positions in ``inputs`` of logarithms of standard deviations.
        logits: The ``inputs`` that are logits, in order; an action mask applies to these.
        flatten: Splits a nested action into columns.
    """

    head_gain: ClassVar[float] = 0.01
    """The gain of the built-in network's layer that computes ``inputs``. Small: at first, all actions are about equally
    likely."""

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
        self._name = root
        self._shape: tuple[int, ...] = space.shape or ()
        self._dtype = np.dtype(space.dtype)

    @abstractmethod
    def noise(self, rng: np.random.Generator, rows: tuple[int, ...]) -> Floats:
        """Random numbers with which to sample ``rows`` actions, float32 ``[*rows, num_noise]``."""

    @abstractmethod
    def act(self, inputs: Array, noise: Array | None) -> dict[str, Any]:
        """Actions by column, ``[N, ...]`` in the space's dtypes: samples, or modes if ``noise`` is None.

        Args:
            inputs: float32 ``[N, num_inputs]``, a NumPy array or a tensor; the actions are of the same kind and device.
            noise: float32 ``[N, num_noise]`` from `noise` or `noise_tensor`; the same noise and inputs give the same
                actions.
        """

    def noise_tensor(self, generator: torch.Generator, rows: int) -> Tensor:
        """Like `noise`, from torch's random numbers: float32 ``[rows, num_noise]`` on the generator's device."""
        raise ModuleError(
            f"{type(self).__name__} can't act in an env of tensors, since it has no `noise_tensor`: write this method, "
            "and let `act` work on tensors, too (see `etude.modules.Distribution`)."
        )

    @abstractmethod
    def logp(self, inputs: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        """The log-probability (log-density) of the actions, given by column: ``[...]``."""

    @abstractmethod
    def entropy(self, inputs: Tensor) -> Tensor:
        """The (differential) entropy, ``[...]``."""

    @abstractmethod
    def kl(self, p_inputs: Tensor, q_inputs: Tensor) -> Tensor:
        """The divergence KL(p || q), ``[...]``."""


# -- choices: the inputs are logits, or values -----------------------------------------------------------------------


class Choices(Distribution):
    """Base class of distributions that sample by the Gumbel-max trick: argmax(logits + Gumbel noise)."""

    def noise(self, rng: np.random.Generator, rows: tuple[int, ...]) -> Floats:
        """Gumbel noise ``[*rows, num_noise]``."""
        draws = rng.standard_exponential((*rows, self.num_noise), dtype=np.float32)
        np.maximum(draws, _SMALLEST, out=draws)
        np.log(draws, out=draws)
        return np.negative(draws, out=draws)

    def noise_tensor(self, generator: torch.Generator, rows: int) -> Tensor:
        draws = torch.empty((rows, self.num_noise), device=generator.device).exponential_(generator=generator)
        return draws.clamp_(min=float(_SMALLEST)).log_().neg_()


class Categorical(Choices):
    """One of ``n`` choices of a Discrete space. Inputs: ``n`` logits, not normalised.

    The entropy is between 0 and log(n).
    """

    def __init__(self, space: spaces.Discrete, root: str) -> None:
        n = int(space.n)
        super().__init__(space, root, num_inputs=n, num_noise=n, logits=[Logits(0, n, True)])
        self._start = int(space.start)
        self._convert = self._dtype != np.int64

    def act(self, inputs: Array, noise: Array | None) -> dict[str, Any]:
        return self._chosen((inputs if noise is None else inputs + noise).argmax(1))

    def _chosen(self, index: Array) -> dict[str, Any]:
        """The actions at these positions in the inputs."""
        chosen = cast(index, self._dtype) if self._convert else index
        if self._start:
            chosen += self._start
        return {self._name: chosen}

    def index_of(self, action: Tensor) -> Tensor:
        """The positions of actions in the inputs, int64 ``[...]``."""
        index = action.long()
        return index - self._start if self._start else index

    def logp(self, inputs: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        # one fused operation, forward and backward, instead of log_softmax and gather
        inputs = inputs.movedim(-1, 1) if inputs.dim() > 2 else inputs
        return -F.cross_entropy(inputs, self.index_of(action[self._name]), reduction="none")

    def entropy(self, inputs: Tensor) -> Tensor:
        logp = torch.log_softmax(inputs, -1)
        return -(logp.exp() * logp).sum(-1)

    def kl(self, p_inputs: Tensor, q_inputs: Tensor) -> Tensor:
        p, q = torch.log_softmax(p_inputs, -1), torch.log_softmax(q_inputs, -1)
        return (p.exp() * (p - q)).sum(-1)


class EpsilonGreedy(Categorical):
    """Epsilon-greedy choice of a Discrete space: the best, or with probability ``epsilon`` a uniformly random one.

    Inputs: ``n`` values. Choices that an action mask forbids (`FORBIDDEN`) are never made. If several values are best,
    the first is chosen. Entropy and divergence are those of these probabilities; the divergence is infinite if p makes
    a choice that q never makes.

    Attributes:
        epsilon: Probability of a random choice, 0 to 1; may be set at any time.
    """

    head_gain = 0.3
    """Inputs are values. If all are near zero at first, nothing distinguishes actions until a target network has moved:
    with the settings of its preset, DQN then does not learn Acrobot in 40,000 steps. Of 0.01, 0.1, 0.3 and 1, 0.3 was
    the best compromise between Acrobot and CartPole."""

    def __init__(self, space: spaces.Discrete, root: str, epsilon: float = 0.0) -> None:
        super().__init__(space, root)
        self.num_noise = 2
        self.epsilon = epsilon

    def noise(self, rng: np.random.Generator, rows: tuple[int, ...]) -> Floats:
        """Uniform numbers ``[*rows, 2]`` in [0, 1): whether to choose randomly, and which choice."""
        return rng.random((*rows, 2), dtype=np.float32)

    def act(self, inputs: Array, noise: Array | None) -> dict[str, Any]:
        chosen = inputs.argmax(1)
        if isinstance(noise, Tensor):
            allowed = inputs > ALLOWED_ABOVE
            which = (noise[:, 1].double() * allowed.sum(1)).long()
            any_of_them = (allowed.cumsum(1) > which[:, None]).int().argmax(1)
            chosen = torch.where(noise[:, 0] < self.epsilon, any_of_them, chosen)
        elif noise is not None and len(rows := np.flatnonzero(noise[:, 0] < self.epsilon)):
            allowed = inputs[rows] > ALLOWED_ABOVE
            counts = np.count_nonzero(allowed, axis=1)
            which = (noise[rows, 1].astype(np.float64) * counts).astype(np.int64)
            chosen[rows] = (allowed.cumsum(1) > which[:, None]).argmax(1)
        return self._chosen(chosen)

    def noise_tensor(self, generator: torch.Generator, rows: int) -> Tensor:
        return torch.rand((rows, 2), generator=generator, device=generator.device)

    def probabilities(self, inputs: Tensor) -> Tensor:
        """The probability of each choice, ``[..., n]``."""
        allowed = inputs > ALLOWED_ABOVE
        any_of_them = allowed.float() / allowed.sum(-1, keepdim=True).clamp(min=1)
        best = torch.zeros_like(any_of_them).scatter_(-1, inputs.argmax(-1, keepdim=True), 1.0)
        return self.epsilon * any_of_them + (1.0 - self.epsilon) * best

    def logp(self, inputs: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        index = self.index_of(action[self._name]).unsqueeze(-1)
        return self.probabilities(inputs).gather(-1, index).squeeze(-1).log()

    def entropy(self, inputs: Tensor) -> Tensor:
        p = self.probabilities(inputs)
        return -torch.xlogy(p, p).sum(-1)

    def kl(self, p_inputs: Tensor, q_inputs: Tensor) -> Tensor:
        p, q = self.probabilities(p_inputs), self.probabilities(q_inputs)
        return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)


class MultiCategorical(Choices):
    """Independent choices of a MultiDiscrete space. Inputs: the logits of all of them, concatenated."""

    def __init__(self, space: spaces.MultiDiscrete, root: str) -> None:
        sizes = space.nvec.reshape(-1).astype(np.int64)
        total = int(sizes.sum())
        first = np.cumsum(sizes) - sizes
        logits = [Logits(int(start), int(size), True) for start, size in zip(first, sizes, strict=True)]
        super().__init__(space, root, num_inputs=total, num_noise=total, logits=logits)
        self._start = Constant(np.asarray(space.start, np.int64))
        self._groups = (len(sizes), int(sizes.max()))
        # If choices differ in size, each is padded to the largest: position `total` is the padding.
        place = np.arange(self._groups[1])
        self._index = Constant(np.where(place < sizes[:, None], first[:, None] + place, total).reshape(-1))
        self._padded = bool((sizes != sizes[0]).any())

    def act(self, inputs: Array, noise: Array | None) -> dict[str, Any]:
        logits = inputs if noise is None else inputs + noise
        chosen = self._grouped(logits).argmax(-1).reshape(inputs.shape[0], *self._shape)
        return {self._name: cast(chosen + self._start.like(chosen), self._dtype)}

    def _grouped(self, inputs: Array) -> Array:
        """The inputs grouped by choice, ``[..., groups, widest]``."""
        lead = inputs.shape[:-1]
        if self._padded and isinstance(inputs, Tensor):
            inputs = F.pad(inputs, (0, 1), value=FORBIDDEN).index_select(-1, self._index.like(inputs))
        elif self._padded:
            padding = np.full((*lead, 1), FORBIDDEN, np.float32)
            inputs = np.concatenate((inputs, padding), axis=-1).take(self._index.value, axis=-1)
        return inputs.reshape(*lead, *self._groups)

    def _log_softmax(self, inputs: Tensor) -> Tensor:
        return torch.log_softmax(self._grouped(inputs), -1)

    def logp(self, inputs: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        lead = inputs.shape[:-1]
        index = (action[self._name].long() - self._start.like(inputs)).reshape(*lead, self._groups[0], 1)
        return self._log_softmax(inputs).gather(-1, index).squeeze(-1).sum(-1)

    def entropy(self, inputs: Tensor) -> Tensor:
        logp = self._log_softmax(inputs)
        return -(logp.exp() * logp).sum((-2, -1))

    def kl(self, p_inputs: Tensor, q_inputs: Tensor) -> Tensor:
        p, q = self._log_softmax(p_inputs), self._log_softmax(q_inputs)
        return (p.exp() * (p - q)).sum((-2, -1))


class Bernoulli(Distribution):
    """Independent bits of a MultiBinary space. Inputs: one logit per bit; sigmoid(logit) is the probability of 1."""

    def __init__(self, space: spaces.MultiBinary, root: str) -> None:
        size = int(np.prod(space.shape))
        super().__init__(space, root, num_inputs=size, num_noise=size, logits=[Logits(0, size, False)])

    def noise(self, rng: np.random.Generator, rows: tuple[int, ...]) -> Floats:
        """Logistic noise ``[*rows, bits]``."""
        draws = rng.random((*rows, self.num_noise), dtype=np.float32)
        np.maximum(draws, _SMALLEST, out=draws)
        result: Floats = np.log(draws)
        np.negative(draws, out=draws)
        result -= np.log1p(draws, out=draws)
        return result

    def act(self, inputs: Array, noise: Array | None) -> dict[str, Any]:
        bits = cast(inputs > (0.0 if noise is None else noise), self._dtype)
        return {self._name: bits.reshape(inputs.shape[0], *self._shape)}

    def noise_tensor(self, generator: torch.Generator, rows: int) -> Tensor:
        draws = torch.rand((rows, self.num_noise), generator=generator, device=generator.device)
        draws.clamp_(min=float(_SMALLEST))
        return draws.log() - torch.log1p(-draws)

    def logp(self, inputs: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        bits = action[self._name].reshape(inputs.shape).to(inputs.dtype)
        return -F.binary_cross_entropy_with_logits(inputs, bits, reduction="none").sum(-1)

    def entropy(self, inputs: Tensor) -> Tensor:
        return (F.softplus(inputs) - inputs * torch.sigmoid(inputs)).sum(-1)

    def kl(self, p_inputs: Tensor, q_inputs: Tensor) -> Tensor:
        parts = torch.sigmoid(p_inputs) * (p_inputs - q_inputs) + F.softplus(q_inputs) - F.softplus(p_inputs)
        return parts.sum(-1)


# -- numbers: the inputs are means, then logarithms of standard deviations -------------------------------------------


def _normal_logp(mean: Tensor, log_std: Tensor, value: Tensor) -> Tensor:
    scaled = (value - mean) * torch.exp(-log_std)
    return -(0.5 * scaled.square() + log_std).sum(-1) - mean.shape[-1] * _HALF_LOG_2PI


def _log_ndtr(x: Tensor) -> Tensor:
    """The logarithm of the standard normal distribution function; torch's own has no right gradient below -5e5."""
    near, far = x.clamp(min=-1000.0), x.clamp(max=-1000.0)
    tail = -0.5 * far.square() - torch.log(-far) - _HALF_LOG_2PI  # Abramowitz & Stegun 1964, 26.2.12
    return torch.where(x < -1000.0, tail, torch.special.log_ndtr(near))


def check_no_integers(space: Space, root: str = ACTION) -> None:
    """Raise a SpaceError if the space has a Box of integers or bools, whose actions no policy draws."""
    for name, leaf in leaves(space, root).items():
        if isinstance(leaf, spaces.Box) and np.dtype(leaf.dtype).kind != "f":
            raise SpaceError(
                f"`{name}` is a Box of {np.dtype(leaf.dtype)}, but only Boxes of floats have an action distribution. "
                "Use a Discrete or MultiDiscrete space, or a Box of float32 and round in the env."
            )


class DiagGaussian(Distribution):
    """Independent normal variables for a Box of any shape. Inputs: all means, then all log standard deviations.

    Actions may be outside the bounds of the Box; a connector clips or rescales them for the env.

    Raises:
        SpaceError: the Box has an integer dtype, or holds no number.
    """

    def __init__(self, space: spaces.Box, root: str) -> None:
        if not np.prod(space.shape):
            raise SpaceError(f"`{root}` is {space}, which holds no number, so there is nothing to choose.")
        check_no_integers(space, root)
        self._size = size = int(np.prod(space.shape))
        super().__init__(space, root, num_inputs=2 * size, num_noise=size, log_std=range(size, 2 * size))

    def noise(self, rng: np.random.Generator, rows: tuple[int, ...]) -> Floats:
        """Standard normal noise ``[*rows, size]``."""
        return rng.standard_normal((*rows, self._size), dtype=np.float32)

    def act(self, inputs: Array, noise: Array | None) -> dict[str, Any]:
        action = self._drawn(inputs, noise).reshape(inputs.shape[0], *self._shape)
        return {self._name: cast(action, self._dtype)}

    def noise_tensor(self, generator: torch.Generator, rows: int) -> Tensor:
        return torch.randn((rows, self._size), generator=generator, device=generator.device)

    def _drawn(self, inputs: Array, noise: Array | None) -> Array:
        """Samples of the normal variables, ``[N, size]``; the means without noise."""
        mean, log_std = self._normal(inputs)
        return copied(mean) if noise is None else mean + library(mean).exp(log_std) * noise

    def _normal(self, inputs: Array) -> tuple[Array, Array]:
        """Means and log standard deviations, ``[..., size]`` each."""
        if isinstance(inputs, Tensor):
            mean, log_std = inputs.chunk(2, -1)
            return mean, log_std
        return inputs[:, : self._size], inputs[:, self._size :]

    def logp(self, inputs: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        mean, log_std = self._normal(inputs)
        return _normal_logp(mean, log_std, action[self._name].reshape(mean.shape).to(mean.dtype))

    def entropy(self, inputs: Tensor) -> Tensor:
        _, log_std = self._normal(inputs)
        entropy: Tensor = log_std.sum(-1) + self._size * (0.5 + _HALF_LOG_2PI)
        return entropy

    def kl(self, p_inputs: Tensor, q_inputs: Tensor) -> Tensor:
        p_mean, p_log_std = self._normal(p_inputs)
        q_mean, q_log_std = self._normal(q_inputs)
        change = q_log_std - p_log_std
        shift = (p_mean - q_mean) * torch.exp(-q_log_std)
        divergence: Tensor = (change + 0.5 * (torch.exp(-2.0 * change) + shift.square() - 1.0)).sum(-1)
        return divergence

    def rsample(self, inputs: Tensor, noise: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Actions ``[..., *shape]`` by column and their log-density ``[...]``, both differentiable in ``inputs``.

        Args:
            inputs: ``[..., 2 * size]``.
            noise: ``[..., size]`` standard normal numbers.
        """
        mean, log_std = self._normal(inputs)
        drawn = mean + torch.exp(log_std) * noise
        return {self._name: drawn.reshape(*drawn.shape[:-1], *self._shape)}, _normal_logp(mean, log_std, drawn)


class SquashedGaussian(DiagGaussian):
    """Normal variables u, squashed by tanh and scaled to a Box's bounds: low + (high - low) (tanh(u) + 1) / 2.

    Inputs: all means of u, then all log standard deviations of u, clamped to `LOG_STD_RANGE`. The density follows
    Haarnoja et al. 2018 (arXiv 1801.01290), appendix C, with log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), which
    is exact even if tanh(u) rounds to 1. Actions within 16 floating-point spacings of a bound can't be distinguished:
    instead of a density, the log-probability is that of all of them together. For float32 between -1 and 1, that is P(u
    > 7.25) at the upper bound. The entropy has no closed form and is integrated by the trapezoidal rule, to within
    0.001 for each number. The divergence is that of the normal variables, since tanh is a bijection.

    Raises:
        SpaceError: a bound is infinite, two bounds coincide, or the Box has an integer dtype.
    """

    def __init__(self, space: spaces.Box, root: str) -> None:
        super().__init__(space, root)
        fine = np.isfinite(space.low) & np.isfinite(space.high) & (space.low < space.high)
        if not fine.all():
            raise SpaceError(
                f"`{root}` is {space}: squashed actions need finite bounds with a range between them, but index "
                f"{np.argwhere(~fine)[0].tolist()} has none. Give the env's action space such bounds, add the "
                "connector `rescale_action` where bounds coincide, or don't squash if the algorithm allows it. If "
                "you learn from a recording that does not state its spaces: set `env`, whose spaces it gets, or open "
                "it with Recording.open(path, action_space=...)."
            )
        self._low, self._high = space.low, space.high
        low, high = space.low.reshape(-1).astype(np.float64), space.high.reshape(-1).astype(np.float64)
        self._middle, self._half = (low + high) / 2, (high - low) / 2
        self._range = tuple(map(Constant, (self._middle, self._half, self._low, self._high)))
        largest = np.maximum(np.abs(space.low), np.abs(space.high)).reshape(-1)
        spacing = (largest - np.nextafter(largest, np.zeros_like(largest))).astype(np.float64)
        self._edge = 1.0 - np.clip(_SPACINGS * spacing / self._half, 1e-6, 0.5)
        # With equal distances h, the error falls as exp(-pi^2 / (std h)): tanh has poles at i pi / 2.
        nodes = np.linspace(-5.0, 5.0, 64)
        weights = np.exp(-np.square(nodes) / 2)
        self._nodes, self._weights = nodes.reshape(-1, 1), weights / weights.sum()

    def act(self, inputs: Array, noise: Array | None) -> dict[str, Any]:
        middle, half, low, high = (part.like(inputs) for part in self._range)
        action = (middle + half * library(inputs).tanh(self._drawn(inputs, noise))).reshape(
            inputs.shape[0], *self._shape
        )
        return {self._name: clip(cast(action, self._dtype), low, high)}

    def _normal(self, inputs: Array) -> tuple[Array, Array]:
        mean, log_std = super()._normal(inputs)
        return mean, clip(log_std, *LOG_STD_RANGE)

    def _log_slope(self, drawn: Tensor) -> Tensor:
        """log |d action / d u| for each number."""
        half = torch.as_tensor(self._half, dtype=drawn.dtype, device=drawn.device)
        return torch.log(half) + 2.0 * (math.log(2.0) - drawn - F.softplus(-2.0 * drawn))

    def logp(self, inputs: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        mean, log_std = self._normal(inputs)
        middle, half = (torch.as_tensor(x, device=inputs.device) for x in (self._middle, self._half))
        scaled = (action[self._name].reshape(mean.shape).double() - middle) / half
        edge = torch.as_tensor(self._edge, device=inputs.device)
        drawn = torch.atanh(scaled.clamp(-edge, edge)).to(mean.dtype)
        off = (drawn - mean) * torch.exp(-log_std)
        inside: Tensor = -0.5 * off.square() - log_std - _HALF_LOG_2PI - self._log_slope(drawn)
        is_inside = scaled.abs() < edge
        if not torch.compiler.is_compiling() and inputs.device.type == "cpu" and bool(is_inside.all()):
            return inside.sum(-1)  # as almost always: the rest would double the time
        beyond = (torch.sign(drawn) * mean - torch.atanh(edge).to(mean.dtype)) * torch.exp(-log_std)
        return torch.where(is_inside, inside, _log_ndtr(torch.where(is_inside, 0.0, beyond))).sum(-1)

    def entropy(self, inputs: Tensor) -> Tensor:
        """H(u) + E[log |d action / d u|]."""
        mean, log_std = self._normal(inputs)
        nodes, weights = (
            torch.as_tensor(x, dtype=mean.dtype, device=mean.device) for x in (self._nodes, self._weights)
        )
        drawn = mean.unsqueeze(-2) + torch.exp(log_std).unsqueeze(-2) * nodes
        return super().entropy(inputs) + torch.einsum("...kd,k->...", self._log_slope(drawn), weights)

    def rsample(self, inputs: Tensor, noise: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        mean, log_std = self._normal(inputs)
        drawn = mean + torch.exp(log_std) * noise
        middle, half = (torch.as_tensor(x, dtype=mean.dtype, device=mean.device) for x in (self._middle, self._half))
        action = (middle + half * torch.tanh(drawn)).reshape(*drawn.shape[:-1], *self._shape)
        return {self._name: action}, _normal_logp(mean, log_std, drawn) - self._log_slope(drawn).sum(-1)


# -- Dict and Tuple --------------------------------------------------------------------------------------------------


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
        return np.concatenate([part.noise(rng, rows) for part, _, _ in self._parts], axis=-1)

    def act(self, inputs: Array, noise: Array | None) -> dict[str, Any]:
        action: dict[str, Any] = {}
        for part, of_inputs, of_noise in self._parts:
            action |= part.act(inputs[:, of_inputs], None if noise is None else noise[:, of_noise])
        return action

    def noise_tensor(self, generator: torch.Generator, rows: int) -> Tensor:
        return torch.cat([part.noise_tensor(generator, rows) for part, _, _ in self._parts], -1)

    def logp(self, inputs: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        return reduce(torch.add, (part.logp(inputs[..., at], action) for part, at, _ in self._parts))

    def entropy(self, inputs: Tensor) -> Tensor:
        return reduce(torch.add, (part.entropy(inputs[..., at]) for part, at, _ in self._parts))

    def kl(self, p_inputs: Tensor, q_inputs: Tensor) -> Tensor:
        return reduce(torch.add, (part.kl(p_inputs[..., at], q_inputs[..., at]) for part, at, _ in self._parts))


def distribution_for(action_space: Space, *, squash: bool = False, root: str = ACTION) -> Distribution:
    """The distribution for an action space.

    Args:
        action_space: Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of them.
        squash: Keep the actions of Boxes inside their bounds with tanh; otherwise they are unbounded.
        root: The first part of the names of the action's columns.

    Raises:
        SpaceError: there is no distribution for a part of the space; the message names the part.
    """
    parts = [_leaf_distribution(leaf, name, squash) for name, leaf in leaves(action_space, root).items()]
    if isinstance(action_space, spaces.Dict | spaces.Tuple):
        return Composite(action_space, root, parts)
    return parts[0]


def _leaf_distribution(leaf: Space, name: str, squash: bool) -> Distribution:
    if isinstance(leaf, spaces.Discrete):
        return Categorical(leaf, name)
    if isinstance(leaf, spaces.MultiDiscrete):
        return MultiCategorical(leaf, name)
    if isinstance(leaf, spaces.MultiBinary):
        return Bernoulli(leaf, name)
    assert isinstance(leaf, spaces.Box)
    return SquashedGaussian(leaf, name) if squash else DiagGaussian(leaf, name)


# -- masks --------------------------------------------------------------------------------------------------------


class ActionMask:
    """Applies the part `action_mask` of an observation to the inputs of a distribution.

    An entry of 0 forbids one choice: its logit becomes `FORBIDDEN`. Samples, modes, log-probabilities, entropies and
    divergences are then those of the distribution renormalised over the allowed choices, and no gradient flows to the
    forbidden ones (Huang & Ontañón 2022, "A closer look at invalid action masking in policy gradient algorithms", 4).
    The mask has an entry for each choice of the action's discrete parts, in order: ``n`` for a Discrete, the sum of
    ``nvec`` for a MultiDiscrete, one for each bit of a MultiBinary (0: the bit stays 0), none for a Box.

    Args:
        space: The space of the mask: MultiBinary, or a Box or MultiDiscrete of zeros and ones, of any shape.
        dist: The distribution whose inputs are masked.

    Raises:
        ModuleError: the space is not one of a mask, or does not fit the distribution.
    """

    def __init__(self, space: Space, dist: Distribution) -> None:
        sizes = np.array([run.size for run in dist.logits], np.int64)
        self.size = int(sizes.sum())
        _check_space(space, dist, self.size)
        self._axes = len(leaf_shape(space))
        starts = np.cumsum(sizes) - sizes
        entry = np.full(dist.num_inputs, self.size)  # of each input; the last stands for inputs that are not masked
        for start, run in zip(starts, dist.logits, strict=True):
            entry[run.start : run.start + run.copies * run.size] = np.tile(start + np.arange(run.size), run.copies)
        self._entry = None if np.array_equal(entry, np.arange(self.size)) else Constant(entry)
        self._sizes: list[int] = sizes.tolist()
        self._starts = starts
        self._exclusive = np.array([run.exclusive for run in dist.logits])

    def apply(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """``inputs`` ``[..., num_inputs]`` masked by ``mask`` ``[..., *shape of its space]``."""
        forbidden = mask.reshape(*mask.shape[: mask.dim() - self._axes], self.size) == 0
        if self._entry is not None:
            forbidden = F.pad(forbidden, (0, 1))[..., self._entry.like(inputs)]
        return inputs.masked_fill(forbidden, FORBIDDEN)

    def apply_in_place(self, inputs: Floats, obs: Columns, ends: NDArray[np.bool_] | None) -> None:
        """Mask ``inputs`` in place with NumPy, while acting; raises the errors of `check`."""
        forbidden = self.check(obs, ends)
        if self._entry is not None:
            forbidden = np.append(forbidden, np.zeros((len(forbidden), 1), bool), 1).take(self._entry.value, axis=1)
        np.putmask(inputs, forbidden, FORBIDDEN)

    def check(self, obs: Columns, ends: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
        """bool ``[N, size]``: the forbidden choices, after checking that each row has an allowed one.

        Raises:
            EnvError: a row that is not in ``ends`` has no allowed choice; the message names the row.
        """
        mask = obs[OBS_MASK]
        forbidden: NDArray[np.bool_] = mask.reshape(len(mask), self.size) == 0
        none: NDArray[np.bool_] = np.logical_and.reduceat(forbidden, self._starts, axis=1)
        if none.any():
            self._refuse(none & self._exclusive, ends)
        return forbidden

    def allows_nothing(self, mask: Tensor) -> Tensor:
        """Where a mandatory choice has no allowed option, bool ``[N, choices]``."""
        allowed = mask.reshape(len(mask), self.size) != 0
        runs = torch.split(allowed, self._sizes, 1)
        found = [~run.any(1) for run, one in zip(runs, self._exclusive, strict=True) if one]
        return torch.stack(found, 1) if found else allowed[:, :0]

    def _refuse(self, none: NDArray[np.bool_], ends: NDArray[np.bool_] | None) -> None:
        if ends is not None:
            none = none & ~ends[:, None]
        if not none.any():
            return
        row, run = (int(i) for i in np.argwhere(none)[0])
        first, last = int(self._starts[run]), int(np.append(self._starts, self.size)[run + 1]) - 1
        raise EnvError(
            f"the env's `{OBS_MASK}` allows nothing in row {row} of {len(none)}: its entries {first} to {last} are all "
            "0. Each choice needs at least one 1 while the episode goes on; end the episode if no action is possible."
        )


def action_mask(obs_space: Space, dist: Distribution) -> ActionMask | None:
    """The mask in the observations of ``obs_space`` if it is a Dict with the key `action_mask`; otherwise None.

    Raises:
        ModuleError: see `ActionMask`.
    """
    if isinstance(obs_space, spaces.Dict) and ACTION_MASK in obs_space.spaces:
        return ActionMask(obs_space.spaces[ACTION_MASK], dist)
    return None


def _check_space(space: Space, dist: Distribution, size: int) -> None:
    parts = ", ".join(f"`{name}` {leaf}" for name, leaf in dist.flatten.leaves.items())
    if not size:
        raise ModuleError(
            f"the observation has the key {ACTION_MASK!r}, but the action {parts} has no choices that a mask could "
            "forbid: rename or remove the key."
        )
    is_zeros_and_ones = (
        isinstance(space, spaces.MultiBinary)
        or (isinstance(space, spaces.MultiDiscrete) and bool((space.nvec == 2).all() and (space.start == 0).all()))
        or (isinstance(space, spaces.Box) and bool((space.low >= 0).all() and (space.high <= 1).all()))
    )
    if not is_zeros_and_ones or int(np.prod(leaf_shape(space))) != size:
        raise ModuleError(
            f"`{OBS_MASK}` is {space}. It must hold {size} numbers that are 0 or 1, one for each choice of {parts}, in "
            "this order: 1 where it is allowed, 0 where not (none for a Box). Connectors that change the mask can't be "
            "used."
        )
