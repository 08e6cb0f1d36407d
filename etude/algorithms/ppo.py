# SPDX-License-Identifier: Apache-2.0
"""PPO: proximal policy optimisation (Schulman et al. 2017, "Proximal policy optimization algorithms")."""

from typing import Any

import torch

from etude.algorithms.config import OnPolicyConfig
from etude.algorithms.on_policy import OnPolicyAlgorithm
from etude.connectors import GAE, NormalizeAdvantages
from etude.experience import Experience
from etude.learners import Batch, Loss, Update
from etude.modules import Module
from etude.settings import settings


@settings
class PPOConfig(OnPolicyConfig):
    """Settings of PPO."""

    clip: float = 0.2
    """Clipping range of the probability ratio. Default: Schulman et al. 2017, table 3."""

    value_clip: float | None = None
    """Clip the change of the value function to this much around the old values; None does not. Default: Andrychowicz et
    al. 2021, "What matters in on-policy reinforcement learning", which finds that it hurts."""

    value_weight: float = 0.5
    """Weight of the value loss. Default: Huang et al. 2022, detail 9."""

    entropy_weight: float = 0.0
    """Weight of the entropy, which is added to what is maximised. Default: none, as in Schulman et al. 2017 for
    continuous control."""

    normalize_advantages: bool = True
    """Give advantages mean 0 and standard deviation 1 over each iteration's steps."""

    kl_target: float | None = None
    """Go over an iteration's steps no more once the policy has moved by more than 1.5 times this KL divergence; None
    never stops early."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(
            clip=(self.clip > 0, "greater than 0"),
            value_clip=(self.value_clip is None or self.value_clip > 0, "greater than 0, or none"),
            kl_target=(self.kl_target is None or self.kl_target > 0, "greater than 0, or none"),
        )


class PPO(OnPolicyAlgorithm[PPOConfig]):
    """PPO with a clipped objective, generalised advantage estimation and Adam."""

    name = "ppo"

    def learner_connectors(self) -> list[Any]:
        """Advantages and value targets, from the values that the module had while acting."""
        connectors: list[Any] = [GAE(self.config.gamma, self.config.lambda_)]
        return [*connectors, NormalizeAdvantages()] if self.config.normalize_advantages else connectors

    def loss(self, module: Module, batch: Batch) -> Loss:
        """Schulman et al. 2017, eq. 9."""
        config = self.config
        out = module(batch.obs)
        log_ratio = out.logp(batch.action) - batch.logp
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
        policy = -torch.min(ratio * batch.advantage, clipped * batch.advantage).mean()
        error = (out.value - batch.value_target).square()
        if config.value_clip is not None:
            near = batch.value + (out.value - batch.value).clamp(-config.value_clip, config.value_clip)
            error = torch.max(error, (near - batch.value_target).square())
        entropy = out.entropy().mean()
        with torch.no_grad():
            kl = (ratio - 1 - log_ratio).mean()  # Schulman 2020, "Approximating KL divergence": the k3 estimator
            clip_fraction = ((ratio - 1).abs() > config.clip).float().mean()
        return Loss(
            policy=policy, value=config.value_weight * error.mean(), entropy=-config.entropy_weight * entropy
        ).log(kl=kl, clip_fraction=clip_fraction, policy_entropy=entropy)

    def update(self, exp: Experience) -> Update:
        """As for every on-policy algorithm, an epoch at a time where a KL target is set."""
        config = self.config
        if config.kl_target is None:
            return super().update(exp)
        for _ in range(config.epochs):
            update = self.learner.update(exp, minibatch_size=config.minibatch_size)
            if update.metrics["kl"] > 1.5 * config.kl_target:
                break
        return update
