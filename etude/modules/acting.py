# SPDX-License-Identifier: Apache-2.0
"""Actors: how modules act, with NumPy columns as inputs and outputs; and the built-in network's forward in NumPy.

The built-in network acts with NumPy on the memory of its torch parameters. Without dispatch and copies, this takes a
fifth to a twelfth of the time of eager torch. All other networks act through torch: see
`etude.modules.module.TorchActor`.
"""

from typing import Protocol, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from etude.columns import DIST_INPUTS, Columns
from etude.errors import ModuleError
from etude.experience.arrays import Array
from etude.modules.distributions import ActionMask, Distribution, Floats
from etude.modules.network import ACTIVATIONS, Image, Network, Numbers, Trunk

CHUNK = 1024
"""Rows per chunk of a large batch, so that the results of layers stay in the CPU cache."""

_ACROSS_AT_MOST = 128  # rows
_ACROSS_FROM = 1536  # rows times the widest layer
_NOISE_STEPS = 64
_NOISE_NUMBERS = 1 << 16  # the most random numbers drawn in advance


def as_tensor(column: Array) -> torch.Tensor:
    """A tensor that shares the array's memory, or a copy if torch can't share it; a tensor is returned as it is."""
    if isinstance(column, torch.Tensor):
        return column
    if not column.flags.writeable or min(column.strides, default=0) < 0:
        column = column.copy()
    return torch.from_numpy(column)


class Actor(Protocol):
    """Chooses actions for batches of observations, step by step."""

    def start(self, rng: np.random.Generator, num_rows: int) -> None:
        """Begin a collection, with random numbers from ``rng``, for about ``num_rows`` rows per step. Parameters may
        have changed."""

    def step(
        self, obs: Columns, state: Columns | None = None, *, ends: NDArray[np.bool_] | None = None
    ) -> tuple[Columns, Columns]:
        """The actions, and the other columns to record (at least ``dist_inputs``), each ``[N, ...]``.

        N may differ between steps. Later steps do not write into the returned arrays.

        Args:
            obs: Flat observation columns ``[N, ...]``.
            state: For a recurrent module: its state before the step, float32 columns ``state_in/...``, with
                `Module.initial_state` at the start of an episode. The state after the step is among the columns to
                record, as ``state_out/...``.
            ends: bool ``[N]``: rows whose episodes are over, so that their actions are not used; their action masks may
                forbid everything. None: no row.

        Raises:
            EnvError: an action mask forbids everything in a row; the message names the row.
        """

    def logp(self, dist_inputs: Floats | None, action: Columns) -> Floats | None:
        """float32 ``[rows]``: the log-probabilities of recorded actions, for many steps at once.

        They are 0 if the actor is greedy. None: they are unknown. Weights may have changed since the actions.

        Args:
            dist_inputs: ``[rows, n]``: recorded with the actions; None: not recorded.
            action: Flat action columns ``[rows, ...]``.
        """


def not_started() -> ModuleError:
    """The error for an actor that is to sample before its start."""
    return ModuleError("this actor was not started: call its start(rng, num_rows) before step().")


