# SPDX-License-Identifier: Apache-2.0
"""Modules: networks, action distributions, and how they act."""

from etude.modules.acting import Actor, NumPyActor
from etude.modules.critics import FollowedModule
from etude.modules.distributions import Distribution, EpsilonGreedy, distribution_for
from etude.modules.module import Module, TorchActor, make_module
from etude.modules.network import Network, NetworkConfig, Output

__all__ = [
    "Actor",
    "Distribution",
    "EpsilonGreedy",
    "FollowedModule",
    "Module",
    "Network",
    "NetworkConfig",
    "NumPyActor",
    "Output",
    "TorchActor",
    "distribution_for",
    "make_module",
]
