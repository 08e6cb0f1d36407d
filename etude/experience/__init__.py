# SPDX-License-Identifier: Apache-2.0
"""Experience: a table of time steps cut into segments, replay buffers, and returns and advantages."""

from etude.experience.experience import Experience, Segments
from etude.experience.priorities import Priorities
from etude.experience.replay import Replay

__all__ = ["Experience", "Priorities", "Replay", "Segments"]
