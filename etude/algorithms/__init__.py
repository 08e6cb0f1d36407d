# SPDX-License-Identifier: Apache-2.0
"""Algorithms: a loss, its connectors and its defaults; one file each."""

from etude.algorithms.base import Algorithm
from etude.algorithms.bc import BC, BCConfig
from etude.algorithms.clips import Clip, clip
from etude.algorithms.config import AlgorithmConfig, OfflineConfig, OnPolicyConfig
from etude.algorithms.loading import config_class, load
from etude.algorithms.offline import OfflineAlgorithm
from etude.algorithms.on_policy import OnPolicyAlgorithm
from etude.algorithms.ppo import PPO, PPOConfig
from etude.algorithms.result import Evaluation, Result, Stop

__all__ = [
    "BC",
    "PPO",
    "Algorithm",
    "AlgorithmConfig",
    "BCConfig",
    "Clip",
    "Evaluation",
    "OfflineAlgorithm",
    "OfflineConfig",
    "OnPolicyAlgorithm",
    "OnPolicyConfig",
    "PPOConfig",
    "Result",
    "Stop",
    "clip",
    "config_class",
    "load",
]
