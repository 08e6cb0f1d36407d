# SPDX-License-Identifier: Apache-2.0
"""SoftModule: a policy over Box actions with twin critics, their targets and a temperature."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from etude.columns import ACTION, OBS, STATE_OUT, Columns, is_under
from etude.errors import SettingsError
from etude.modules.acting import Actor
from etude.modules.distributions import DiagGaussian, SquashedGaussian
from etude.modules.module import Module
from etude.modules.networks import Network, NetworkConfig
from etude.modules.random_module import RandomModule
from etude.modules.targets import Follower, frozen_copy
from etude.modules.twin_critic import TwinCritic
from etude.spaces import Flattener, Space


class SoftModule(Module):
    """What soft actor-critic learns (Haarnoja et al. 2018, arXiv 1812.05905).

    Critics see actions scaled to [-1, 1], and log-densities are of these, so that a temperature and a target entropy
    mean the same whatever the bounds are. A plain Gaussian's actions are taken as they are.

    Args:
        net: The policy: ``dist_inputs`` are means, then log standard deviations.
        obs_space: What it sees.
        action_space: What it chooses from.
        dist: Of the actions.
        config: The shape of the critics.
        temperature: At the start, above 0.

    Raises:
        SettingsError: the action space is no Box.

    Attributes:
        acts_at_random: Actions that explore are drawn from the whole action space, whatever the policy says.
    """

    dist: DiagGaussian | SquashedGaussian

    def __init__(
        self,
        net: nn.Module,
        obs_space: Space,
        action_space: Space,
        dist: DiagGaussian | SquashedGaussian,
        config: NetworkConfig,
        temperature: float,
    ) -> None:
        check_box(action_space)
        assert isinstance(action_space, spaces.Box)
        super().__init__(net, obs_space, action_space, dist)
        self.action_size = dist.num_noise
        self.acts_at_random = False
        self.critic = TwinCritic(obs_space, self.action_size, config)
        self.target_critic = frozen_copy(self.critic)
        self.log_temperature = nn.Parameter(torch.tensor([float(np.log(temperature))]))
        self.follower = Follower(self.target_critic, self.critic)
        self._columns_of = Flattener(obs_space, OBS)
        low, high = -np.ones(self.action_size), np.ones(self.action_size)
        self._scaled_dist = dist
        if isinstance(dist, SquashedGaussian):
            low, high = (bound.reshape(-1).astype(np.float64) for bound in (action_space.low, action_space.high))
            self._scaled_dist = SquashedGaussian(spaces.Box(-1.0, 1.0, (self.action_size,), np.float32), ACTION)
        self._middle: Tensor
        self._half: Tensor
        self.register_buffer("_middle", torch.tensor((low + high) / 2, dtype=torch.float32), persistent=False)
        self.register_buffer("_half", torch.tensor((high - low) / 2, dtype=torch.float32), persistent=False)

    def train(self, mode: bool = True) -> "SoftModule":
        """Only a policy of one's own has modes: the built-in nets are the same in both."""
        self.training = mode
        if type(self.net) is not Network:  # to walk through it, twice a round, costs as much as an env step
            self.net.train(mode)
        return self

    def columns_of(self, obs: Any) -> dict[str, Tensor]:
        """The columns of nested observations."""
        columns: dict[str, Tensor] = self._columns_of(obs)
        return columns

    def scaled(self, action: Tensor) -> Tensor:
        """``[B, action_size]``: actions ``[B, *shape]`` as critics see them."""
        return (action.reshape(-1, self.action_size).float() - self._middle) / self._half

    def sample(self, obs: Any) -> tuple[Tensor, Tensor]:
        """Actions ``[B, action_size]`` as critics see them, and their log-densities ``[B]``, with gradients."""
        return self.draw(self(obs).bound()[1])

    def draw(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The same of ``dist_inputs`` ``[..., 2 * action_size]``: ``[..., action_size]`` and ``[...]``."""
        noise = torch.randn(*inputs.shape[:-1], self.action_size, device=inputs.device)
        action, logp = self._scaled_dist.rsample(inputs, noise)
        return action[ACTION].reshape(noise.shape), logp

    def actor(self, *, explore: bool) -> Actor:
        """What acts; at random, as long as the module ``acts_at_random`` and it explores."""
        usual = super().actor(explore=explore)
        return _RandomAtFirst(self, usual) if explore else usual


class _RandomAtFirst:
    """Acts at random as long as the module says so."""

    def __init__(self, module: SoftModule, usual: Actor) -> None:
        self._module = module
        self._usual = usual
        self._random = RandomModule(module.obs_space, module.action_space).actor(explore=True)

    @property
    def _actor(self) -> Actor:
        return self._random if self._module.acts_at_random else self._usual

    def start(self, rng: np.random.Generator, num_rows: int) -> None:
        """See `Actor.start`."""
        self._actor.start(rng, num_rows)
        if self._module.acts_at_random and self._module.recurrent:
            self._usual.start(rng, num_rows)

    def step(
        self, obs: Columns, state: Columns | None = None, *, ends: NDArray[np.bool_] | None = None
    ) -> tuple[Columns, Columns]:
        """See `Actor.step`; a memory goes on while actions are drawn at random."""
        action, extras = self._actor.step(obs, state, ends=ends)
        if self._module.acts_at_random and self._module.recurrent:
            _, usual = self._usual.step(obs, state, ends=ends)
            extras |= {name: column for name, column in usual.items() if is_under(name, STATE_OUT)}
        return action, extras

    def logp(self, dist_inputs: NDArray[np.float32] | None, action: Columns) -> NDArray[np.float32] | None:
        """See `Actor.logp`; 0 of what was drawn at random."""
        if self._module.acts_at_random:
            return np.zeros(len(next(iter(action.values()))), np.float32)
        return self._usual.logp(dist_inputs, action)


def check_box(
    action_space: Space,
    name: str = "SAC",
    others: str = "DQN or PPO for Discrete actions, PPO for others",
) -> None:
    """Raise a SettingsError where actions are no Box of floats, which algorithm ``name`` needs; ``others`` do not."""
    if not (isinstance(action_space, spaces.Box) and np.dtype(action_space.dtype).kind == "f"):
        raise SettingsError(
            f"the action space is {action_space}, but {name} draws the actions of a Box of floats only. Take {others}."
        )
