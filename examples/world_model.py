# SPDX-License-Identifier: Apache-2.0
"""A world model: a net that predicts ten steps of a pendulum from its actions, tried on steps it never saw."""

import torch
from gymnasium.spaces import Box
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import etude


class WorldModel(etude.Task[etude.TaskConfig]):
    """Acts at random, and learns what follows."""

    needs_next_obs = True

    def environment(self) -> str:
        """Where to act."""
        return "Pendulum-v1"

    def network(self, obs_space: Box, action_space: Box) -> nn.Module:
        """Observation and action ``[..., 3 + 1]`` to how the observation changes ``[..., 3]``."""
        size = obs_space.shape[0]
        return nn.Sequential(nn.Linear(size + action_space.shape[0], 64), nn.SiLU(), nn.Linear(64, size))

    def act(self, module: nn.Module, obs: Tensor, optimal: bool) -> Tensor:
        """A torque at random."""
        return torch.rand(len(obs), 1) * 4 - 2

    def forward(self, module: nn.Module, batch: etude.Batch) -> Tensor:
        """What follows the first observation of each sample, ``[B, num_samples, 3]``, given all its actions."""
        return predicted(module, batch.obs[:, 0], batch.action)

    def loss(self, module: nn.Module, batch: etude.Batch, output: Tensor) -> etude.Loss:
        """Mean squared error, without what is behind the end of a segment, where a sample is shorter."""
        return etude.Loss(error=F.mse_loss(output[batch.mask], batch.next_obs[batch.mask]))


def predicted(module: nn.Module, obs: Tensor, actions: Tensor) -> Tensor:
    """Observations after each of the actions ``[B, T, 1]``, from those before the first of them, ``[B, 3]``."""
    out = [obs]
    for action in actions.unbind(1):
        out.append(out[-1] + module(torch.cat([out[-1], action], -1)))
    return torch.stack(out[1:], 1)


config = etude.TaskConfig(num_samples=10, replay_epochs=5, num_steps=2000, num_update_steps=200, lr=3e-3, seed=1)
model = WorldModel(config)
for result in model.iterate(etude.Stop(env_steps=20_000)):
    print(f"{result.env_steps:>6,} steps  error {result.losses['error']:.4f}")

unseen = etude.ReplayDataset(10, next_obs=True)
unseen.add(model.collect(num_steps=2000)["main"])
batch = next(iter(DataLoader(unseen, batch_size=len(unseen))))
steps = predicted(model.module.net, batch["obs"][:, 0], batch["action"]).detach()
for what, guess in (("predicted", steps), ("nothing changes", batch["obs"][:, :1])):
    error = (guess - batch["next_obs"])[batch["mask"]].square().mean()
    print(f"error on unseen steps, {what}: {error:.4f}")

figure = Figure((9, 2.5), layout="constrained")
whole = batch["mask"].all(dim=1).nonzero().flatten().tolist()
for axes, i in zip(figure.subplots(1, 4, sharey=True), whole[:: len(whole) // 4], strict=False):
    axes.plot(range(1, 11), batch["next_obs"][i], color="0.6", linewidth=4)
    axes.plot(range(1, 11), steps[i], color="tab:red")
    axes.set_xlabel("steps ahead")
figure.suptitle("Cosine, sine and speed of a pendulum: what followed (grey) and the prediction (red)")
figure.savefig("world_model.png")
