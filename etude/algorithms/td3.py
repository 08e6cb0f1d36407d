# SPDX-License-Identifier: Apache-2.0
"""TD3 (Fujimoto et al. 2018, "Addressing function approximation error in actor-critic methods", arXiv 1802.09477), and
TD3+BC, which learns from a recording (Fujimoto & Gu 2021, "A minimalist approach to offline reinforcement learning",
arXiv 2106.06860)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from etude.algorithms.algorithm import Algorithm
from etude.algorithms.config import NO_STD, NO_VALUE, ModuleLike, ReplayConfig
from etude.algorithms.critics import (
    CriticModule,
    OfflineCriticAlgorithm,
    OfflineCriticConfig,
    check_box,
    check_memories,
    draw_by_gate,
    not_recurrent,
    of_kind,
    target_of,
    trained,
)
from etude.algorithms.off_policy import OffPolicyAlgorithm, OffPolicyConfig
from etude.columns import ACTION, WEIGHT
from etude.experience.arrays import Array, cast, clip
from etude.learners import Batch, Loss, OptimizerConfig, Schedule
from etude.modules import Module, Network, NetworkConfig, make_module
from etude.modules.actors import RandomFirstModule
from etude.modules.critics import TargetNetwork, frozen_copy
from etude.modules.distributions import DiagGaussian, SquashedGaussian
from etude.settings import FloatAbove0, FloatFrom0, IntFrom1, Rate, check_rules, settings
from etude.spaces import Space


@settings
class TwinDelayedSettings:
    """Settings of TD3 and TD3+BC."""

    policy_delay: IntFrom1 = 2
    """Gradient steps of the critics for each gradient step of the policy and update of the target networks, at least 1.
    Default: Fujimoto et al. 2018."""

    target_noise: FloatFrom0 = 0.2
    """Standard deviation of the noise on the target policy's actions, at least 0, with actions scaled to [-1, 1].
    Default: Fujimoto et al. 2018."""

    target_noise_clip: FloatFrom0 = 0.5
    """Limit of this noise's magnitude, at least 0. Default: Fujimoto et al. 2018."""

    tau: Rate = 0.005
    """How far an update moves the target networks towards the trained ones, above 0, at most 1. Default: Fujimoto et
    al. 2018."""


@settings
class TD3Config(OffPolicyConfig, TwinDelayedSettings):
    """Settings of TD3."""

    action_noise: FloatAbove0 = 0.1
    """Standard deviation of the exploration noise, above 0, with actions scaled to [-1, 1]. Default: Fujimoto et al.
    2018."""

    lr: Schedule = 3e-4
    """Learning rate of Adam for policy and critics, or a schedule: points of (env_steps, rate) with straight lines
    between. Default: the published code of Fujimoto et al.; 1e-3 in the paper."""

    optimizer: OptimizerConfig = OptimizerConfig(grad_clip=None)
    """Settings of the optimizer. Default: gradients are not clipped, as in Fujimoto et al. 2018."""

    replay: ReplayConfig = ReplayConfig()
    """Size of the replay buffer, and how steps are sampled from it. Default of `learning_starts`: Fujimoto et al. 2018,
    for envs that end early; 10,000 for others."""

    network: NetworkConfig = NetworkConfig(hidden=(256, 256), activation="relu")
    """The shape of policy and critics. Default: the published code of Fujimoto et al.; 400 and 300 in the paper."""

    unused: ClassVar[Mapping[str, str]] = NO_STD | NO_VALUE

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(
            self.network, "network", squash=(self.network.squash is not False, "true: the policy always uses tanh")
        )


