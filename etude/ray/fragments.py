# SPDX-License-Identifier: Apache-2.0
"""Fragments of experience: what the engine requests from runners, their results, and joining them."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude.experience import Experience
from etude.recordings.pieces import copied, in_order
from etude.runners import Finished


@dataclasses.dataclass(frozen=True, slots=True)
class FragmentReport:
    """The counts of a fragment."""

    env_steps: int
    agent_steps: int
    seq_nos: dict[str | None, int]
    """By module: the number of gradient steps behind the weights that acted."""
    finished: Finished
    times: dict[str, float]
    """Seconds by phase."""
    turns: int
    stats: dict[str, float]
    seconds: float
    """Seconds that collecting took."""


class Fragment(NamedTuple):
    """The experience that a runner has collected for one request."""

    number: int
    """The number of the request; later ones are higher."""
    runner: int
    life: int
    report: FragmentReport
    parts: dict[str | None, Experience]
    """The experience by module id."""


def put_together(fragments: Sequence[Fragment], *, joined: bool) -> dict[str | None, Experience]:
    """The experience of fragments by module id, ordered by runner, and by time for each runner.

    Args:
        fragments: The fragments, in any order. The returned arrays are copies and may be changed.
        joined: Join segments that continue in a runner's next fragment.
    """
    parts: dict[str | None, list[Experience]] = {}
    for fragment in sorted(fragments, key=lambda fragment: (fragment.runner, fragment.number)):
        for module_id, exp in fragment.parts.items():
            parts.setdefault(module_id, []).append(exp)
    found = {}
    for module_id, several in sorted(parts.items(), key=lambda item: str(item[0])):
        exp = Experience.concat(several) if len(several) > 1 else copied(several[0])
        found[module_id] = in_order(exp).join() if joined and len(several) > 1 else exp
    return found


class FinishedEpisodes:
    """Finished episodes of all runners, with envs numbered over all runners.

    Args:
        num_envs: The number of envs of each runner.
    """

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._parts: list[Finished] = []
        self._next: dict[int, tuple[int, int, int]] = {}  # by runner: its life, its first number, and the next one

    def add(self, fragment: Fragment) -> None:
        """Add the episodes of a fragment."""
        finished, runner = fragment.report.finished, fragment.runner
        life, first, stop = self._next.get(runner, (fragment.life, 0, 0))
        if life != fragment.life:  # a new runner counts its episodes from 0 again
            life, first = fragment.life, stop
        numbers = finished.numbers + first
        self._next[runner] = (life, first, int(max(stop, numbers.max(initial=-1) + 1)))
        self._parts.append(finished._replace(envs=finished.envs + runner * self._num_envs, numbers=numbers))

    def take(self) -> Finished:
        """The episodes since the last call."""
        parts, self._parts = self._parts, []
        return merged(parts)


def merged(parts: Sequence[Finished]) -> Finished:
    """The episodes of several runners together; no episodes if there are no parts."""
    reals, whole = np.zeros(0), np.zeros(0, np.int64)
    parts = [Finished(reals, whole, {}, {}, reals, whole, whole), *parts]
    columns = ("returns", "lengths", "durations", "envs", "numbers")
    by_name = ("agent_returns", "module_returns", "custom", "histograms")
    found: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in columns}
    found |= {name: _by_name(getattr(part, name) for part in parts) for name in by_name}
    return Finished(**found, media={name: picture for part in parts for name, picture in part.media.items()})


def _by_name(parts: Iterable[Mapping[str, NDArray[np.float64]]]) -> dict[str, NDArray[np.float64]]:
    found: dict[str, list[NDArray[np.float64]]] = {}
    for part in parts:
        for name, values in part.items():
            found.setdefault(name, []).append(values)
    return {name: np.concatenate(values) for name, values in sorted(found.items())}
