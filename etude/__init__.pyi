# SPDX-License-Identifier: Apache-2.0
# Etude's public names: `__init__.py` finds in this file where each is from, and type checkers read it.
from etude.algorithms import *
from etude.algorithms import ALGORITHMS as ALGORITHMS
from etude.connectors import (
    GAE as GAE,
    AdvantageWeights as AdvantageWeights,
    ClipAction as ClipAction,
    ClipReward as ClipReward,
    Connector as Connector,
    Drop as Drop,
    FrameStack as FrameStack,
    History as History,
    LiftAdvantages as LiftAdvantages,
    NStep as NStep,
    NextObs as NextObs,
    NormalizeAdvantages as NormalizeAdvantages,
    NormalizeObs as NormalizeObs,
    NormalizeReward as NormalizeReward,
    Pipeline as Pipeline,
    PreLearner as PreLearner,
    PrevActionReward as PrevActionReward,
    RescaleAction as RescaleAction,
    ReturnToGo as ReturnToGo,
    VTrace as VTrace,
)
from etude.envs import (
    InfoActionMask as InfoActionMask,
    MultiAgentEnv as MultiAgentEnv,
    PoolArena as PoolArena,
    VectorArena as VectorArena,
    Workers as Workers,
    make_arena as make_arena,
)
from etude.errors import (
    CheckpointError as CheckpointError,
    DataError as DataError,
    EngineError as EngineError,
    EnvError as EnvError,
    EtudeError as EtudeError,
    ModuleError as ModuleError,
    SettingsError as SettingsError,
    SpaceError as SpaceError,
)
from etude.evaluation import (
    Estimate as Estimate,
    FQEConfig as FQEConfig,
    OffPolicyEvaluation as OffPolicyEvaluation,
    evaluate_each_on as evaluate_each_on,
    evaluate_on as evaluate_on,
)
from etude.experience import Experience as Experience, Priorities as Priorities, Replay as Replay, Segments as Segments
from etude.learners import (
    Batch as Batch,
    Learner as Learner,
    Loss as Loss,
    ModuleLearner as ModuleLearner,
    ReplayDataset as ReplayDataset,
)
from etude.modules import Module as Module, NetworkConfig as NetworkConfig, Output as Output
from etude.policies import Policy as Policy
from etude.presets import Preset as Preset, find_presets as find_presets, preset as preset
from etude.recordings import (
    RawRow as RawRow,
    Recording as Recording,
    RecordingWriter as RecordingWriter,
    Source as Source,
    convert as convert,
    filter_recording as filter_recording,
    merge_recordings as merge_recordings,
    read_binary as read_binary,
    read_text as read_text,
    sample_recording as sample_recording,
    split_recording as split_recording,
)
from etude.runners import (
    Callback as Callback,
    Episode as Episode,
    GameReturns as GameReturns,
    Runner as Runner,
    RunningEpisode as RunningEpisode,
)
from etude.serving import ExternalEnv as ExternalEnv
from etude.settings import settings as settings

__version__: str
