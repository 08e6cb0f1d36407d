# SPDX-License-Identifier: Apache-2.0
"""Modules: networks, action distributions, and how they act."""

from etude.modules.acting import Actor, NumPyActor, TorchActor
from etude.modules.distributions import Distribution, distribution_for
from etude.modules.module import Module, make_module
from etude.modules.networks import Network, NetworkConfig
from etude.modules.output import Output

__all__ = [
    "Actor",
    "Distribution",
    "Module",
    "Network",
    "NetworkConfig",
    "NumPyActor",
    "Output",
    "TorchActor",
    "distribution_for",
    "make_module",
]
