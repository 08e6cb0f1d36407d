# SPDX-License-Identifier: Apache-2.0
"""Arena: a set of slots, each of them one agent in one running copy of an env."""

import dataclasses
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from etude.columns import Columns
from etude.spaces import Space


@dataclasses.dataclass(slots=True)
class Turn:
    """What all slots of an arena show at one moment: what their last action brought, and what to act on next."""

    obs: Columns
    """``[num_slots, ...]``: the observation to act on; the final one of its episode where ``live`` is False."""
    reward: NDArray[np.float64]
    """``[num_slots]``: the reward for the last action; means nothing in the first turn or after a row not live."""
    terminated: NDArray[np.bool_]
    """``[num_slots]``: that action ended the episode by the env's own rules."""
    truncated: NDArray[np.bool_]
    """``[num_slots]``: that action was the last before the episode was stopped from outside."""
    first: NDArray[np.bool_]
    """``[num_slots]``: ``obs`` begins an episode."""
    live: NDArray[np.bool_] | None = None
    """``[num_slots]``: the slot waits for an action; None is all. Where False, what is sent is ignored: no step."""
    final_rows: NDArray[np.int64] | None = None
    """Slots whose episode ended with the last action while ``obs`` already begins the next one."""
    final_obs: Columns | None = None
    """``[len(final_rows), ...]``: the true last observations of those episodes."""


class Arena(Protocol):
    """A set of slots that wait for actions. After `reset`, `recv` and `send` take turns."""

    num_slots: int
    obs_space: Space
    """The space of one observation, as the env gives it."""
    action_space: Space
    """The space of one action, as the env takes it."""

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode in every slot; with a seed, seed the envs, each with its own stream."""

    def recv(self) -> Turn:
        """What the slots show now."""

    def send(self, action: Columns) -> None:
        """Act: flat action columns ``[num_slots, ...]``, in the order of the slots."""

    def state_dict(self) -> dict[str, Any]:
        """The running episodes as plain data; ``{"how": "new episodes", "why": ...}`` where that can't be had."""

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Go on where `state_dict` was taken; says how: ``get_state``, ``snapshot`` or ``new episodes: why``.

        After ``new episodes`` the arena must be reset.
        """

    def close(self) -> None:
        """Close the envs and what they hold open."""
