# SPDX-License-Identifier: Apache-2.0
"""A whole algorithm in one class: REINFORCE (Williams 1992) with env, net, acting and loss of its own."""

from gymnasium.spaces import Box, Discrete
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributions import Categorical

import etude


class Reinforce(etude.Task[etude.TaskConfig]):
    """Makes actions more likely in proportion to the return that followed them."""

    def environment(self) -> str:
        """Where to act."""
        return "CartPole-v1"

    def network(self, obs_space: Box, action_space: Discrete) -> nn.Module:
        """Observations ``[..., 4]`` to logits ``[..., 2]``."""
        return nn.Sequential(nn.Linear(obs_space.shape[0], 64), nn.Tanh(), nn.Linear(64, int(action_space.n)))

    def act(self, module: nn.Module, obs: Tensor, optimal: bool) -> Tensor:
        """The likeliest action, or one that is drawn."""
        logits = module(obs)
        return logits.argmax(-1) if optimal else Categorical(logits=logits).sample()

    def postprocess_trajectory(self, trajectory: etude.Experience) -> etude.Experience:
        """Adds the discounted return from each step on."""
        returns = trajectory.steps["reward"].copy()
        for t in range(len(returns) - 2, -1, -1):
            returns[t] += self.config.gamma * returns[t + 1]
        return trajectory.with_steps(following=returns)

    def postprocess_trajectories(self, trajectories: etude.Experience) -> etude.Experience:
        """Scales these returns: half of the actions were better than usual."""
        following = trajectories.steps["following"]
        return trajectories.with_steps(following=(following - following.mean()) / (following.std() + 1e-8))

    def loss(self, module: nn.Module, batch: etude.Batch, output: Tensor) -> Tensor:
        """``output`` are the logits of ``batch.obs``, as `forward` is not overridden."""
        return -(Categorical(logits=output).log_prob(batch.action) * batch.following).mean()


config = etude.TaskConfig(whole_episodes=True, num_steps=1000, num_update_steps=1, batch_size=None, lr=1e-2, seed=1)
reinforce, results = Reinforce(config), list[etude.Result]()
for result in reinforce.iterate(etude.Stop(return_mean=300, env_steps=150_000)):
    results.append(result)
    if result.iteration % 20 == 0:
        print(f"{result.env_steps:>7,} steps  return {result.return_mean:6.1f}")
played = reinforce.evaluate(20, seed=2)
print(f"return {played.return_mean:.1f} without exploring, after {result.env_steps:,} steps")

figure = Figure((6, 3), layout="constrained")
axes = figure.subplots()
axes.plot([r.env_steps for r in results], [r.return_mean for r in results])
axes.set(xlabel="env steps", ylabel="return of CartPole")
figure.savefig("reinforce.png")
