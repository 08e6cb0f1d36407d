# SPDX-License-Identifier: Apache-2.0
"""SAC: soft actor-critic (Haarnoja et al. 2018, "Soft actor-critic algorithms and applications", arXiv 1812.05905)."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from etude.algorithms.config import NO_VALUE, ModuleLike
from etude.algorithms.critics import check_box, check_memories, draw_by_gate, of_kind, trained
from etude.algorithms.off_policy import OffPolicyAlgorithm, OffPolicyConfig
from etude.columns import ACTION, WEIGHT
from etude.learners import Batch, Loss, OptimizerConfig, Schedule
from etude.modules import Module, NetworkConfig, make_module
from etude.modules.actors import RandomFirstModule
from etude.modules.critics import TargetedModule, TargetNetwork, TwinCritic, frozen_copy
from etude.modules.distributions import DiagGaussian, SquashedGaussian
from etude.settings import FloatAbove0, Rate, check_rules, settings
from etude.spaces import Space


@settings
class SACConfig(OffPolicyConfig):
    """Settings of SAC."""

    tau: Rate = 0.005
    """How far the critics' target networks move towards them after each gradient step, above 0, at most 1. Default:
    Haarnoja et al. 2018, table 1."""

    temperature: FloatAbove0 | None = None
    """Weight of the entropy, above 0, with actions scaled to [-1, 1]; None: learned, so that the entropy approaches
    `target_entropy`."""

    target_entropy: float | None = None
    """Target entropy of the policy in nats, with actions scaled to [-1, 1]. None: minus the number of action dimensions
    (Haarnoja et al. 2018, table 1)."""

    lr: Schedule = 3e-4
    """Learning rate of Adam for policy, critics and temperature, or a schedule: points of (env_steps, rate) with
    straight lines between. Default: Haarnoja et al. 2018, table 1."""

    temperature_lr: Schedule | None = None
    """Learning rate of the temperature, or a schedule; None: `lr`."""

    optimizer: OptimizerConfig = OptimizerConfig(grad_clip=None)
    """Settings of the optimizer. Default: gradients are not clipped, as in Haarnoja et al. 2018."""

    network: NetworkConfig = NetworkConfig(hidden=(256, 256), activation="relu", state_dependent_std=True)
    """The shape of policy and critics. Standard deviations always depend on the observation. Default: Haarnoja et al.
    2018, table 1."""

    unused: ClassVar[Mapping[str, str]] = {
        "network.state_dependent_std": "standard deviations always depend on the observation"
    } | NO_VALUE

    def __post_init__(self) -> None:
        super().__post_init__()
        check_target_entropy(self)


def check_target_entropy(config: Any) -> None:
    """Raise a SettingsError if settings have a `target_entropy` beside a fixed `temperature`."""
    learned = config.temperature is None or config.target_entropy is None
    check_rules(config, target_entropy=(learned, "none where `temperature` is given, as only its learning needs it"))


class SoftModule(RandomFirstModule, TargetedModule):
    """Policy, twin critics, their targets and the temperature of soft actor-critic (Haarnoja et al. 2018, arXiv
    1812.05905).

    Critics see actions scaled to [-1, 1], and log-densities refer to these, so that a temperature and a target entropy
    mean the same for all bounds. A plain Gaussian's actions are not scaled.

    Args:
        net: The policy network: ``dist_inputs`` are means, then log standard deviations.
        obs_space: The observation space.
        action_space: The action space, a Box.
        dist: The action distribution.
        config: The shape of the critics.
        temperature: Initial temperature, above 0.

    Raises:
        SettingsError: the action space is not a Box of floats.
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
        self.critic = TwinCritic(obs_space, self.action_size, config)
        self.target_critic = frozen_copy(self.critic)
        self.log_temperature = nn.Parameter(torch.tensor([math.log(temperature)]))
        self.follower = TargetNetwork(self.target_critic, self.critic)
        low, high = -np.ones(self.action_size), np.ones(self.action_size)
        self._scaled_dist = dist
        if isinstance(dist, SquashedGaussian):
            low, high = (bound.reshape(-1).astype(np.float64) for bound in (action_space.low, action_space.high))
            self._scaled_dist = SquashedGaussian(spaces.Box(-1.0, 1.0, (self.action_size,), np.float32), ACTION)
        self._middle: Tensor
        self._half: Tensor
        self.register_buffer("_middle", torch.tensor((low + high) / 2, dtype=torch.float32), persistent=False)
        self.register_buffer("_half", torch.tensor((high - low) / 2, dtype=torch.float32), persistent=False)

    def scaled(self, action: Tensor) -> Tensor:
        """Actions ``[B, *shape]`` as critics see them, float32 ``[B, action_size]``."""
        return (action.reshape(-1, self.action_size).float() - self._middle) / self._half

    def sample(self, obs: Any) -> tuple[Tensor, Tensor]:
        """Sample actions ``[B, action_size]`` as critics see them, and their log-densities ``[B]``, with gradients."""
        return self.draw(self(obs).bound()[1])

    def draw(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Like `sample`, from ``dist_inputs`` ``[..., 2 * action_size]``: ``[..., action_size]`` and ``[...]``."""
        noise = torch.randn(*inputs.shape[:-1], self.action_size, device=inputs.device)
        action, logp = self._scaled_dist.rsample(inputs, noise)
        return action[ACTION].reshape(noise.shape), logp

    def temperature_loss(self, logp: Tensor, target_entropy: float | None) -> Tensor:
        """The loss of the log-temperature, eq. 18; the default target is minus the number of action dimensions."""
        entropy = -float(self.action_size) if target_entropy is None else target_entropy
        return -(self.log_temperature * (logp.detach().mean() + entropy)).sum()


def fix(log_weight: nn.Parameter, value: float | None) -> None:
    """Set the logarithm of a loss weight to that of the setting ``value``, unless it is learned: loading has set it to
    that of the saved run."""
    if value is not None and not log_weight.requires_grad:
        with torch.no_grad():
            log_weight.fill_(math.log(value))


def groups_of(soft: SoftModule) -> dict[str, list[nn.Parameter]]:
    """The parameters of the optimizers ``actor``, ``critic`` and, if it is learned, ``temperature``."""
    groups = trained(actor=soft.net, critic=soft.critic)
    return groups | ({"temperature": [soft.log_temperature]} if soft.log_temperature.requires_grad else {})


class SAC(OffPolicyAlgorithm[SACConfig]):
    """Soft actor-critic with a squashed Gaussian, twin critics and a learned temperature."""

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """Make a policy with critics, target critics and the temperature; see `SoftModule`."""
        check_box(action_space)
        config = self.config
        network = dataclasses.replace(config.network, state_dependent_std=True)
        policy = make_module(given, obs_space, action_space, network, squash=network.squash is not False, value=False)
        if isinstance(policy, SoftModule):
            return policy
        assert isinstance(policy.dist, DiagGaussian | SquashedGaussian)
        check_memories(policy, network, "SAC")
        if given is None:  # a user's network keeps its weights
            draw_by_gate(policy)
        start = 1.0 if config.temperature is None else config.temperature
        module = SoftModule(policy.net, obs_space, action_space, policy.dist, network, start)
        module.log_temperature.requires_grad_(config.temperature is None)
        return module

    def parameter_groups(self, module: Module) -> Mapping[str, Sequence[nn.Parameter]]:
        """Parameters of the optimizers ``actor``, ``critic`` and, if it is learned, ``temperature``."""
        return groups_of(of_kind(module, SoftModule))

    def before_collect(self, env_steps: int) -> None:
        """Let modules act at random until learning starts."""
        for name, policy in self.policies.items():
            with self.settings_of(name):
                of_kind(policy.module, SoftModule).acts_at_random = env_steps < self.config.replay.learning_starts

    def loss(self, module: Module, batch: Batch) -> Loss:
        """The losses of Haarnoja et al. 2018: critics by eq. 5 and 6, policy by eq. 9, log-temperature by eq. 18.

        Each part's gradient reaches only its own parameters.
        """
        soft = of_kind(module, SoftModule)
        temperature = soft.log_temperature.detach().exp()
        encoded = batch.encode(soft.critic)
        values = soft.critic.values(encoded, soft.scaled(batch.action))
        target = self._target(soft, batch, temperature)
        errors = target - values
        squares = errors.square() * batch[WEIGHT] if WEIGHT in batch else errors.square()
        action, logp = soft.draw(batch.forward(soft).bound()[1])
        value = soft.critic.values(encoded, action, frozen=True).amin(0)
        parts = {"actor": (temperature * logp - value).mean(), "critic": 0.5 * squares.mean(1).sum()}
        if soft.log_temperature.requires_grad:
            parts["temperature"] = soft.temperature_loss(logp, self.config.target_entropy)
        loss = Loss(**parts).log(temperature=temperature.squeeze(0), entropy=-logp.mean(), q=values.mean())
        return loss.keep(td_error=errors.abs().mean(0)) if WEIGHT in batch else loss

    def _target(self, soft: SoftModule, batch: Batch, temperature: torch.Tensor) -> torch.Tensor:
        """r + discount * (min Q_target(next_obs, a') - temperature * log pi(a')), with a' sampled from pi: ``[B]``."""
        with torch.no_grad():
            action, logp = soft.draw(batch.forward_next(soft).bound()[1])
            value = soft.target_critic.values(batch.encode_next(soft.target_critic), action).amin(0)
            return torch.addcmul(batch.reward, batch.discount, value - temperature * logp)

    def after_load(self, module: Module) -> None:
        """Set a temperature that is not learned to that of the settings."""
        fix(of_kind(module, SoftModule).log_temperature, self.config.temperature)

    def after_step(self, module: Module) -> None:
        """Update the target critics."""
        of_kind(module, SoftModule).follower.follow(self.config.tau)
