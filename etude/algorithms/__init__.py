# SPDX-License-Identifier: Apache-2.0
"""Algorithms: a loss, its connectors and its defaults; one file each.

To add one to the library, add its file and its line here: ``etude`` and the command line take its names from this file.
"""

from typing import Any

from etude.algorithms.acting import ActingAlgorithm as ActingAlgorithm
from etude.algorithms.algorithm import Algorithm as Algorithm
from etude.algorithms.clips import Clip as Clip, clip as clip
from etude.algorithms.config import (
    ActingConfig as ActingConfig,
    AgentsConfig as AgentsConfig,
    AlgorithmConfig as AlgorithmConfig,
    EvaluationConfig as EvaluationConfig,
    MetricsConfig as MetricsConfig,
    OfflineConfig as OfflineConfig,
    OnPolicyConfig as OnPolicyConfig,
    ReadingConfig as ReadingConfig,
    RecordConfig as RecordConfig,
    ReplayConfig as ReplayConfig,
    SegmentConfig as SegmentConfig,
    SequenceConfig as SequenceConfig,
    TargetConfig as TargetConfig,
    TrajectoryConfig as TrajectoryConfig,
    VTraceConfig as VTraceConfig,
)
from etude.algorithms.checkpoint import Checkpoints as Checkpoints
from etude.algorithms.loading import load as load, load_policy as load_policy
from etude.algorithms.off_policy import OffPolicyAlgorithm as OffPolicyAlgorithm, OffPolicyConfig as OffPolicyConfig
from etude.algorithms.offline import OfflineAlgorithm as OfflineAlgorithm
from etude.algorithms.on_policy import OnPolicyAlgorithm as OnPolicyAlgorithm
from etude.algorithms.ray_config import Ray as Ray, RayData as RayData
from etude.algorithms.results import Evaluation as Evaluation, Result as Result, Stop as Stop
from etude.algorithms.parallel import SeedRun as SeedRun, fit_seeds as fit_seeds
from etude.algorithms.task import Task as Task, TaskConfig as TaskConfig
from etude.learners import ComputeConfig as ComputeConfig, OptimizerConfig as OptimizerConfig

# The algorithms, in the order in which they are listed to users.
from etude.algorithms.ppo import PPO as PPO, PPOConfig as PPOConfig
from etude.algorithms.a2c import A2C as A2C, A2CConfig as A2CConfig
from etude.algorithms.impala import IMPALA as IMPALA, IMPALAConfig as IMPALAConfig
from etude.algorithms.appo import APPO as APPO, APPOConfig as APPOConfig
from etude.algorithms.dqn import DQN as DQN, DQNConfig as DQNConfig, QTargetConfig as QTargetConfig
from etude.algorithms.qr_dqn import QRDQN as QRDQN, QRDQNConfig as QRDQNConfig
from etude.algorithms.sac import SAC as SAC, SACConfig as SACConfig
from etude.algorithms.td3 import TD3 as TD3, TD3Config as TD3Config
from etude.algorithms.imitation import BC as BC, BCConfig as BCConfig, MARWIL as MARWIL, MARWILConfig as MARWILConfig
from etude.algorithms.iql import IQL as IQL, IQLConfig as IQLConfig
from etude.algorithms.awac import AWAC as AWAC, AWACConfig as AWACConfig
from etude.algorithms.cql import CQL as CQL, CQLConfig as CQLConfig, PenaltyConfig as PenaltyConfig
from etude.algorithms.td3 import TD3BC as TD3BC, TD3BCConfig as TD3BCConfig
from etude.algorithms.decision_transformer import (
    DecisionTransformer as DecisionTransformer,
    DecisionTransformerConfig as DecisionTransformerConfig,
)

ALGORITHMS: dict[str, type[Algorithm[Any]]] = {
    cls.name: cls
    for cls in list(vars().values())
    if isinstance(cls, type) and issubclass(cls, Algorithm) and cls.loss is not Algorithm.loss and cls is not Task
}
"""The algorithms that come with Etude, by name: each class above that defines a loss."""
