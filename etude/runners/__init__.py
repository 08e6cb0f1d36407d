# SPDX-License-Identifier: Apache-2.0
"""Runners: an arena, a module and connectors give Experience."""

from etude.runners.episodes import Finished
from etude.runners.runner import Runner

__all__ = ["Finished", "Runner"]
