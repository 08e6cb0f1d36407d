# SPDX-License-Identifier: Apache-2.0
"""Module: a net with its spaces and its distribution."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from etude.columns import ACTION, OBS, Columns
from etude.errors import ModuleError
from etude.modules.acting import Actor, NumPyActor, TorchActor, as_tensor
from etude.modules.distributions import Distribution, distribution_for
from etude.modules.networks import Network, NetworkConfig
from etude.modules.numpy_network import CHUNK, NumPyNetwork, runs_in_numpy
from etude.modules.output import Output
from etude.spaces import Flattener, Nester, Space, leaf_dtype, leaves


class Module(nn.Module):
    """A net with its spaces and its distribution: what acts and is trained.

    Args:
        net: Called with observations (nested as in the space, batch first; float64 arrives as float32) and, where its
            forward has a parameter `state`, with the recurrent state; returns an `Output`.
        obs_space: What the net sees.
        action_space: What it chooses from.
        dist: What the net's ``dist_inputs`` parameterise.
    """

    def __init__(self, net: nn.Module, obs_space: Space, action_space: Space, dist: Distribution) -> None:
        super().__init__()
        self.net = net
        self.obs_space = obs_space
        self.action_space = action_space
        self.dist = dist
        self._nest_obs = Nester(obs_space, OBS)
        self._nest_action = Nester(action_space, ACTION)
        self._flatten_obs = Flattener(obs_space, OBS)
        self._float64 = {n for n, leaf in leaves(obs_space, OBS).items() if leaf_dtype(leaf) == np.float64}
        self._takes_state = "state" in inspect.signature(net.forward).parameters
        self._checked = False
        self._numpy: NumPyNetwork | None = None

    @property
    def device(self) -> torch.device:
        """Where the parameters are; the CPU where there are none."""
        return next((parameter.device for parameter in self.parameters()), torch.device("cpu"))

    def forward(self, obs: Any, state: dict[str, Tensor] | None = None) -> Output:
        """Run the net on tensors nested as in the observation space, each ``[B, *shape]``.

        Raises:
            ModuleError: what the net returns (looked at in the first call) does not fit the spaces.
        """
        if self._float64:
            columns = self._flatten_obs(obs)
            obs = self._nest_obs({n: c.float() if n in self._float64 else c for n, c in columns.items()})
        output = self.net(obs, state=state) if self._takes_state else self.net(obs)
        if not self._checked:
            self._check(output)
            self._checked = True
        result: Output = output
        value, inputs = result.value, result.dist_inputs
        if value is not None and value.dim() > 1 and value.shape[-1] == 1:
            # [B, T] with T = 1 has one axis less than the inputs, and stays as it is.
            result.value = value.squeeze(-1) if inputs is None or value.dim() == inputs.dim() else value
        result.dist = self.dist
        return result

    def _check(self, output: Any) -> None:
        name = type(self.net).__name__
        if not isinstance(output, Output):
            raise ModuleError(
                f"the forward of {name} returned a {type(output).__name__}: it must return an Output, such as "
                "etude.modules.Output(dist_inputs=..., value=...)."
            )
        inputs, value, wanted = output.dist_inputs, output.value, self.dist.num_inputs
        if inputs is not None and (inputs.dim() < 2 or inputs.shape[-1] != wanted):
            raise ModuleError(
                f"the forward of {name} gave `dist_inputs` of shape {tuple(inputs.shape)}; the action space "
                f"{self.action_space} with its {type(self.dist).__name__} needs [batch, {wanted}]: let the last layer "
                f"have {wanted} outputs."
            )
        lead = None if inputs is None else tuple(inputs.shape[:-1])
        if value is not None and lead is not None and tuple(value.shape) not in (lead, (*lead, 1)):
            raise ModuleError(
                f"the forward of {name} gave `value` of shape {tuple(value.shape)} for a batch of {lead}: it must have "
                f"shape {lead} or {(*lead, 1)}, one number for each observation."
            )

    def obs_from(self, columns: Mapping[str, Any]) -> Any:
        """The nested observation that flat columns ``obs...`` hold."""
        return self._nest_obs(columns)

    def action_from(self, columns: Mapping[str, Any]) -> Any:
        """The nested action that flat columns ``action...`` hold."""
        return self._nest_action(columns)

    def value_of(self, obs_columns: Columns) -> NDArray[np.float32]:
        """float32 ``[n]``: the values of flat observation columns ``[n, ...]``, without gradients, in chunks.

        Raises:
            ModuleError: the net gives no values.
        """
        net = self.net
        if isinstance(net, Network) and runs_in_numpy(net) and net.value_head is not None:
            if self._numpy is None:
                self._numpy = NumPyNetwork(net)
            self._numpy.refresh()
            return self._numpy.value(obs_columns)
        n, device = len(next(iter(obs_columns.values()))), self.device
        out = np.empty(n, np.float32)
        with torch.inference_mode():
            for start in range(0, n, CHUNK):
                chunk = {k: as_tensor(column[start : start + CHUNK]).to(device) for k, column in obs_columns.items()}
                value = self(self.obs_from(chunk)).value
                if value is None:
                    raise ModuleError(
                        f"{type(net).__name__} gives no values, which are needed here: return Output(value=...) from "
                        "its forward."
                    )
                out[start : start + CHUNK] = value.float().cpu().numpy()
        return out

    def actor(self, *, explore: bool) -> Actor:
        """What acts for this module: samples of its distribution where ``explore``, else the modes."""
        if isinstance(self.net, Network) and runs_in_numpy(self.net):
            return NumPyActor(self.net, self.dist, explore=explore)
        return TorchActor(self, explore=explore)


def make_module(
    module: nn.Module | Callable[[Space, Space], nn.Module] | None,
    obs_space: Space,
    action_space: Space,
    config: NetworkConfig | None = None,
    *,
    squash: bool = False,
    value: bool = True,
) -> Module:
    """A Module from what a user gives.

    Args:
        module: None for the built-in `Network`; a class or function, called with ``(obs_space, action_space)``; or a
            net, used as it is.
        obs_space: What the module sees.
        action_space: What it chooses from.
        config: The shape of the built-in network; not used otherwise.
        squash: Hold the actions of Boxes inside their bounds by tanh.
        value: Give the built-in network a value function; not used otherwise.

    Raises:
        SpaceError: a space is of a kind that is not handled.
        ModuleError: ``module`` makes no net, or can't be called with two spaces.
    """
    dist = distribution_for(action_space, squash=squash)
    if module is None:
        net: Any = Network(obs_space, action_space, config, dist, value)
    elif isinstance(module, nn.Module):
        net = module
    else:
        net = _made(module, obs_space, action_space)
    return net if isinstance(net, Module) else Module(net, obs_space, action_space, dist)


def _made(make: Callable[[Space, Space], nn.Module], obs_space: Space, action_space: Space) -> nn.Module:
    name = getattr(make, "__name__", repr(make))
    if not callable(make):
        raise ModuleError(f"`module` is {make!r}: it must be a torch.nn.Module, a class of them, or a function.")
    try:
        inspect.signature(make).bind(obs_space, action_space)
    except TypeError as error:
        raise ModuleError(
            f"`module`: {name} can't be called with (obs_space, action_space): {error}. Let it take both, or pass a "
            "net that is made already."
        ) from error
    try:
        net = make(obs_space, action_space)
    except Exception as error:
        raise ModuleError(
            f"`module`: {name}(obs_space, action_space) fails: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(net, nn.Module):
        raise ModuleError(
            f"`module`: {name}(obs_space, action_space) gave a {type(net).__name__}, not a torch.nn.Module."
        )
    return net
