# SPDX-License-Identifier: Apache-2.0
"""Actors: modules while they act, NumPy columns in and out."""

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from etude.columns import DIST_INPUTS, SEPARATOR, STATE_IN, STATE_OUT, VALUE, Columns
from etude.errors import ModuleError
from etude.modules.distributions import Distribution
from etude.modules.networks import Network
from etude.modules.numpy_network import NumPyNetwork
from etude.modules.tensors import as_tensor

if TYPE_CHECKING:
    from etude.modules.module import Module


_AFTER = f"{STATE_OUT}{SEPARATOR}"
_NOISE_STEPS = 64
_NOISE_NUMBERS = 1 << 16  # at most so many numbers are drawn ahead


class Actor(Protocol):
    """Acts for a batch of rows, step by step."""

    def start(self, rng: np.random.Generator, num_rows: int) -> None:
        """Begin to collect: draw from ``rng``, for about ``num_rows`` rows a step; parameters may have moved."""

    def step(
        self, obs: Columns, state: Columns | None = None, *, ends: NDArray[np.bool_] | None = None
    ) -> tuple[Columns, Columns]:
        """Actions by column, and what else to record by column (at least ``dist_inputs``), each ``[N, ...]``.

        N may differ from step to step. The arrays are the caller's: no later step writes into them.

        Args:
            obs: What is seen.
            state: For a recurrent module: its state before, float32 columns ``state_in/...``, `Module.initial_state`
                where an episode begins. The state after comes as columns ``state_out/...`` of what is to be recorded.
            ends: bool ``[N]``: rows whose actions nobody wants, as their episodes are over; their action masks may
                forbid everything. None is no row.

        Raises:
            EnvError: an action mask forbids everything in a row; it is named.
        """

    def logp(self, dist_inputs: NDArray[np.float32] | None, action: Columns) -> NDArray[np.float32] | None:
        """float32 ``[rows]``: the log-probabilities of recorded actions, of many steps at once.

        They are 0 where the actor is greedy, and None where they are not known. Weights may have moved since.

        Args:
            dist_inputs: ``[rows, n]``: what was recorded with the actions; None: nothing was.
            action: Columns ``[rows, ...]``.
        """


