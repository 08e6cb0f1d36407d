# SPDX-License-Identifier: Apache-2.0
"""Actors for observations that are tensors, which keep data on the env's device."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.columns import DIST_INPUTS, OBS_MASK, Columns
from etude.errors import ModuleError
from etude.experience.arrays import Array, host_columns
from etude.modules.acting import Actor, as_tensor
from etude.modules.module import Module, forward_step


def tensor_actor(module: Module, device: torch.device, *, explore: bool) -> Actor:
    """An actor of a module for observations that are tensors.

    Args:
        module: The module. If it has its own `actor`, that acts in NumPy, so its inputs and outputs are copied from and
            to the device; this includes a `Task`, although its `act` gets tensors.
        device: Device of the observations and of the actions.
        explore: Sample actions; otherwise take the modes.

    Raises:
        ModuleError: the module is on another device.
    """
    if module.has_own_actor:
        return HostActor(module.actor(explore=explore), device)
    return TensorActor(module, device, explore=explore)


class TensorActor:
    """Acts with any module, tensors in and out; nothing is copied to the host but one number per step with an action
    mask.

    ``value`` is recorded if the module returns one, and the state after a step if it is recurrent. The arguments are
    those of `tensor_actor`. Columns are those of `Actor`, as tensors.
    """

    def __init__(self, module: Module, device: torch.device, *, explore: bool) -> None:
        self._module, self._device, self._explore = module, device, explore
        self._generator: torch.Generator | None = None
        self._check_device()

    def _check_device(self) -> None:
        module = self._module
        if module.device != self._device:
            raise ModuleError(
                f"the env gives tensors on {self._device}, but the weights of {type(module.net).__name__} are on "
                f"{module.device}: let both be on one device, such as by device={str(self._device)!r} in the config "
                f"(module.to({str(self._device)!r}) without one), or make the env on {module.device}."
            )

    def start(self, rng: np.random.Generator, num_rows: int) -> None:
        """See `Actor.start`: actions are drawn by a generator on the device, seeded by ``rng``."""
        self._check_device()
        if self._explore:
            self._generator = torch.Generator(self._device).manual_seed(int(rng.integers(2**63)))

    def step(
        self, obs: Columns, state: Columns | None = None, *, ends: NDArray[np.bool_] | None = None
    ) -> tuple[Columns, Columns]:
        """See `Actor.step`."""
        module = self._module
        seen: dict[str, Any] = dict(obs)
        if module.mask is not None and bool(module.mask.allows_nothing(seen[OBS_MASK]).any()):
            module.mask.check(host_columns({OBS_MASK: seen[OBS_MASK]}), ends)
        with torch.no_grad():  # not in inference mode: the env may write into its actions
            before: dict[str, Any] = module.state_from(state or {})
            extras: dict[str, Any] = forward_step(module, seen, before)
            inputs = extras[DIST_INPUTS]
            action: dict[str, Any] = module.dist.act(inputs, self._noise(len(inputs)))
        return action, extras

    def _noise(self, rows: int) -> Tensor | None:
        if not self._explore:
            return None
        if self._generator is None:
            raise ModuleError("this actor was not started: call its start(rng, num_rows) before step().")
        return self._module.dist.noise_tensor(self._generator, rows)

    def logp(self, dist_inputs: Array | None, action: Columns) -> Array | None:
        """See `Actor.logp`; returns a tensor."""
        if dist_inputs is None:
            return None
        if not self._explore:
            return dist_inputs.new_zeros(len(dist_inputs))
        with torch.no_grad():
            return self._module.dist.logp(dist_inputs, action).float()  # type: ignore[arg-type]


class HostActor:
    """Lets a NumPy actor act on tensors: copies its inputs to the host, and its outputs to the device.

    Args:
        actor: The NumPy actor.
        device: The device of the actions.
    """

    def __init__(self, actor: Actor, device: torch.device) -> None:
        self._actor, self._device = actor, device

    def start(self, rng: np.random.Generator, num_rows: int) -> None:
        """See `Actor.start`."""
        self._actor.start(rng, num_rows)

    def step(
        self, obs: Columns, state: Columns | None = None, *, ends: NDArray[np.bool_] | None = None
    ) -> tuple[Columns, Columns]:
        """See `Actor.step`."""
        action, extras = self._actor.step(host_columns(obs), None if state is None else host_columns(state), ends=ends)
        return self._tensors(action), self._tensors(extras)

    def _tensors(self, columns: Columns) -> Any:
        return {name: as_tensor(column).to(self._device) for name, column in columns.items()}

    def logp(self, dist_inputs: Array | None, action: Columns) -> Array | None:
        """See `Actor.logp`; returns a tensor."""
        inputs = None if dist_inputs is None else host_columns({DIST_INPUTS: dist_inputs})[DIST_INPUTS]
        found = self._actor.logp(inputs, host_columns(action))
        return None if found is None else torch.from_numpy(found).to(self._device)
