# SPDX-License-Identifier: Apache-2.0
"""An env of torch tensors, on a GPU if there is one: 1,024 boats cross a river.

It is Zermelo's problem (1931): the current is strongest in the middle, and the dock is on the other bank. Observations
and actions stay on the device.
"""

import sys
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import etude

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class River(gym.vector.VectorEnv[Any, Any, Any]):
    """Begin somewhere on the near bank (y = -1), and land at the dock at (0, 1)."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.DISABLED}  # noqa: RUF012
    single_observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)  # the position
    single_action_space = gym.spaces.Box(-1, 1, (2,), np.float32)  # where to row, and how hard

    def __init__(self, num_envs: int, device: str) -> None:
        self.num_envs, self.device = num_envs, torch.device(device)
        self.random = torch.Generator(self.device)
        self.at = torch.zeros(num_envs, 2, device=device)
        self.t = torch.zeros(num_envs, dtype=torch.int64, device=device)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Take boats to the near bank: all, or those where ``options["reset_mask"]`` is true."""
        if seed is not None:
            self.random.manual_seed(seed)
        begins = (options or {}).get("reset_mask", torch.ones_like(self.t, dtype=torch.bool))
        x = torch.rand(self.num_envs, generator=self.random, device=self.device) * 4 - 2
        self.at = torch.where(begins[:, None], torch.stack([x, -torch.ones_like(x)], 1), self.at)
        self.t = torch.where(begins, 0, self.t)
        return self.at, {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Row for a twentieth of the time that a boat takes for one unit in still water."""
        rowed = actions / actions.norm(dim=1, keepdim=True).clamp(min=1)
        flow = torch.stack([0.8 * (1 - self.at[:, 1] ** 2), torch.zeros_like(self.at[:, 1])], 1)
        before = self.distance()
        self.at = self.at + 0.05 * (rowed + flow)
        self.at = torch.stack([self.at[:, 0], self.at[:, 1].clamp(-1, 1)], 1)
        self.t = self.t + 1
        landed = self.distance() < 0.1
        return self.at, before - self.distance() - 0.01 + landed, landed, ~landed & (self.t >= 150), {}

    def distance(self) -> Tensor:
        """Of each boat to the dock, ``[num_envs]``."""
        return (self.at - torch.tensor([0.0, 1.0], device=self.device)).norm(dim=1)


def draw(policy: etude.Policy, axes: Any, title: str) -> None:
    """Row 30 boats, and draw their ways."""
    env = River(30, DEVICE)
    obs, _ = env.reset(seed=7)
    ways, rows = [obs], torch.ones(30, dtype=torch.bool, device=DEVICE)
    for _ in range(150):
        obs, _, landed, _, _ = env.step(policy.act(obs))
        rows &= ~landed
        ways.append(torch.where(rows[:, None], obs, torch.nan))
    x, y = torch.stack(ways).cpu().unbind(-1)
    axes.plot(x, y, color="tab:blue", linewidth=0.8)
    axes.plot(0, 1, "o", color="tab:red")
    axes.set(
        title=f"{title}: {int((~rows).sum())} of 30 land",
        xlim=(-2.5, 4),
        ylim=(-1.1, 1.2),
        xlabel="the current flows to the right",
    )


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 655_360
config = etude.PPOConfig(
    env=River(1024, DEVICE), num_envs=1024, num_steps=1024 * 16, minibatch_size=2048, device=DEVICE, seed=1
)
ppo = etude.PPO(config)
figure = Figure((9, 3), layout="constrained")
before, after = figure.subplots(1, 2)
draw(ppo.policy, before, "before")
for result in ppo.iterate(etude.Stop(env_steps=steps)):
    print(f"{result.env_steps:>9,} steps on {DEVICE}  return {result.return_mean:6.2f}")
draw(ppo.policy, after, "after")
figure.savefig("gpu_env.png")