class NoisyTanh(SquashedGaussian):
    """tanh of the inputs, scaled to a Box's bounds; exploration adds normal noise and clips to the bounds.

    There is one input per action dimension. An action component at a bound has the probability of all values that are
    clipped to it; others have the normal density. Entropy and divergence are those of the normal variables.

    Attributes:
        std: Standard deviation of the noise, in units of half of each dimension's range; may be set at any time.

    Raises:
        SpaceError: a bound is infinite, two bounds coincide, or the Box has an integer dtype.
    """

    def __init__(self, space: Any, root: str, std: float = 0.1) -> None:
        super().__init__(space, root)
        self.num_inputs, self.log_std = self._size, np.empty(0, np.int64)  # means only
        self.std = std

    def act(self, inputs: Array, noise: Array | None) -> dict[str, Any]:
        if isinstance(inputs, Tensor):
            action = self._drawn(inputs, noise)
        else:
            action = np.tanh(inputs)
            if noise is not None:
                action += self.std * noise
            action = self._middle + self._half * action
        _, _, low, high = (part.like(inputs) for part in self._range)
        return {self._name: clip(cast(action.reshape(inputs.shape[0], *self._shape), self._dtype), low, high)}

    def _normal(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Means and log standard deviations of actions before clipping, in the action's own units."""
        middle, half = (
            torch.as_tensor(x, dtype=inputs.dtype, device=inputs.device) for x in (self._middle, self._half)
        )
        return middle + half * torch.tanh(inputs), torch.log(half * self.std).expand_as(inputs)

    def logp(self, inputs: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        mean, log_std = self._normal(inputs)
        _, _, low, high = (part.like(mean).reshape(-1) for part in self._range)
        taken = action[self._name].reshape(mean.shape).to(mean.dtype)
        off, below, above = ((x * torch.exp(-log_std)) for x in (taken - mean, low - mean, mean - high))
        density = -0.5 * (off.square() + math.log(2 * math.pi)) - log_std
        below, above = torch.special.log_ndtr(below), torch.special.log_ndtr(above)
        logp: Tensor = torch.where(taken <= low, below, torch.where(taken >= high, above, density)).sum(-1)
        return logp

    entropy, rsample = DiagGaussian.entropy, DiagGaussian.rsample


class DeterministicModule(RandomFirstModule, CriticModule):
    """Policy and twin critics of TD3, each with its target.

    The policy is tanh of the net's output, scaled to the bounds.

    Args:
        net: The policy network: ``dist_inputs`` are the actions before tanh.
        obs_space: The observation space.
        action_space: The action space, a Box with finite bounds.
        config: The shape of the critics.

    Attributes:
        is_policy_due: Whether the next gradient step also updates the policy.
    """

    dist: NoisyTanh

    def __init__(self, net: nn.Module, obs_space: Space, action_space: Space, config: NetworkConfig) -> None:
        dist = NoisyTanh(action_space, ACTION)
        super().__init__(net, obs_space, action_space, dist, config)
        self.target = Module(frozen_copy(net), obs_space, action_space, dist)
        self.target.eval()
        self._policy_follower = TargetNetwork(self.target.net, net)
        self.is_policy_due = False
        self._steps: Tensor
        self.register_buffer("_steps", torch.zeros((), dtype=torch.int64))

    def follow(self, tau: float) -> None:
        """Update the target networks of critics and policy."""
        self.follower.follow(tau)
        self._policy_follower.follow(tau)

    def count_step(self, delay: int) -> None:
        """Count a gradient step; every ``delay``-th one updates the policy."""
        self._steps += 1
        self.update_due(delay)

    def update_due(self, delay: int) -> None:
        """Recompute `is_policy_due` from the count of steps, which is loaded with the weights."""
        self.is_policy_due = (int(self._steps) + 1) % delay == 0


class TwinDelayed(Algorithm[Any]):
    """Base class of TD3 and TD3+BC: clipped double Q-learning targets and a delayed policy."""

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """Make a policy and critics with their targets; see `DeterministicModule`."""
        config, is_built_in = self.config, given is None
        if given is None:
            given = Network(obs_space, action_space, config.network, NoisyTanh(action_space, ACTION), value=False)
        made = make_module(given, obs_space, action_space)
        self.check_policy(made)
        if isinstance(made, DeterministicModule):
            return made
        if is_built_in:  # a user's network keeps its weights
            draw_by_gate(made.net)
        module = DeterministicModule(made.net, obs_space, action_space, config.network)
        module.update_due(config.policy_delay)
        return module

    def parameter_groups(self, module: Module) -> Mapping[str, Sequence[nn.Parameter]]:
        """Parameters of the optimizers ``actor`` and ``critic``."""
        net = of_kind(module, DeterministicModule)
        return trained(actor=net.net, critic=net.critic)

    def loss(self, module: Module, batch: Batch) -> Loss:
        """The losses of Fujimoto et al. 2018, algorithm 1: of the critics in each step, of the policy in every
        `policy_delay`-th.

        The policy's gradient does not reach the critics.
        """
        net = of_kind(module, DeterministicModule)
        encoded, action = batch.encode(net.critic), net.encoded(batch.action)
        target = self._target(net, batch)
        values = net.critic.values(encoded, action)
        errors = values - target
        squares = errors.square() * batch[WEIGHT] if WEIGHT in batch else errors.square()
        parts, figures = {"critic": squares.mean(1).sum()}, {"q": values.mean()}
        if net.is_policy_due:
            chosen = torch.tanh(batch.forward(net).bound()[1])
            worth = net.critic.values(encoded, chosen, frozen=True, first_only=True)
            policy = self.policy_loss(worth, chosen, action)
            parts, figures = parts | policy.parts, figures | policy.logged
        loss = Loss(**parts).log(**figures).rest(*(() if net.is_policy_due else ("actor",)))
        return loss.keep(td_error=errors.abs().mean(0)) if WEIGHT in batch else loss

    def _target(self, net: DeterministicModule, batch: Batch) -> Tensor:
        """r + discount * min Q_target(next_obs, a'), with a' the target policy's action plus clipped noise: ``[B]``."""
        config = self.config
        with torch.no_grad():
            action = torch.tanh(batch.forward_next(net.target).bound()[1])
            noise = torch.randn_like(action) * config.target_noise
            action = (action + noise.clamp(-config.target_noise_clip, config.target_noise_clip)).clamp(-1.0, 1.0)
            value = net.target_critic.values(batch.encode_next(net.target_critic), action).amin(0)
            return target_of(batch, config.gamma, value)

    def check_policy(self, policy: Module) -> None:
        """Raise a SettingsError for a policy that can't be trained."""

    def policy_loss(self, worth: Tensor, chosen: Tensor, action: Tensor) -> Loss:
        """The policy's loss, as the part ``actor``.

        Args:
            worth: The first critic's values of ``chosen``, ``[1, B]``.
            chosen: The policy's actions, ``[B, action_size]`` in [-1, 1].
            action: The actions that were taken, in the same form.
        """
        return Loss(actor=-worth.mean())

    def after_step(self, module: Module) -> None:
        """Update the target networks if the policy was updated, and count the step."""
        net = of_kind(module, DeterministicModule)
        if net.is_policy_due:
            net.follow(self.config.tau)
        net.count_step(self.config.policy_delay)

    def after_load(self, module: Module) -> None:
        """Recompute whether the policy is due."""
        of_kind(module, DeterministicModule).update_due(self.config.policy_delay)


class TD3(TwinDelayed, OffPolicyAlgorithm[TD3Config]):
    """Twin delayed deep deterministic policy gradient, for Box actions, with twin critics and smoothed targets."""

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """Make a policy and critics with their targets; see `DeterministicModule`."""
        check_box(action_space, "TD3")
        return super().make_module(given, obs_space, action_space)

    def check_policy(self, policy: Module) -> None:
        """Check that policy and critics are both recurrent or both not."""
        check_memories(policy, self.config.network, "TD3")

    def before_collect(self, env_steps: int) -> None:
        """Let modules act at random until learning starts, and set the exploration noise."""
        for name, policy in self.policies.items():
            with self.settings_of(name):
                module = of_kind(policy.module, DeterministicModule)
                module.acts_at_random = env_steps < self.config.replay.learning_starts
                module.dist.std = self.config.action_noise


@settings
class TD3BCConfig(OfflineCriticConfig, TwinDelayedSettings):
    """Settings of TD3+BC. The recording needs rewards and next observations.

    The paper also normalises observations: ``connectors=("normalize_obs",)``.
    """

    alpha: FloatFrom0 = 2.5
    """Weight of the critic's value against the squared distance to the recorded actions, at least 0. 0 imitates; larger
    trusts the critic more. Values are divided by their mean magnitude, so that the scale of rewards does not matter.
    Default: Fujimoto & Gu 2021."""

    lr: Schedule = 3e-4
    """Learning rate of Adam, or a schedule. Default: Fujimoto & Gu 2021."""

    unused: ClassVar[Mapping[str, str]] = NO_STD | NO_VALUE

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(
            self.network, "network", squash=(self.network.squash is not False, "true: the policy always uses tanh")
        )


class TD3BC(TwinDelayed, OfflineCriticAlgorithm[TD3BCConfig]):
    """TD3 with a policy that stays near the recorded actions; for Box actions.

    When it explores (recording, `evaluate(explore=True)`), it adds normal noise with a standard deviation of 0.1 of
    half the action range.
    """

    name = "td3_bc"

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """Make a policy and critics with their targets; see `DeterministicModule`."""
        check_box(action_space, "TD3+BC", "IQL, which learns any actions, or CQL or DQN for Discrete ones")
        return super().make_module(given, obs_space, action_space)

    def check_policy(self, policy: Module) -> None:
        """Check that the policy is not recurrent."""
        not_recurrent(policy, self.name)

    def policy_loss(self, worth: Tensor, chosen: Tensor, action: Tensor) -> Loss:
        """The policy's loss of Fujimoto & Gu 2021, eq. 5."""
        scale = self.config.alpha / self.mean_over_learners(worth.abs())
        distance = (chosen - action).square().mean()
        return Loss(actor=distance - scale * worth.mean()).log(distance=distance)
