# SPDX-License-Identifier: Apache-2.0
"""The running episodes of a pool without workers, as plain data."""

import copy as copies_of
import dataclasses
from typing import Any

from etude.envs import snapshot
from etude.envs.arena import Turn, check_rows
from etude.envs.copies import Copy


def capture(copies: list[Copy]) -> dict[str, Any]:
    """The state of env copies; see `snapshot.capture_env`."""
    infos = [copy.infos for copy in copies]
    try:
        for copy in copies:
            copy.infos = None  # may be anything, and is not needed
        return snapshot.capture_env(copies)
    finally:
        for copy, said in zip(copies, infos, strict=True):
            copy.infos = said


def turn_to_state(turn: Turn) -> dict[str, Any]:
    """A turn as plain data of its own, but for ``infos``."""
    fields = (f.name for f in dataclasses.fields(turn) if f.name != "infos")
    return copies_of.deepcopy({name: getattr(turn, name) for name in fields})


def turn_from_state(state: dict[str, Any]) -> Turn:
    """The inverse of `turn_to_state`."""
    turn = Turn(**state)
    if turn.taken is not None:
        turn.taken = (turn.taken[0], turn.taken[1])
    return check_rows(turn)
