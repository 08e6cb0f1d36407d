# SPDX-License-Identifier: Apache-2.0
"""Action-value networks of the built-in kind, several side by side."""

import itertools
import math
from collections.abc import Mapping

import torch
from gymnasium import spaces
from torch import Tensor, nn

from etude.columns import ACTION, OBS, renamed
from etude.modules.network import ACTIVATIONS, NetworkConfig, ObsEncoder
from etude.spaces import Space


class QNets(nn.Module):
    """``members`` functions Q(observation, action), whose layers are stacked, so that each is one batched product.

    For a Discrete space each has an output for every action; for others the action is a part of its input. What goes in
    is scaled to mean 0 and deviation 1, and what comes out from it; see `scale`. Images are encoded once for all
    members. Weights are drawn as in ``torch.nn.Linear``.
    """

    def __init__(self, obs_space: Space, action_space: Space, config: NetworkConfig, members: int) -> None:
        super().__init__()
        self.members = members
        self.encoder = ObsEncoder(obs_space, config.conv, config.conv_width)
        self.actions: ObsEncoder | None = None
        self._start, outputs, width = 0, 1, self.encoder.width
        if isinstance(action_space, spaces.Discrete):
            self.num_actions = outputs = int(action_space.n)
            self._start = int(action_space.start)
        else:
            self.actions = ObsEncoder(action_space, config.conv, config.conv_width)
            width += self.actions.width
        self.activation = ACTIVATIONS[config.activation].torch()
        widths = [width, *config.hidden, outputs]
        self._num_layers = len(widths) - 1
        for i, (rows, columns) in enumerate(itertools.pairwise(widths)):
            limit = 1.0 / math.sqrt(rows)
            self.register_parameter(f"weight_{i}", nn.Parameter(torch.empty(members, rows, columns)))
            self.register_parameter(f"bias_{i}", nn.Parameter(torch.empty(members, 1, columns)))
            for name in ("weight", "bias"):
                nn.init.uniform_(getattr(self, f"{name}_{i}"), -limit, limit)
        self.mean: Tensor
        self.std: Tensor
        self.middle: Tensor
        self.spread: Tensor
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(width))
        self.register_buffer("middle", torch.zeros(()))
        self.register_buffer("spread", torch.ones(()))

    @torch.no_grad()
    def scale(self, obs: Mapping[str, Tensor], action: Tensor, returns: Tensor) -> None:
        """Take the scales of inputs and outputs from an example ``[B, ...]``; arguments as for `taken`."""
        x = self._inputs(obs, None if self.actions is None else action)
        mean, std = x.mean(0), x.std(0, correction=0)
        if not self.encoder.vector:
            mean[: self.encoder.width], std[: self.encoder.width] = 0.0, 1.0  # what convolutions give will change
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std > 1e-6, std, 1.0))
        spread = returns.std(correction=0)
        self.middle.copy_(returns.mean())
        self.spread.copy_(torch.where(spread > 1e-6, spread, 1.0))

    def encoded(self, action: Mapping[str, Tensor]) -> Tensor:
        """What `taken` takes for actions: int64 ``[B]`` positions of a Discrete space's, or float32 ``[B, F]``."""
        if self.actions is None:
            return action[ACTION].long() - self._start
        features: Tensor = self.actions(renamed(dict(action), ACTION, OBS))
        return features

    def taken(self, obs: Mapping[str, Tensor], action: Tensor) -> Tensor:
        """``[members, B]``: Q of the actions taken."""
        if self.actions is not None:
            return self._run(self._inputs(obs, action)).squeeze(-1)
        q = self._run(self._inputs(obs, None))
        return q.gather(-1, action.expand(self.members, -1).unsqueeze(-1)).squeeze(-1)

    def expected(self, obs: Mapping[str, Tensor], policy: Tensor) -> Tensor:
        """``[members, B]``: the mean of Q over a policy's actions.

        Args:
            obs: Columns ``[B, ...]``.
            policy: Probabilities ``[B, n]`` of a Discrete space's actions; for others, actions ``[B, num, F]`` that it
                drew.
        """
        if self.actions is None:
            return (self._run(self._inputs(obs, None)) * policy).sum(-1)
        x = self.encoder(obs)
        num = policy.shape[1]
        each = torch.cat((x.unsqueeze(1).expand(-1, num, -1), policy), -1).flatten(0, 1)
        return self._run(each).view(self.members, len(x), num).mean(-1)

    def _inputs(self, obs: Mapping[str, Tensor], action: Tensor | None) -> Tensor:
        x: Tensor = self.encoder(obs)
        return x if action is None else torch.cat((x, action), -1)

    def _run(self, x: Tensor) -> Tensor:
        x = ((x - self.mean) / self.std).expand(self.members, -1, -1)
        for i in range(self._num_layers):
            x = torch.baddbmm(getattr(self, f"bias_{i}"), x, getattr(self, f"weight_{i}"))
            if i + 1 < self._num_layers:
                x = self.activation(x)
        return self.middle + self.spread * x
