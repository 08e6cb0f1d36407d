# SPDX-License-Identifier: Apache-2.0
"""PPO: proximal policy optimisation (Schulman et al. 2017, "Proximal policy optimization algorithms")."""

from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from etude.algorithms.config import ClipRange, OnPolicyConfig
from etude.algorithms.on_policy import OnPolicyAlgorithm
from etude.connectors import GAE, NormalizeAdvantages
from etude.experience import Experience
from etude.learners import Batch, Loss, ModuleLearner, OptimizerConfig, Schedule, Update, mean_of
from etude.modules import Module
from etude.settings import FloatAbove0, FloatFrom0, IntFrom1, settings


@settings
class PPOConfig(OnPolicyConfig):
    """Settings of PPO."""

    everyday: ClassVar[tuple[str, ...]] = ("clip", "entropy_weight")

    lr: Schedule = 3e-4
    """Learning rate of Adam, or a schedule: points of (env_steps, rate) with straight lines between. Default: Schulman
    et al. 2017, table 3. Small tasks such as CartPole are learned faster with 1e-3."""

    minibatch_size: IntFrom1 = 64
    """Steps in a minibatch, at least 1; each makes one gradient step. Default: Schulman et al. 2017, table 3. Larger
    minibatches take less time for each step."""

    optimizer: OptimizerConfig = OptimizerConfig(eps=1e-5)
    """Settings of the optimizer. Default of `eps`: Huang et al. 2022, detail 3."""

    clip: ClipRange = 0.2
    """Clipping range of the probability ratio, above 0, or a schedule: points of (env_steps, range), which may reach 0.
    Default: Schulman et al. 2017, table 3."""

    value_clip: FloatAbove0 | None = None
    """Clip the change of the value function to this range around the old values, above 0; None does not clip. Default:
    Andrychowicz et al. 2021, "What matters in on-policy reinforcement learning", which finds that clipping hurts."""

    value_weight: FloatFrom0 = 0.5
    """Weight of the value loss, at least 0. Default: Huang et al. 2022, detail 9."""

    entropy_weight: Schedule = 0.0
    """Weight of the entropy bonus, at least 0, or a schedule: points of (env_steps, weight). Default: none, as in
    Schulman et al. 2017 for continuous control."""

    normalize_advantages: bool = True
    """Normalise advantages over each iteration's steps to mean 0 and standard deviation 1."""

    kl_target: FloatAbove0 | None = None
    """Target KL divergence, above 0. An iteration's epochs end once the policy has moved by more than 1.5 times this.
    None never stops early."""


class PPO(OnPolicyAlgorithm[PPOConfig]):
    """PPO with a clipped objective, generalised advantage estimation and Adam."""

    def learner_connectors(self) -> list[Any]:
        """The connectors that add advantages and value targets, from the module's values before the update."""
        connectors: list[Any] = [GAE(self.config.gamma, self.config.lambda_)]
        return [*connectors, NormalizeAdvantages()] if self.config.normalize_advantages else connectors

    def loss(self, module: Module, batch: Batch) -> Loss:
        """The clipped objective of Schulman et al. 2017, eq. 9."""
        config = self.config
        out = batch.forward(module)
        assert out.value is not None  # GAE has checked it
        ratio = (out.logp(batch.action) - batch.logp).exp()
        clip = self.scheduled("clip", module)
        clipped = ratio.clamp(1 - clip, 1 + clip)
        policy = -torch.min(ratio * batch.advantage, clipped * batch.advantage).mean()
        limit, target = config.value_clip, batch["value_target"]
        if limit is None:
            error = F.mse_loss(out.value, target)
        else:
            near = batch["value"] + (out.value - batch["value"]).clamp(-limit, limit)
            error = torch.max((out.value - target).square(), (near - target).square()).mean()
        parts = {"policy": policy, "value": config.value_weight * error}
        if config.entropy_weight:
            parts["entropy"] = -self.scheduled("entropy_weight", module) * out.entropy().mean()
        return Loss(**parts)

    def update(self, learner: ModuleLearner, exp: Experience) -> Update:
        """Update one module as every on-policy algorithm does, but one epoch at a time if a KL target is set.

        Losses and metrics are means over these epochs. The policy's movement is measured after the last gradient step.
        """
        config = self.config
        rounds, epochs = (1, config.epochs) if config.kl_target is None else (config.epochs, 1)
        # metrics that are only logged need no more than about a thousand steps
        sparse = max(1, exp.num_steps // 1024) if config.kl_target is None else 1
        updates: list[Update] = []
        for _ in range(rounds):
            updates.append(self.update_epochs(learner, exp, epochs=epochs))
            moved = learner.measure(exp, self._movement, sparse=sparse, **self.sequences_of(learner))
            if config.kl_target is not None and moved["kl"] > 1.5 * config.kl_target:
                break
        update = mean_of(updates)
        return Update(update.losses, update.metrics | moved | update.metrics)  # what the loss logs is first, and wins

    def _movement(self, module: Module, batch: Batch) -> dict[str, torch.Tensor]:
        """How far the policy has moved from the one that acted, and its entropy."""
        out = batch.forward(module)
        log_ratio = out.logp(batch.action) - batch.logp
        ratio = log_ratio.exp()
        return {
            "kl": (ratio - 1 - log_ratio).mean(),  # Schulman 2020, "Approximating KL divergence": the k3 estimator
            "clip_fraction": ((ratio - 1).abs() > self.scheduled("clip", module)).float().mean(),
            "entropy": out.entropy().mean(),
        }
