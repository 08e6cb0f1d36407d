# SPDX-License-Identifier: Apache-2.0
"""Algorithms: a loss, its connectors and its defaults; one file each."""

from etude.algorithms.acting import ActingAlgorithm
from etude.algorithms.algorithm import Algorithm
from etude.algorithms.appo import APPO, APPOConfig
from etude.algorithms.bc import BC, BCConfig
from etude.algorithms.clips import Clip, clip
from etude.algorithms.config import ActingConfig, AlgorithmConfig, OfflineConfig, OnPolicyConfig, RecordConfig
from etude.algorithms.cql import CQL, CQLConfig
from etude.algorithms.dqn import DQN, DQNConfig
from etude.algorithms.impala import IMPALA, IMPALAConfig
from etude.algorithms.iql import IQL, IQLConfig
from etude.algorithms.loading import Checkpoints, load
from etude.algorithms.marwil import MARWIL, MARWILConfig
from etude.algorithms.off_policy import OffPolicyAlgorithm, OffPolicyConfig
from etude.algorithms.offline import OfflineAlgorithm
from etude.algorithms.on_policy import OnPolicyAlgorithm
from etude.algorithms.ppo import PPO, PPOConfig
from etude.algorithms.ray_config import Ray, RayData
from etude.algorithms.results import Evaluation, Result, Stop
from etude.algorithms.sac import SAC, SACConfig
from etude.algorithms.task import Task, TaskConfig
from etude.algorithms.td3_bc import TD3BC, TD3BCConfig

__all__ = [
    "APPO",
    "BC",
    "CQL",
    "DQN",
    "IMPALA",
    "IQL",
    "MARWIL",
    "PPO",
    "SAC",
    "TD3BC",
    "APPOConfig",
    "ActingAlgorithm",
    "ActingConfig",
    "Algorithm",
    "AlgorithmConfig",
    "BCConfig",
    "CQLConfig",
    "Checkpoints",
    "Clip",
    "DQNConfig",
    "Evaluation",
    "IMPALAConfig",
    "IQLConfig",
    "MARWILConfig",
    "OffPolicyAlgorithm",
    "OffPolicyConfig",
    "OfflineAlgorithm",
    "OfflineConfig",
    "OnPolicyAlgorithm",
    "OnPolicyConfig",
    "PPOConfig",
    "Ray",
    "RayData",
    "RecordConfig",
    "Result",
    "SACConfig",
    "Stop",
    "TD3BCConfig",
    "Task",
    "TaskConfig",
    "clip",
    "load",
]
