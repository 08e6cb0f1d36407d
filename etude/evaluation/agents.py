# SPDX-License-Identifier: Apache-2.0
"""Whose steps held-out segments are, and whether they are of the kind that a module knows."""

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.algorithms.base import Algorithm
from etude.errors import DataError
from etude.evaluation.held_out import where
from etude.experience import Experience, Segments
from etude.recordings import Recording
from etude.runners import Episode
from etude.spaces import Space, alike, leaf_shape, leaves


def module_of_segments(algorithm: Algorithm[Any]) -> Callable[[Segments], NDArray[np.object_]]:
    """What says of segments ``[n]`` which module's they are; None where no module acts for the agent.

    Where there is one module, all are its own. Else it is the one that ``module_of`` names; without it, the one that
    acted, by the recording; where that does not say, the one of the agent's name.
    """
    ids, choose = list(algorithm.policies), algorithm.config.module_of

    def named(segments: Segments) -> NDArray[np.object_]:
        out = np.empty(len(segments), object)
        if len(ids) == 1 and choose is None:
            out[:] = ids[0]
            return out
        for i, (agent, module_id) in enumerate(zip(segments.agent_id, segments.module_id, strict=True)):
            if choose is not None:
                module_id = choose(agent, Episode(segments.episode_id[i], 0, 0))
            elif module_id is None:
                module_id = agent
            out[i] = module_id if module_id in ids else None
        return out

    return named


def check_spaces(algorithm: Algorithm[Any], name: str, data: Recording | Experience) -> None:
    """Raise a DataError where the data are not of the kind that the module sees and does."""
    wanted_obs, wanted_action = algorithm.spaces[name][0], algorithm.policies[name].module.action_space
    if isinstance(data, Recording):
        if not alike(data.obs_space, wanted_obs):
            raise _misfit(data, "observations", data.obs_space, name, wanted_obs)
        if not (alike(data.action_space, wanted_action) and _same_units(data.action_space, wanted_action)):
            raise _misfit(data, "actions", data.action_space, name, wanted_action)
        return
    for root, what, space in ((col.OBS, "observations", wanted_obs), (col.ACTION, "actions", wanted_action)):
        wanted = {column: leaf_shape(leaf) for column, leaf in leaves(space, root).items()}
        found = {column: tuple(values.shape[1:]) for column, values in col.subtree(data.steps, root).items()}
        if found != wanted:
            raise _misfit(data, what, found, name, space)


def _misfit(data: Recording | Experience, what: str, found: Any, name: str, wanted: Space) -> DataError:
    return DataError(
        f"{where(data)}: the {what} are {found}, but module {name!r} was made for {wanted}: take episodes of the same "
        "env, with actions in the units in which the module acts."
    )


def _same_units(space: Space, other: Space) -> bool:
    """Whether the bounds of Boxes are the same, where both have some."""
    others = leaves(other, "")
    pairs = [(leaf, others[name]) for name, leaf in leaves(space, "").items()]
    bounded = [(a, b) for a, b in pairs if isinstance(a, spaces.Box) and isinstance(b, spaces.Box)]
    return all(
        np.allclose(a.low, b.low) and np.allclose(a.high, b.high)
        for a, b in bounded
        if a.is_bounded() and b.is_bounded()
    )
