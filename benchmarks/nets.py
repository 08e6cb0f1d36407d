# SPDX-License-Identifier: Apache-2.0
"""The network of all rows, 2x64 tanh with a value, as anyone would write it in torch: what bare loops use."""

import torch
from torch import Tensor, nn

from etude import Output


class Net(nn.Module):
    """Policy and value function of CartPole; shares no layers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B, 2]`` and values ``[B]``."""
        return self.policy(obs), self.value(obs).squeeze(-1)


class UsersNet(Net):
    """The same as a user's own module in Etude."""

    def forward(self, obs: Tensor) -> Output:  # type: ignore[override]
        """As `Net`."""
        logits, value = super().forward(obs)
        return Output(logits, value)


def seeded_net() -> Net:
    """A net with the same weights each time."""
    torch.manual_seed(0)
    return Net()
