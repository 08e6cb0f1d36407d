# SPDX-License-Identifier: Apache-2.0
"""An algorithm of one's own: advantage actor-critic (A2C; Mnih et al. 2016) on the surface that PPO is written on."""

from torch.nn import functional as F

import etude
from etude.learners import Batch
from etude.modules import Module


@etude.settings
class A2CConfig(etude.OnPolicyConfig):
    """Settings of A2C."""

    num_steps: int = 256
    """Steps collected for each iteration, over all envs."""

    epochs: int = 1
    """The gradient is right only for the policy that acted."""

    entropy_weight: float = 0.01
    """Weight of the entropy. Default: Mnih et al. 2016."""


class A2C(etude.OnPolicyAlgorithm[A2CConfig]):
    """Policy gradient with generalised advantages, once over each batch of steps."""

    name = "a2c"

    def learner_connectors(self) -> list[etude.Connector]:
        """What the loss needs beside what was recorded."""
        return [etude.GAE(self.config.gamma, self.config.lambda_), etude.NormalizeAdvantages()]

    def loss(self, module: Module, batch: Batch) -> etude.Loss:
        """Policy gradient, value error and entropy."""
        out = batch.forward(module)
        return etude.Loss(
            policy=-(out.logp(batch.action) * batch.advantage).mean(),
            value=0.5 * F.mse_loss(out.value, batch.value_target),
            entropy=-self.config.entropy_weight * out.entropy().mean(),
        )


algorithm = A2C(A2CConfig(env="CartPole-v1", lr=2e-3, seed=1))
for result in algorithm.iterate(etude.Stop(return_mean=200, env_steps=150_000)):
    if result.iteration % 50 == 0:
        print(f"{result.env_steps:>7,} steps  return {result.return_mean:6.1f}")
print(f"return {result.return_mean:.1f} after {result.env_steps:,} steps")
