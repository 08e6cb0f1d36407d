# SPDX-License-Identifier: Apache-2.0
"""PPO with a network of one's own: any nn.Module that returns an Output."""

import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

import etude


class Net(nn.Module):
    """Two layers with a residual connection, shared by policy and value function."""

    def __init__(self, obs_space: Box, action_space: Discrete) -> None:
        super().__init__()
        self.first = nn.Linear(obs_space.shape[0], 64)
        self.second = nn.Linear(64, 64)
        self.policy = nn.Linear(64, int(action_space.n))
        self.value = nn.Linear(64, 1)
        nn.init.orthogonal_(self.policy.weight, 0.01)

    def forward(self, obs: Tensor) -> etude.Output:
        """Observations ``[B, n]`` to logits ``[B, actions]`` and values ``[B, 1]``."""
        x = torch.relu(self.first(obs))
        x = x + torch.relu(self.second(x))
        return etude.Output(dist_inputs=self.policy(x), value=self.value(x))


ppo = etude.PPO(etude.PPOConfig(env="CartPole-v1", module=Net, seed=1))
result = ppo.fit(etude.Stop(return_mean=150, env_steps=60_000))
print(f"return {result.return_mean:.1f} after {result.env_steps:,} steps")
