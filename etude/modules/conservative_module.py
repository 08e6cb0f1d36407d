# SPDX-License-Identifier: Apache-2.0
"""ConservativeModule: a `SoftModule` with the weight of a penalty on its critics."""

import math

import torch
from torch import nn

from etude.modules.distributions import SquashedGaussian
from etude.modules.networks import NetworkConfig
from etude.modules.soft_module import SoftModule
from etude.spaces import Space


class ConservativeModule(SoftModule):
    """What CQL learns of Box actions (Kumar et al. 2020, arXiv 2006.04779).

    Args:
        net: The policy: ``dist_inputs`` are means, then log standard deviations.
        obs_space: What it sees.
        action_space: A Box with finite bounds.
        dist: Of the actions.
        config: The shape of the critics.
        temperature: At the start, above 0.
        alpha: The weight of the penalty at the start, above 0.
    """

    def __init__(
        self,
        net: nn.Module,
        obs_space: Space,
        action_space: Space,
        dist: SquashedGaussian,
        config: NetworkConfig,
        temperature: float,
        alpha: float,
    ) -> None:
        super().__init__(net, obs_space, action_space, dist, config, temperature)
        self.log_alpha = nn.Parameter(torch.tensor([math.log(alpha)]))
