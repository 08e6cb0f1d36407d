# SPDX-License-Identifier: Apache-2.0
"""Etude: reinforcement learning, online and offline, from one kind of data.

Names are imported when they are first used, so that ``import etude`` is quick and reading data does not load torch.
"""

# ruff: noqa: E402
import os
import sys

# For ``python -m etude``, Python puts the current folder first, and a file in it, perhaps a stranger's, would stand in
# for a library of its name: it goes before anything else is imported.
_is_command = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] in ("etude", "-metude")
if _is_command and sys.path[:1] == [os.getcwd()] != [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]:
    del sys.path[0]

import importlib
from typing import TYPE_CHECKING, Any

from etude.settings import settings  # at once: the module of that name would hide it as soon as it is imported

__version__ = "0.1.0"

if TYPE_CHECKING:
    from etude.algorithms import (
        APPO,
        BC,
        CQL,
        DQN,
        IMPALA,
        IQL,
        MARWIL,
        PPO,
        SAC,
        TD3BC,
        ActingAlgorithm,
        ActingConfig,
        Algorithm,
        AlgorithmConfig,
        APPOConfig,
        BCConfig,
        Checkpoints,
        Clip,
        CQLConfig,
        DQNConfig,
        Evaluation,
        IMPALAConfig,
        IQLConfig,
        MARWILConfig,
        OfflineAlgorithm,
        OfflineConfig,
        OffPolicyAlgorithm,
        OffPolicyConfig,
        OnPolicyAlgorithm,
        OnPolicyConfig,
        PPOConfig,
        Ray,
        RayData,
        RecordConfig,
        Result,
        SACConfig,
        Stop,
        Task,
        TaskConfig,
        TD3BCConfig,
        clip,
        load,
    )
    from etude.connectors import (
        GAE,
        AdvantageWeights,
        ClipAction,
        ClipReward,
        Connector,
        Drop,
        FrameStack,
        LiftAdvantages,
        NextObs,
        NormalizeAdvantages,
        NormalizeObs,
        NStep,
        Pipeline,
        PreLearner,
        PrevActionReward,
        RescaleAction,
        VTrace,
    )
    from etude.envs import InfoActionMask, MultiAgentEnv, PoolArena, VectorArena, Workers, make_arena
    from etude.errors import (
        CheckpointError,
        DataError,
        EngineError,
        EnvError,
        EtudeError,
        ModuleError,
        SettingsError,
        SpaceError,
    )
    from etude.evaluation import Estimate, FQEConfig, OffPolicyEvaluation, evaluate_each_on, evaluate_on
    from etude.experience import Experience, Priorities, Replay, Segments
    from etude.learners import Batch, Learner, Loss, ModuleLearner, ReplayDataset
    from etude.modules import Module, NetworkConfig, Output
    from etude.recordings import (
        RawRow,
        Recording,
        RecordingWriter,
        Source,
        convert,
        filter_recording,
        merge_recordings,
        read_binary,
        read_text,
        sample_recording,
        split_recording,
    )
    from etude.runners import Callback, Episode, GameReturns, Runner, RunningEpisode

_HOMES = {
    "etude.algorithms": "APPO BC CQL DQN IMPALA IQL MARWIL PPO SAC TD3BC APPOConfig ActingAlgorithm ActingConfig "
    "Algorithm AlgorithmConfig BCConfig CQLConfig Checkpoints Clip DQNConfig Evaluation IMPALAConfig IQLConfig "
    "MARWILConfig OffPolicyAlgorithm OffPolicyConfig OfflineAlgorithm OfflineConfig OnPolicyAlgorithm OnPolicyConfig "
    "PPOConfig Ray RayData RecordConfig Result SACConfig Stop TD3BCConfig Task TaskConfig clip load",
    "etude.connectors": "VTrace GAE AdvantageWeights ClipAction ClipReward Connector Drop FrameStack NStep NextObs "
    "LiftAdvantages NormalizeAdvantages NormalizeObs Pipeline PreLearner PrevActionReward RescaleAction",
    "etude.envs": "InfoActionMask MultiAgentEnv PoolArena VectorArena Workers make_arena",
    "etude.errors": "EngineError CheckpointError DataError EnvError EtudeError ModuleError SettingsError SpaceError",
    "etude.evaluation": "Estimate FQEConfig OffPolicyEvaluation evaluate_each_on evaluate_on",
    "etude.experience": "Experience Priorities Replay Segments",
    "etude.learners": "Batch Learner Loss ModuleLearner ReplayDataset",
    "etude.modules": "Module NetworkConfig Output",
    "etude.recordings": "RawRow Recording RecordingWriter Source convert filter_recording merge_recordings "
    "read_binary read_text sample_recording split_recording",
    "etude.runners": "Callback Episode GameReturns Runner RunningEpisode",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "APPO",
    "BC",
    "CQL",
    "DQN",
    "GAE",
    "IMPALA",
    "IQL",
    "MARWIL",
    "PPO",
    "SAC",
    "TD3BC",
    "APPOConfig",
    "ActingAlgorithm",
    "ActingConfig",
    "AdvantageWeights",
    "Algorithm",
    "AlgorithmConfig",
    "BCConfig",
    "Batch",
    "CQLConfig",
    "Callback",
    "CheckpointError",
    "Checkpoints",
    "Clip",
    "ClipAction",
    "ClipReward",
    "Connector",
    "DQNConfig",
    "DataError",
    "Drop",
    "EngineError",
    "EnvError",
    "Episode",
    "Estimate",
    "EtudeError",
    "Evaluation",
    "Experience",
    "FQEConfig",
    "FrameStack",
    "GameReturns",
    "IMPALAConfig",
    "IQLConfig",
    "InfoActionMask",
    "Learner",
    "LiftAdvantages",
    "Loss",
    "MARWILConfig",
    "Module",
    "ModuleError",
    "ModuleLearner",
    "MultiAgentEnv",
    "NStep",
    "NetworkConfig",
    "NextObs",
    "NormalizeAdvantages",
    "NormalizeObs",
    "OffPolicyAlgorithm",
    "OffPolicyConfig",
    "OffPolicyEvaluation",
    "OfflineAlgorithm",
    "OfflineConfig",
    "OnPolicyAlgorithm",
    "OnPolicyConfig",
    "Output",
    "PPOConfig",
    "Pipeline",
    "PoolArena",
    "PreLearner",
    "PrevActionReward",
    "Priorities",
    "RawRow",
    "Ray",
    "RayData",
    "RecordConfig",
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
    "TD3BCConfig",
    "Task",
    "TaskConfig",
    "VTrace",
    "VectorArena",
    "Workers",
    "__version__",
    "clip",
    "convert",
    "evaluate_each_on",
    "evaluate_on",
    "filter_recording",
    "load",
    "make_arena",
    "merge_recordings",
    "read_binary",
    "read_text",
    "sample_recording",
    "settings",
    "split_recording",
]


def __getattr__(name: str) -> Any:
    if name == "ray":  # a folder, which only those need who have Ray
        return importlib.import_module("etude.ray")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'etude' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
