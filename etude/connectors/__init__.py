# SPDX-License-Identifier: Apache-2.0
"""Connectors: transformations between env and module. One class serves both acting and recorded Experience."""

from etude.connectors.actions import ClipAction, RescaleAction
from etude.connectors.advantages import GAE, AdvantageWeights, LiftAdvantages, NormalizeAdvantages, VTrace
from etude.connectors.connector import Connector, FunctionConnector, Inputs, overrides
from etude.connectors.history import History, ReturnToGo
from etude.connectors.observations import Drop, FrameStack, NormalizeObs, PrevActionReward
from etude.connectors.pipeline import Connect, Pipeline, PreLearner, PreLearnerLike, connector_from
from etude.connectors.rewards import ClipReward, NextObs, NormalizeReward, NStep, RewardMap

__all__ = [
    "GAE",
    "AdvantageWeights",
    "ClipAction",
    "ClipReward",
    "Connect",
    "Connector",
    "Drop",
    "FrameStack",
    "FunctionConnector",
    "History",
    "Inputs",
    "LiftAdvantages",
    "NStep",
    "NextObs",
    "NormalizeAdvantages",
    "NormalizeObs",
    "NormalizeReward",
    "Pipeline",
    "PreLearner",
    "PreLearnerLike",
    "PrevActionReward",
    "RescaleAction",
    "ReturnToGo",
    "RewardMap",
    "VTrace",
    "connector_from",
    "overrides",
]