class _Noise:
    """Random numbers for actions, drawn in blocks: one call of the generator for many steps."""

    def __init__(self, dist: Distribution) -> None:
        self._dist = dist
        self._pool: NDArray[np.float32] = np.empty((0, dist.num_noise), np.float32)
        self._next = 0
        self._block = 0
        self._rng: np.random.Generator | None = None

    def start(self, rng: np.random.Generator, num_rows: int) -> None:
        self._rng = rng
        most = max(1, _NOISE_NUMBERS // max(1, num_rows * self._dist.num_noise))
        self._block = num_rows * min(_NOISE_STEPS, most)
        self._pool, self._next = self._pool[:0], 0

    def take(self, n: int) -> NDArray[np.float32]:
        start, stop = self._next, self._next + n
        if stop > len(self._pool):
            if self._rng is None:
                raise ModuleError("this actor was not started: call its start(rng, num_rows) before step().")
            self._pool = self._dist.noise(self._rng, (max(self._block, n),))
            start, stop = 0, n
        self._next = stop
        return self._pool[start:stop]


def _logp(
    dist: Distribution, explore: bool, dist_inputs: NDArray[np.float32] | None, action: Columns
) -> NDArray[np.float32] | None:
    if dist_inputs is None:
        return None
    if not explore:
        return np.zeros(len(dist_inputs), np.float32)
    with torch.inference_mode():
        actions = {name: as_tensor(column) for name, column in action.items()}
        logp: NDArray[np.float32] = dist.logp(as_tensor(dist_inputs), actions).float().numpy()
        return logp


def _state(module: "Module", columns: Columns | None) -> Columns:
    if columns is None:
        raise ModuleError(
            f"{type(module.net).__name__} is recurrent: give step() its state, as columns {STATE_IN}/... that hold "
            f"module.initial_state() at the start of an episode, and then what came as {STATE_OUT}/... ."
        )
    return module.state_from(columns)


def _numpy(tensor: torch.Tensor, has_time: bool) -> NDArray[np.float32]:
    array: NDArray[np.float32] = (tensor[:, 0] if has_time else tensor).float().cpu().numpy()
    return array


class NumPyActor:
    """Acts with the built-in network in NumPy; sees updates in place of its parameters at once.

    Only the policy is computed; of a recurrent network values, too, and it sees what became of its memory's parameters
    at the next `start`.
    """

    def __init__(self, module: "Module", net: Network, *, explore: bool) -> None:
        self._module = module
        self._net = NumPyNetwork(net)
        self._dist = module.dist
        self._mask = module.mask
        self._noise = _Noise(module.dist) if explore else None

    def start(self, rng: np.random.Generator, num_rows: int) -> None:
        """See `Actor.start`."""
        self._net.refresh()
        if self._noise is not None:
            self._noise.start(rng, num_rows)

    def step(
        self, obs: Columns, state: Columns | None = None, *, ends: NDArray[np.bool_] | None = None
    ) -> tuple[Columns, Columns]:
        """See `Actor.step`."""
        if self._net.recurrent:
            inputs, value, after = self._net.step(obs, _state(self._module, state))
            extras = {DIST_INPUTS: inputs} if value is None else {DIST_INPUTS: inputs, VALUE: value}
            extras |= {f"{_AFTER}{name}": column for name, column in after.items()}
        else:
            inputs = self._net.dist_inputs(obs)
            extras = {DIST_INPUTS: inputs}
        if self._mask is not None:
            self._mask.apply_in_place(inputs, obs, ends)
        noise = None if self._noise is None else self._noise.take(len(inputs))
        return self._dist.act(inputs, noise), extras

    def logp(self, dist_inputs: NDArray[np.float32] | None, action: Columns) -> NDArray[np.float32] | None:
        """See `Actor.logp`."""
        return _logp(self._dist, self._noise is not None, dist_inputs, action)


class TorchActor:
    """Acts with any module through torch, on the module's device; no distribution object is made."""

    def __init__(self, module: "Module", *, explore: bool) -> None:
        self._module = module
        self._dist = module.dist
        self._noise = _Noise(module.dist) if explore else None
        self._device = torch.device("cpu")

    def start(self, rng: np.random.Generator, num_rows: int) -> None:
        """See `Actor.start`."""
        self._device = self._module.device
        if self._noise is not None:
            self._noise.start(rng, num_rows)

    def step(
        self, obs: Columns, state: Columns | None = None, *, ends: NDArray[np.bool_] | None = None
    ) -> tuple[Columns, Columns]:
        """See `Actor.step`; ``value`` is recorded where the module gives one."""
        module, recurrent = self._module, self._module.recurrent
        if module.mask is not None:
            module.mask.check(obs, ends)
        before = _state(module, state) if recurrent else None
        with torch.inference_mode():
            tensors = self._tensors(obs)
            if before is None:
                output = module(module.obs_from(tensors))
            else:
                tensors = {name: tensor.unsqueeze(1) for name, tensor in tensors.items()}
                output = module(module.obs_from(tensors), self._tensors(before))
            inputs = _numpy(output.bound()[1], recurrent)
            extras = {DIST_INPUTS: inputs}
            if output.value is not None:
                extras[VALUE] = _numpy(output.value, recurrent)
            if before is not None:
                extras |= {f"{_AFTER}{name}": _numpy(output.state[name], False) for name in before}
        noise = None if self._noise is None else self._noise.take(len(inputs))
        return self._dist.act(inputs, noise), extras

    def _tensors(self, columns: Columns) -> dict[str, torch.Tensor]:
        tensors = {name: as_tensor(column) for name, column in columns.items()}
        if self._device.type != "cpu":
            tensors = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        return tensors

    def logp(self, dist_inputs: NDArray[np.float32] | None, action: Columns) -> NDArray[np.float32] | None:
        """See `Actor.logp`."""
        return _logp(self._dist, self._noise is not None, dist_inputs, action)
