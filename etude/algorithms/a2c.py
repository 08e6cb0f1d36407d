# SPDX-License-Identifier: Apache-2.0
"""A2C: advantage actor-critic, the synchronous A3C (Mnih et al. 2016, "Asynchronous methods for deep reinforcement
learning", arXiv 1602.01783)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch.nn import functional as F

from etude.algorithms.config import OnPolicyConfig
from etude.algorithms.on_policy import OnPolicyAlgorithm
from etude.connectors import GAE, NormalizeAdvantages
from etude.learners import Batch, Loss, OptimizerConfig, Schedule
from etude.modules import Module
from etude.settings import FloatFrom0, settings

_ONE_STEP = "an iteration makes one gradient step, from all of its steps"


@settings
class A2CConfig(OnPolicyConfig):
    """Settings of A2C."""

    num_steps: int = 80
    """Steps collected for each iteration, over all envs, at least 1; an iteration makes one gradient step. Default:
    Mnih et al. 2016, 5 steps in each of 16 envs."""

    epochs: int = 1
    """An iteration makes one gradient step; see `PPO` for more."""

    num_minibatches: int | None = 1
    """An iteration makes one gradient step; see `PPO` for more."""

    lambda_: float = 1.0
    """Lambda of generalised advantage estimation, 0 to 1. Default: 1, which sums all rewards of a segment and
    bootstraps at its end, as in Mnih et al. 2016."""

    value_weight: FloatFrom0 = 0.5
    """Weight of the value loss, the mean squared error, at least 0. Default: as in Stable-Baselines3."""

    entropy_weight: Schedule = 0.01
    """Weight of the entropy bonus, at least 0, or a schedule: points of (env_steps, weight). Default: Mnih et al.
    2016."""

    normalize_advantages: bool = False
    """Normalise advantages over each iteration's steps to mean 0 and standard deviation 1."""

    lr: Schedule = 7e-4
    """Learning rate, or a schedule: points of (env_steps, rate) with straight lines between. Default:
    Stable-Baselines3's."""

    optimizer: OptimizerConfig = OptimizerConfig(betas=(0.0, 0.99), eps=1e-5)
    """Settings of the optimizer. Default: with a first beta of 0, Adam is RMSprop with the decay of Mnih et al. 2016,
    except for its bias correction of the second moment; `eps` is Stable-Baselines3's."""

    unused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("epochs", "minibatch_size", "num_minibatches", "optimizer.accumulate"), _ONE_STEP
    )


class A2C(OnPolicyAlgorithm[A2CConfig]):
    """Policy gradient with a learned baseline: one gradient step after a few steps in many envs."""

    def learner_connectors(self) -> list[Any]:
        """The connectors that add advantages and value targets, from the module's values before the update."""
        connectors: list[Any] = [GAE(self.config.gamma, self.config.lambda_)]
        return [*connectors, NormalizeAdvantages()] if self.config.normalize_advantages else connectors

    def loss(self, module: Module, batch: Batch) -> Loss:
        """The loss of Mnih et al. 2016, algorithm S3, with the entropy bonus of section 4."""
        out = batch.forward(module)
        assert out.value is not None  # GAE has checked it
        entropy = out.entropy().mean()
        parts = {
            "policy": -(batch.advantage * out.logp(batch.action)).mean(),
            "value": self.config.value_weight * F.mse_loss(out.value, batch["value_target"]),
        }
        if self.config.entropy_weight:
            parts["entropy"] = -self.scheduled("entropy_weight", module) * entropy
        return Loss(**parts).log(entropy=entropy)
