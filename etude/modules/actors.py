# SPDX-License-Identifier: Apache-2.0
"""Actors for envs of tensors, actors that act at random, and noisy networks.

Noisy networks explore by noise on their weights (Fortunato et al. 2018, "Noisy networks for exploration", arXiv
1706.10295).
"""

import copy
import math
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from etude.columns import ACTION, DIST_INPUTS, OBS_MASK, STATE_OUT, Columns, is_under
from etude.errors import ModuleError
from etude.experience.arrays import Array, host_columns
from etude.modules.acting import Actor, SamplingActor, as_tensor, not_started
from etude.modules.distributions import distribution_for
from etude.modules.module import Module, TorchActor, forward_step
from etude.modules.network import Network
from etude.spaces import Space, choices_of, leaf_shape, leaves

# -- tensors in and out -------------------------------------------------------------------------------------------


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
    """Acts with any module, tensors in and out. If there is an action mask, one number per step is copied to the host,
    otherwise nothing.

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
        """See `Actor.start`: actions are sampled with a generator on the device, seeded by ``rng``."""
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
            raise not_started()
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


# -- random actions -----------------------------------------------------------------------------------------------


class RandomModule(Module):
    """Samples actions like the action space's ``sample``; all choices that the action mask allows are equally likely.

    It has no parameters and can't be trained.

    Args:
        obs_space: The space of the observations.
        action_space: The space of the actions.
    """

    def __init__(self, obs_space: Space, action_space: Space) -> None:
        super().__init__(nn.Identity(), obs_space, action_space, distribution_for(action_space))

    def actor(self, *, explore: bool) -> Actor:
        """An actor that takes random actions, with or without ``explore``."""
        return _RandomActor(self)


class _RandomActor(SamplingActor):
    def __init__(self, module: Module) -> None:
        super().__init__(module.dist, explore=True)
        self._mask = module.mask
        self._leaves = leaves(module.action_space, ACTION)
        self._boxes = {name: copy.deepcopy(leaf) for name, leaf in self._leaves.items() if isinstance(leaf, Box)}

    def start(self, rng: np.random.Generator, num_rows: int) -> None:
        super().start(rng, num_rows)
        for box in self._boxes.values():
            box.seed(int(rng.integers(2**31)))

    def step(
        self, obs: Columns, state: Columns | None = None, *, ends: NDArray[np.bool_] | None = None
    ) -> tuple[Columns, Columns]:
        count = len(next(iter(obs.values())))
        inputs = np.zeros((count, self._dist.num_inputs), np.float32)
        if self._mask is not None:
            self._mask.apply_in_place(inputs, obs, ends)
        action = self._dist.act(inputs, self._dist.noise(self.rng, (count,)))
        for name, box in self._boxes.items():
            action[name] = np.stack([box.sample() for _ in range(count)]) if count else action[name]
        return action, {}

    def logp(self, dist_inputs: NDArray[np.float32] | None, action: Columns) -> NDArray[np.float32] | None:
        """The log-probabilities, or log-densities, of random actions; None if a mask may forbid choices, or if there is
        a Box without bounds."""
        if self._mask is not None or not all(box.is_bounded() for box in self._boxes.values()):
            return None
        logp = -sum(_log_size(leaf) for leaf in self._leaves.values())
        return np.full(len(next(iter(action.values()))), logp, np.float32)


class RandomFirstModule(Module):
    """Mixin for modules that act at random at first, to fill a replay buffer; inherit from it and another module class.

    Attributes:
        acts_at_random: Whether exploring actions are drawn from the whole action space instead of the policy.
    """

    acts_at_random = False

    def actor(self, *, explore: bool) -> Actor:
        """The actor; if it explores, it acts at random as long as ``acts_at_random`` is set."""
        usual = super().actor(explore=explore)
        return _RandomFirstActor(self, usual) if explore else usual


class _RandomFirstActor:
    """Acts at random as long as the module's ``acts_at_random`` is set."""

    def __init__(self, module: RandomFirstModule, usual: Actor) -> None:
        self._module = module
        self._usual = usual
        self._random = RandomModule(module.obs_space, module.action_space).actor(explore=True)

    @property
    def _actor(self) -> Actor:
        return self._random if self._module.acts_at_random else self._usual

    def start(self, rng: np.random.Generator, num_rows: int) -> None:
        self._actor.start(rng, num_rows)
        if self._module.acts_at_random and self._module.recurrent:
            self._usual.start(rng, num_rows)

    def step(
        self, obs: Columns, state: Columns | None = None, *, ends: NDArray[np.bool_] | None = None
    ) -> tuple[Columns, Columns]:
        """See `Actor.step`; the state of a recurrent policy is updated during random actions, too."""
        action, extras = self._actor.step(obs, state, ends=ends)
        if self._module.acts_at_random and self._module.recurrent:
            _, usual = self._usual.step(obs, state, ends=ends)
            extras |= {name: column for name, column in usual.items() if is_under(name, STATE_OUT)}
        return action, extras

    def logp(self, dist_inputs: NDArray[np.float32] | None, action: Columns) -> NDArray[np.float32] | None:
        return self._actor.logp(dist_inputs, action)


