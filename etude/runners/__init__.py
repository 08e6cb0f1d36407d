# SPDX-License-Identifier: Apache-2.0
"""Runners: collect Experience from an arena with policies and connectors."""

from etude.runners.callbacks import Callback, CallbackLike, GameReturns, RunningAgent, RunningEpisode
from etude.runners.episodes import Episode, Finished
from etude.runners.limits import CountBy, Lengths
from etude.runners.mapping import ModuleOf
from etude.runners.runner import Runner

__all__ = [
    "Callback",
    "CallbackLike",
    "CountBy",
    "Episode",
    "Finished",
    "GameReturns",
    "Lengths",
    "ModuleOf",
    "Runner",
    "RunningAgent",
    "RunningEpisode",
]
