# SPDX-License-Identifier: Apache-2.0
"""SAC: soft actor-critic (Haarnoja et al. 2018, "Soft actor-critic algorithms and applications", arXiv 1812.05905)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

from etude.algorithms.config import NO_VALUE, ActorCriticRates, ModuleLike
from etude.algorithms.critics import groups_of, of_kind
from etude.algorithms.off_policy import OffPolicyAlgorithm, OffPolicyConfig
from etude.columns import WEIGHT
from etude.errors import SettingsError
from etude.learners import Batch, Loss, Schedule
from etude.modules import Module, NetworkConfig, make_module
from etude.modules.distributions import DiagGaussian, SquashedGaussian
from etude.modules.soft_module import SoftModule, check_box
from etude.settings import settings
from etude.spaces import Space


@settings
class SACConfig(OffPolicyConfig, ActorCriticRates):
    """Settings of SAC."""

    tau: float = 0.005
    """How far the critics' target networks move after each gradient step, above 0, at most 1. Default: Haarnoja et al.
    2018, table 1."""

    temperature: float | None = None
    """Weight of the entropy, above 0, with actions scaled to [-1, 1]; None: it is learned, so that the entropy becomes
    `target_entropy`."""

    target_entropy: float | None = None
    """What the entropy of a policy is to be, in nats, with actions scaled to [-1, 1]; None: minus the numbers in an
    action (Haarnoja et al. 2018, table 1)."""

    lr: Schedule = 3e-4
    """Learning rate of Adam for policy, critics and temperature; or a schedule of it: points of (env_steps, rate) with
    straight lines between. Default: Haarnoja et al. 2018, table 1."""

    temperature_lr: Schedule | None = None
    """Learning rate of the temperature of its own, or a schedule of it; None: `lr`."""

    grad_clip: float | None = None
    """Limit that gradients are clipped to, see `grad_clip_by`; None leaves them as they are, as in Haarnoja et al."""

    learning_starts: int = 1000
    """Env steps with actions drawn from the whole space, before the first gradient step."""

    squash: bool = True
    """Hold actions inside their bounds by tanh (Haarnoja et al. 2018, appendix C); else a plain Gaussian draws them,
    and the env gets them clipped."""

    network: NetworkConfig = NetworkConfig(hidden=(256, 256), activation="relu", state_dependent_std=True)
    """The shape of policy and critics. Standard deviations always depend on the state. Default: Haarnoja et al. 2018,
    table 1."""

    unused: ClassVar[Mapping[str, str]] = {
        "network.state_dependent_std": "standard deviations always depend on the observation"
    } | NO_VALUE

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(
            tau=(0 < self.tau <= 1, "above 0 and at most 1"),
            temperature=(self.temperature is None or self.temperature > 0, "greater than 0, or none"),
        )


class SAC(OffPolicyAlgorithm[SACConfig]):
    """Soft actor-critic with a squashed Gaussian, twin critics and a learned temperature."""

    name = "sac"
    Config = SACConfig

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """A policy with critics, their targets and the temperature; see `SoftModule`."""
        check_box(action_space)
        config = self.config
        network = dataclasses.replace(config.network, state_dependent_std=True)
        policy = make_module(given, obs_space, action_space, network, squash=config.squash, value=False)
        if isinstance(policy, SoftModule):
            return policy
        assert isinstance(policy.dist, DiagGaussian | SquashedGaussian)
        if policy.recurrent != (network.recurrent is not None):
            has, lacks = ("policy", "critics") if policy.recurrent else ("critics", "policy")
            raise SettingsError(
                f"the {has} of SAC would have a memory, and the {lacks} none: give a `module` that is recurrent and "
                "set `network.recurrent`, which the critics are made by, or neither."
            )
        start = 1.0 if config.temperature is None else config.temperature
        module = SoftModule(policy.net, obs_space, action_space, policy.dist, network, start)
        module.log_temperature.requires_grad_(config.temperature is None)
        return module

    def parameter_groups(self, module: Module) -> Mapping[str, Sequence[nn.Parameter]]:
        """Optimizers ``actor``, ``critic`` and, where it is learned, ``temperature``."""
        return groups_of(of_kind(module, SoftModule))

    def before_collect(self, env_steps: int) -> None:
        """Lets modules act at random until learning starts."""
        for name, student in self.students.items():
            with self.settings_of(name):
                of_kind(student.module, SoftModule).acts_at_random = env_steps < self.config.learning_starts

    def loss(self, module: Module, batch: Batch) -> Loss:
        """Haarnoja et al. 2018: critics by eq. 5 and 6, policy by eq. 9, temperature by eq. 18 on its logarithm.

        Each part's gradient reaches its own parameters only.
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
        parts = {
            "actor": (temperature * logp - value).mean(),
            "critic": 0.5 * squares.mean(1).sum(),
        }
        if soft.log_temperature.requires_grad:
            parts["temperature"] = -(soft.log_temperature * (logp.detach().mean() + self._target_entropy(soft))).sum()
        loss = Loss(**parts).log(temperature=temperature.squeeze(0), entropy=-logp.mean(), q=values.mean())
        return loss.keep(td_error=errors.abs().mean(0)) if WEIGHT in batch else loss

    def _target(self, soft: SoftModule, batch: Batch, temperature: torch.Tensor) -> torch.Tensor:
        """``[B]``: r + discount * (min Q_target(next_obs, a') - temperature * log pi(a')), with a' drawn from pi."""
        with torch.no_grad():
            action, logp = soft.draw(batch.forward_next(soft).bound()[1])
            value = soft.target_critic.values(batch.encode_next(soft.target_critic), action).amin(0)
            return torch.addcmul(batch.reward, batch.discount, value - temperature * logp)

    def _target_entropy(self, soft: SoftModule) -> float:
        given = self.config.target_entropy
        return -float(soft.action_size) if given is None else given

    def after_step(self, module: Module) -> None:
        """Moves the critics' targets."""
        of_kind(module, SoftModule).follower.follow(self.config.tau)
