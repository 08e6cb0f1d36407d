# SPDX-License-Identifier: Apache-2.0
"""Runners: an arena, modules and connectors give Experience."""

from etude.runners.callbacks import Callback, CallbackLike, GameReturns
from etude.runners.counting import CountBy
from etude.runners.episodes import Episode, Finished
from etude.runners.lengths import Lengths
from etude.runners.routes import ModuleOf
from etude.runners.runner import Runner
from etude.runners.running import RunningAgent, RunningEpisode

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
