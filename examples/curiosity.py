# SPDX-License-Identifier: Apache-2.0
"""Curiosity on a task with one reward, far away: a second module, which learns by a loss of its own.

The intrinsic curiosity module (Pathak et al. 2017, "Curiosity-driven exploration by self-supervised prediction") pays
the agent for what it can't foresee yet.
"""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import etude

LENGTH = 40


class Corridor(gym.Env[Any, Any]):
    """Begin at one end of a corridor, and be paid 1 at the other; 60 steps are enough, but not if they are random."""

    observation_space = gym.spaces.Box(0, 1, (LENGTH,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """At the near end."""
        self.at = self.t = 0
        return self._obs(), {}

    def _obs(self) -> Any:
        return np.eye(LENGTH, dtype=np.float32)[self.at]

    def step(self, action: Any) -> Any:
        """Back or on."""
        self.at = max(0, self.at + (1 if action else -1))
        self.t += 1
        there = self.at == LENGTH - 1
        return self._obs(), float(there), there, self.t >= 60, {}


class Curiosity(nn.Module):
    """What is seen becomes features; from these and the action, it foretells those that follow."""

    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__()
        self.num_actions, width = int(action_space.n), 32
        self.features = nn.Sequential(nn.Linear(*obs_space.shape, 64), nn.ReLU(), nn.Linear(64, width))
        self.inverse = nn.Sequential(nn.Linear(2 * width, 64), nn.ReLU(), nn.Linear(64, self.num_actions))
        self.ahead = nn.Sequential(nn.Linear(width + self.num_actions, 64), nn.ReLU(), nn.Linear(64, width))

    def learner_connectors(self) -> list[Any]:
        """What `own_loss` needs in its batches."""
        return [etude.NextObs()]

    def surprise(self, obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
        """How far off the foretold features are: eq. 6, ``[B]``."""
        one_hot = F.one_hot(action.long(), self.num_actions).float()
        foretold = self.ahead(torch.cat([self.features(obs).detach(), one_hot], -1))
        return 0.5 * (foretold - self.features(next_obs).detach()).square().sum(-1)

    def own_loss(self, batch: etude.Batch) -> etude.Loss:
        """Used instead of the algorithm's: eq. 3 and 5."""
        both = torch.cat([self.features(batch.obs), self.features(batch.next_obs)], -1)
        return etude.Loss(
            inverse=F.cross_entropy(self.inverse(both), batch.action.long()),
            forward=self.surprise(batch.obs, batch.action, batch.next_obs).mean(),
        )


class CuriousPPO(etude.PPO):
    """PPO that is paid for surprises beside what the env pays."""

    weight = 0.02

    def assign(self, parts: dict[str, Any]) -> dict[str, Any]:
        """The agent learns from both kinds of reward, and curiosity from the same steps."""
        exp, net = parts["agent"], self.policies["curiosity"].module.net
        columns = [exp.steps["obs"], exp.steps["action"], exp.next_obs()["obs"]]
        with torch.no_grad():
            surprise = net.surprise(*map(torch.as_tensor, columns)).numpy()
        return {"agent": exp.with_steps(reward=exp.steps["reward"] + self.weight * surprise), "curiosity": exp}


figure = Figure((6, 3), layout="constrained")
axes = figure.subplots()
for algorithm in (CuriousPPO, etude.PPO):
    modules = {"agent": None, "curiosity": Curiosity}  # one acts, both learn
    how = {"num_steps": 2048, "minibatch_size": 256, "lr": 1e-3, "entropy_weight": 0.05, "seed": 1}
    config = etude.PPOConfig(env=Corridor, modules=modules, module_of=lambda *_: "agent", **how)
    results = list(algorithm(config).iterate(etude.Stop(return_mean=0.9, env_steps=40_000)))
    result = results[-1]
    print(f"{algorithm.__name__}: return {result.return_mean:.2f} after {result.env_steps:,} steps")
    axes.plot([r.env_steps for r in results], [r.return_mean for r in results], label=algorithm.__name__)
axes.set(xlabel="env steps", ylabel="episodes that reach the end")
axes.legend()
figure.savefig("curiosity.png")
