# SPDX-License-Identifier: Apache-2.0
"""NaN and infinity in what the envs of a pool give: found for all of them at once, and blamed on one."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude.envs.pool_memory import BLIND, ENDED, SHOWN, Memory, Part
from etude.envs.pool_turns import Ints
from etude.errors import EnvError, EtudeError, SpaceError
from etude.spaces import check_finite_value


class Fault(NamedTuple):
    """An env that gave something else than a finite number."""

    env: int
    status: int
    """What remains of its status, see `pool_memory`: the ends of agents, if these are not concerned."""
    error: EtudeError


class Finite:
    """Checks observations and rewards in the memory of a pool."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._is_single = memory.plan.agents == (None,)
        self._shown = _floats(memory.obs, memory.reward)
        self._ended = _floats(memory.end_obs, memory.end_reward)

    def all(self, bits: int) -> bool:
        """Whether all numbers are finite; a few microseconds. False may come of an env that is not ready yet.

        Args:
            bits: In the statuses of the envs that are ready. Ends are looked at only where there are some.
        """
        return _all_finite(self._shown) and (not bits & ENDED or _all_finite(self._ended))

    def faults(self, envs: Ints, status: Ints) -> list[Fault]:
        """Those of ``envs``, with their statuses, that gave something else."""
        found = []
        for env, bits in zip(envs.tolist(), status.tolist(), strict=True):
            if bits & ENDED and (error := self._fault_of(env, is_end=True)):
                found.append(Fault(env, 0, error))
            elif bits & SHOWN and (error := self._fault_of(env, is_end=False)):
                found.append(Fault(env, bits if bits & ENDED else 0, error))
        return found

    def _fault_of(self, env: int, *, is_end: bool) -> EtudeError | None:
        memory = self._memory
        rewards = memory.end_reward if is_end else memory.reward
        for kind, part, seat, is_blind in self._rows(env, is_end=is_end):
            agent = memory.plan.agents[memory.plan.seated[seat]]
            whose = f"env {env}: " if agent is None else f"env {env}, agent {agent!r}: "
            reward = rewards[env, seat]
            if not np.isfinite(reward):
                rewards[env, seat] = 0.0
                return EnvError(f"{whose}`reward` is {reward}, not a finite number.")
            row = env * len(part.agents) + seat - part.begin
            columns = (memory.end_obs if is_end else memory.obs)[kind]
            for name, column in () if is_blind else columns.items():
                try:
                    check_finite_value(name, column[row])
                except SpaceError as error:
                    column[row] = 0
                    return SpaceError(f"{whose}{error}")
        return None

    def _rows(self, env: int, *, is_end: bool) -> Iterator[tuple[int, Part, int, bool]]:
        """The kind and seat of each row of an env, and whether it has no observation."""
        flags = (self._memory.end_flags if is_end else self._memory.flags)[env]
        for kind, part in enumerate(self._memory.plan.parts):
            for seat in range(part.begin, part.begin + len(part.agents)):
                if self._is_single or flags[seat]:
                    yield kind, part, seat, not self._is_single and bool(flags[seat] & BLIND)


def _floats(obs: Iterable[dict[str, NDArray[Any]]], reward: NDArray[Any]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Each column of floats, flat, and where to note which are finite."""
    columns = [reward, *(column for of_kind in obs for column in of_kind.values() if column.dtype.kind == "f")]
    return [(column.reshape(-1), np.ones(column.size, bool)) for column in columns]


def _all_finite(columns: list[tuple[NDArray[Any], NDArray[Any]]]) -> bool:
    for column, finite in columns:
        np.isfinite(column, finite)
        if b"\0" in finite.tobytes():  # a third of the time that `all` takes where there are few
            return False
    return True
