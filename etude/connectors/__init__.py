# SPDX-License-Identifier: Apache-2.0
"""Connectors: transformations between env and module, each one class for acting and for recorded Experience."""

from etude.connectors.actions import ClipAction, RescaleAction
from etude.connectors.advantages import GAE, NormalizeAdvantages
from etude.connectors.base import Connector, Inputs
from etude.connectors.frame_stack import FrameStack
from etude.connectors.function import FunctionConnector
from etude.connectors.next_obs import NextObs
from etude.connectors.normalize import NormalizeObs
from etude.connectors.pipeline import Pipeline, connector_from, overrides
from etude.connectors.previous import PrevActionReward
from etude.connectors.rewards import ClipReward

__all__ = [
    "GAE",
    "ClipAction",
    "ClipReward",
    "Connector",
    "FrameStack",
    "FunctionConnector",
    "Inputs",
    "NextObs",
    "NormalizeAdvantages",
    "NormalizeObs",
    "Pipeline",
    "PrevActionReward",
    "RescaleAction",
    "connector_from",
    "overrides",
]
