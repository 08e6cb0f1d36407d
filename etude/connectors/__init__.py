# SPDX-License-Identifier: Apache-2.0
"""Connectors: transformations between env and module, each one class for acting and for recorded Experience."""

from etude.connectors.actions import ClipAction, RescaleAction
from etude.connectors.advantages import GAE, AdvantageWeights, LiftAdvantages, NormalizeAdvantages
from etude.connectors.base import Connector, Inputs
from etude.connectors.drop import Drop
from etude.connectors.frame_stack import FrameStack
from etude.connectors.function import FunctionConnector
from etude.connectors.n_step import NStep
from etude.connectors.next_obs import NextObs
from etude.connectors.normalize import NormalizeObs
from etude.connectors.pipeline import Pipeline, connector_from, overrides
from etude.connectors.prelearner import Connect, PreLearner, PreLearnerLike
from etude.connectors.previous import PrevActionReward
from etude.connectors.rewards import ClipReward
from etude.connectors.vtrace import VTrace

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
    "Inputs",
    "LiftAdvantages",
    "NStep",
    "NextObs",
    "NormalizeAdvantages",
    "NormalizeObs",
    "Pipeline",
    "PreLearner",
    "PreLearnerLike",
    "PrevActionReward",
    "RescaleAction",
    "VTrace",
    "connector_from",
    "overrides",
]
