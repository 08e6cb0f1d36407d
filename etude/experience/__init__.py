# SPDX-License-Identifier: Apache-2.0
"""Experience: a table of time steps, cut into segments, and what is computed over it."""

from etude.experience.experience import Experience
from etude.experience.padding import Padded
from etude.experience.replay import Replay
from etude.experience.replay_priorities import Priorities
from etude.experience.segments import Segments

__all__ = ["Experience", "Padded", "Priorities", "Replay", "Segments"]