class SamplingActor:
    """Base class of actors that act in NumPy: random numbers drawn in blocks, and log-probabilities.

    One call of the generator draws for many steps.

    Args:
        dist: The distribution of the actions.
        explore: Sample actions; otherwise take the modes.
    """

    def __init__(self, dist: Distribution, *, explore: bool) -> None:
        self.explore = explore
        self._dist = dist
        self._pool: Floats = np.empty((0, dist.num_noise), np.float32)
        self._next = self._block = 0
        self._rng: np.random.Generator | None = None

    @property
    def rng(self) -> np.random.Generator:
        """The generator to draw from.

        Raises:
            ModuleError: the actor was not started.
        """
        if self._rng is None:
            raise not_started()
        return self._rng

    def start(self, rng: np.random.Generator, num_rows: int) -> None:
        """Draw from ``rng`` from now on, for about ``num_rows`` rows at a time."""
        self._rng = rng
        most = max(1, _NOISE_NUMBERS // max(1, num_rows * self._dist.num_noise))
        self._block = num_rows * min(_NOISE_STEPS, most)
        self._pool, self._next = self._pool[:0], 0

    def noise(self, n: int) -> Floats | None:
        """The next random numbers, ``[n, num_noise]``; None without exploration."""
        if not self.explore:
            return None
        start, stop = self._next, self._next + n
        if stop > len(self._pool):
            self._pool = self._dist.noise(self.rng, (max(self._block, n),))
            start, stop = 0, n
        self._next = stop
        return self._pool[start:stop]

    def logp(self, dist_inputs: Floats | None, action: Columns) -> Floats | None:
        """See `Actor.logp`."""
        if dist_inputs is None:
            return None
        if not self.explore:
            return np.zeros(len(dist_inputs), np.float32)
        with torch.inference_mode():
            actions = dict(zip(action, map(as_tensor, action.values()), strict=True))
            logp: Floats = self._dist.logp(as_tensor(dist_inputs), actions).float().numpy()
            return logp


class NumPyActor(SamplingActor):
    """Acts with the built-in network in NumPy. In-place updates of its parameters take effect at once.

    It computes only the policy; values are computed by the module, for all steps at once.

    Args:
        net: The network; `runs_in_numpy` must be True for it.
        dist: The distribution of its actions.
        mask: The action mask, if observations have one.
        explore: Sample actions; otherwise take the modes.
    """

    def __init__(self, net: Network, dist: Distribution, mask: ActionMask | None, *, explore: bool) -> None:
        super().__init__(dist, explore=explore)
        self._net = NumPyNetwork(net)
        self._mask = mask

    def start(self, rng: np.random.Generator, num_rows: int) -> None:
        self._net.refresh()
        super().start(rng, num_rows)

    def step(
        self, obs: Columns, state: Columns | None = None, *, ends: NDArray[np.bool_] | None = None
    ) -> tuple[Columns, Columns]:
        inputs = self._net.dist_inputs(obs)
        if self._mask is not None:
            self._mask.apply_in_place(inputs, obs, ends)
        return self._dist.act(inputs, self.noise(len(inputs))), {DIST_INPUTS: inputs}


def runs_in_numpy(net: nn.Module) -> TypeGuard[Network]:
    """Whether `NumPyNetwork` can compute ``net``: exactly a `Network`, without images and recurrent layers."""
    return type(net) is Network and net.policy.encoder.vector and net.policy.memory is None


def _view(parameter: torch.Tensor) -> Floats:
    return parameter.detach().to("cpu", torch.float32).numpy()


class _Layers:
    """The linear layers of one trunk, and buffers for their results."""

    def __init__(self, trunk: Trunk, activation: str) -> None:
        self._encoder = trunk.encoder
        self._linears: list[nn.Linear] = list(trunk.linears)  # type: ignore[arg-type]
        self._widths = [layer.out_features for layer in self._linears]
        self._activate = ACTIVATIONS[activation].write
        (name, part), *others = trunk.encoder.parts.items()
        self._direct = name if not others and isinstance(part, Numbers) else None
        self.names = list(trunk.encoder.parts)
        self._size = self._capacity = -1  # no buffers were made yet, not even for 0 rows
        self._across = False
        self._steps: list[tuple[Floats, Floats, Floats]] = []
        self.take_views()

    def take_views(self) -> None:
        """Take new views of the parameters."""
        self._views = [(_view(layer.weight), _view(layer.bias)) for layer in self._linears]
        self._size = -1

    def _resize(self, n: int) -> None:
        """Choose buffers and a layout for ``n`` rows.

        A layer is x W^T, computed either like this or "across", as (W x^T)^T. BLAS is faster with W as it is in memory,
        but NumPy adds biases slowly to short columns. The limits were measured with layers of 64 to 256.
        """
        if n > self._capacity:
            self._input = np.empty((n, self._encoder.width), np.float32)
            self._buffers = [np.empty(n * width, np.float32) for width in self._widths]
            self._capacity = n
        self._size = n
        self._rows = self._input[:n]
        self._across = n <= _ACROSS_AT_MOST and n * max(self._widths, default=0) >= _ACROSS_FROM
        self._steps = []
        for width, buffer, (weight, bias) in zip(self._widths, self._buffers, self._views, strict=True):
            if self._across:
                self._steps.append((weight, bias[:, None], buffer[: n * width].reshape(width, n)))
            else:
                self._steps.append((weight.T, bias, buffer[: n * width].reshape(n, width)))

    def __call__(self, obs: Columns, n: int) -> Floats:
        """The output ``[n, width]``, valid until the next call."""
        if n != self._size:
            self._resize(n)
        x, activate, across = self._encode(obs), self._activate, self._across
        x = x.T if across else x
        for weight, bias, out in self._steps:
            if across:
                weight.dot(x, out)
            else:
                x.dot(weight, out)
            out += bias
            if activate is not None:
                activate(out, out)
            x = out
        return x.T if across else x

    def many(self, obs: Columns, n: int) -> torch.Tensor:
        """``[n, width]`` for many rows, in torch, whose matrix products are a quarter faster than NumPy's."""
        if n != self._size:
            self._resize(n)
        x = as_tensor(self._encode(obs))
        for weight, bias in self._views:
            x = torch.addmm(torch.from_numpy(bias), x, torch.from_numpy(weight).t())
            if self._activate is not None:
                self._activate(x.numpy(), x.numpy())
        return x

    def _encode(self, obs: Columns) -> Floats:
        if self._direct is not None:
            x = obs[self._direct]
            if x.dtype == np.float32 and x.ndim == 2:
                return x
        out, start = self._rows, 0
        for name, part in self._encoder.parts.items():
            assert not isinstance(part, Image)
            part.write(obs[name], out[:, start : start + part.width])
            start += part.width
        return out


class NumPyNetwork:
    """Computes a `Network` without images in NumPy.

    It uses views of the parameters' memory, so in-place updates take effect at once. `refresh` takes new views of
    parameters whose memory moved, and copies parameters on another device or with another dtype.
    """

    def __init__(self, net: Network) -> None:
        self._net = net
        self._policy = _Layers(net.policy, net.activation)
        self._critic = None if net.critic is None else _Layers(net.critic, net.activation)
        self._parameters = list(net.parameters())
        self._first = self._policy.names[0]
        self._order = None if net.order is None else net.order.cpu().numpy()
        self._width = net.policy_head.out_features
        self._where: list[tuple[int, str, torch.dtype]] = []
        self._is_shared = False
        self.refresh()

    def refresh(self) -> None:
        """Take new views or copies of parameters where needed."""
        where = [(p.data_ptr(), p.device.type, p.dtype) for p in self._parameters]
        if self._is_shared and where == self._where:
            return
        self._where, self._is_shared = where, all(of[1:] == ("cpu", torch.float32) for of in where)
        net = self._net
        for layers in (self._policy, self._critic):
            if layers is not None:
                layers.take_views()
        self._weight, self._bias = _view(net.policy_head.weight).T, _view(net.policy_head.bias)
        self._log_std = None if net.log_std is None else _view(net.log_std)
        if net.value_head is not None:
            self._value_weight, self._value_bias = _view(net.value_head.weight).T, _view(net.value_head.bias)

    def dist_inputs(self, obs: Columns) -> Floats:
        """Compute ``dist_inputs`` from flat columns ``obs`` ``[N, *shape]``, as a new array, float32 ``[N,
        num_inputs]``."""
        n = len(obs[self._first])
        hidden = self._policy(obs, n)
        if self._log_std is None:
            inputs: Floats = hidden.dot(self._weight)
            inputs += self._bias
            return inputs
        inputs = np.empty((n, self._width + len(self._log_std)), np.float32)
        inputs[:, : self._width] = hidden.dot(self._weight)
        inputs[:, : self._width] += self._bias
        inputs[:, self._width :] = self._log_std
        return inputs if self._order is None else inputs.take(self._order, axis=1)

    def value(self, obs: Columns) -> Floats:
        """The values of any number of observations, computed in chunks, float32 ``[N]``."""
        n = len(obs[self._first])
        out = np.empty((n, 1), np.float32)
        layers = self._critic or self._policy
        for start in range(0, n, CHUNK):
            stop = min(start + CHUNK, n)
            hidden = layers.many({name: obs[name][start:stop] for name in layers.names}, stop - start)
            np.add(hidden.numpy().dot(self._value_weight), self._value_bias, out=out[start:stop])
        return out[:, 0]
