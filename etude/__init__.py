# SPDX-License-Identifier: Apache-2.0
"""Etude: reinforcement learning, online and offline, from one kind of data.

Names are imported when they are first used, so that ``import etude`` is quick and reading data does not load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from etude.settings import settings  # at once: the module of that name would hide it as soon as it is imported

__version__ = "0.1.0"

if TYPE_CHECKING:
    from etude.algorithms import (
        BC,
        DQN,
        MARWIL,
        PPO,
        SAC,
        ActingAlgorithm,
        ActingConfig,
        Algorithm,
        AlgorithmConfig,
        BCConfig,
        Checkpoints,
        Clip,
        DQNConfig,
        Evaluation,
        MARWILConfig,
        OfflineAlgorithm,
        OfflineConfig,
        OffPolicyAlgorithm,
        OffPolicyConfig,
        OnPolicyAlgorithm,
        OnPolicyConfig,
        PPOConfig,
        Result,
        SACConfig,
        Stop,
        Task,
        TaskConfig,
        clip,
        load,
    )
    from etude.connectors import (
        GAE,
        ClipAction,
        ClipReward,
        Connector,
        FrameStack,
        NextObs,
        NormalizeAdvantages,
        NormalizeObs,
        Pipeline,
        PrevActionReward,
        RescaleAction,
    )
    from etude.envs import InfoActionMask, MultiAgentEnv, PoolArena, VectorArena, Workers, make_arena
    from etude.errors import (
        CheckpointError,
        DataError,
        EnvError,
        EtudeError,
        ModuleError,
        SettingsError,
        SpaceError,
    )
    from etude.experience import Experience, Priorities, Replay, Segments
    from etude.learners import Batch, Learner, Loss, ModuleLearner, ReplayDataset
    from etude.modules import Module, NetworkConfig, Output
    from etude.recordings import Recording, RecordingWriter, Source
    from etude.runners import Callback, Episode, GameReturns, Runner, RunningEpisode

_HOMES = {
    "etude.algorithms": "BC DQN MARWIL PPO SAC ActingAlgorithm ActingConfig Algorithm AlgorithmConfig BCConfig "
    "Checkpoints Clip DQNConfig Evaluation MARWILConfig OffPolicyAlgorithm OffPolicyConfig OfflineAlgorithm "
    "OfflineConfig OnPolicyAlgorithm OnPolicyConfig PPOConfig Result SACConfig Stop Task TaskConfig clip load",
    "etude.connectors": "GAE ClipAction ClipReward Connector FrameStack NextObs NormalizeAdvantages NormalizeObs "
    "Pipeline PrevActionReward RescaleAction",
    "etude.envs": "InfoActionMask MultiAgentEnv PoolArena VectorArena Workers make_arena",
    "etude.errors": "CheckpointError DataError EnvError EtudeError ModuleError SettingsError SpaceError",
    "etude.experience": "Experience Priorities Replay Segments",
    "etude.learners": "Batch Learner Loss ModuleLearner ReplayDataset",
    "etude.modules": "Module NetworkConfig Output",
    "etude.recordings": "Recording RecordingWriter Source",
    "etude.runners": "Callback Episode GameReturns Runner RunningEpisode",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "BC",
    "DQN",
    "GAE",
    "MARWIL",
    "PPO",
    "SAC",
    "ActingAlgorithm",
    "ActingConfig",
    "Algorithm",
    "AlgorithmConfig",
    "BCConfig",
    "Batch",
    "Callback",
    "CheckpointError",
    "Checkpoints",
    "Clip",
    "ClipAction",
    "ClipReward",
    "Connector",
    "DQNConfig",
    "DataError",
    "EnvError",
    "Episode",
    "EtudeError",
    "Evaluation",
    "Experience",
    "FrameStack",
    "GameReturns",
    "InfoActionMask",
    "Learner",
    "Loss",
    "MARWILConfig",
    "Module",
    "ModuleError",
    "ModuleLearner",
    "MultiAgentEnv",
    "NetworkConfig",
    "NextObs",
    "NormalizeAdvantages",
    "NormalizeObs",
    "OffPolicyAlgorithm",
    "OffPolicyConfig",
    "OfflineAlgorithm",
    "OfflineConfig",
    "OnPolicyAlgorithm",
    "OnPolicyConfig",
    "Output",
    "PPOConfig",
    "Pipeline",
    "PoolArena",
    "PrevActionReward",
    "Priorities",
    "Recording",
    "RecordingWriter",
    "Replay",
    "ReplayDataset",
    "RescaleAction",
    "Result",
    "Runner",
    "RunningEpisode",
    "SACConfig",
    "Segments",
    "SettingsError",
    "Source",
    "SpaceError",
    "Stop",
    "Task",
    "TaskConfig",
    "VectorArena",
    "Workers",
    "__version__",
    "clip",
    "load",
    "make_arena",
    "settings",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'etude' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