def _log_size(leaf: Space) -> float:
    """The logarithm of the number of choices, or of the volume of a Box of floats."""
    if isinstance(leaf, Box):
        return float(np.log(leaf.high.astype(np.float64) - leaf.low.astype(np.float64)).sum())
    choices = choices_of(leaf)
    assert choices is not None  # only Boxes have none
    return float(np.log(np.broadcast_to(choices[1], leaf_shape(leaf))).sum())


# -- noisy networks -----------------------------------------------------------------------------------------------


class NoisyLinear(nn.Linear):
    """A linear layer with normally distributed weights, whose means and standard deviations are learned.

    The noise is factorised: one number per input and one per output (eq. 10 and 11). It is drawn in each call in
    training mode. In evaluation mode, the weights are their means.

    Args:
        inputs: Width of the input.
        outputs: Width of the output.
        std: The initial standard deviation is this divided by the root of ``inputs``. Default: Fortunato et al. 2018.

    Attributes:
        noise: Noise of the inputs ``[inputs]`` and of the outputs ``[outputs]`` to use in either mode; None: as above.
    """

    noise: tuple[Tensor, Tensor] | None = None

    def __init__(self, inputs: int, outputs: int, std: float = 0.5) -> None:
        super().__init__(inputs, outputs)
        limit = 1.0 / math.sqrt(inputs)
        nn.init.uniform_(self.weight, -limit, limit)
        nn.init.uniform_(self.bias, -limit, limit)
        self.weight_std = nn.Parameter(torch.full_like(self.weight, std * limit))
        self.bias_std = nn.Parameter(torch.full_like(self.bias, std * limit))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., inputs]`` to ``[..., outputs]``."""
        mean, noise = F.linear(x, self.weight, self.bias), self.noise
        if noise is None:
            if not self.training:
                return mean
            device = self.weight.device
            noise = (
                _signed_root(torch.randn(self.in_features, device=device)),
                _signed_root(torch.randn(self.out_features, device=device)),
            )
        of_inputs, of_outputs = noise
        return mean + of_outputs * F.linear(x * of_inputs, self.weight_std, self.bias_std)

    def draw(self, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Draw noise for the attribute `noise`: of the inputs and of the outputs."""
        sizes = self.in_features, self.out_features
        drawn = (torch.from_numpy(rng.standard_normal(size, dtype=np.float32)) for size in sizes)
        of_inputs, of_outputs = (_signed_root(numbers.to(self.weight.device)) for numbers in drawn)
        return of_inputs, of_outputs


def _signed_root(x: Tensor) -> Tensor:
    return x.sign() * x.abs().sqrt()


def noisy(layer: nn.Module) -> NoisyLinear:
    """A noisy layer of the same size as a linear one."""
    assert isinstance(layer, nn.Linear)
    return NoisyLinear(layer.in_features, layer.out_features)


class NoisyNetwork(Network):
    """The built-in network, with the same arguments, with noisy layers in place of all linear ones after the
    encoders."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for trunk, head in ((self.policy, "policy_head"), (self.critic, "value_head")):
            if trunk is not None:
                linears = nn.ModuleList(map(noisy, trunk.linears))
                del trunk.linears  # so that the parameters of a recurrent layer stay in front of these
                trunk.linears = linears
            if getattr(self, head) is not None:
                setattr(self, head, noisy(getattr(self, head)))


class NoisyActor(TorchActor):
    """Acts with new noise in each step, which is the same for all rows.

    Args:
        module: A module with noisy layers.
    """

    def __init__(self, module: Module) -> None:
        # its own layers with the same weights, as other actors may act without noise at the same time
        shared = (*module.parameters(), *module.buffers(), module.dist)
        own = copy.deepcopy(module, {id(part): part for part in shared})
        super().__init__(own, explore=True)
        self._layers = [part for part in own.net.modules() if isinstance(part, NoisyLinear)]

    def step(
        self, obs: Columns, state: Columns | None = None, *, ends: NDArray[np.bool_] | None = None
    ) -> tuple[Columns, Columns]:
        """See `Actor.step`."""
        for layer in self._layers:
            layer.noise = layer.draw(self.rng)
        return super().step(obs, state, ends=ends)
