# SPDX-License-Identifier: Apache-2.0
"""What is known of each episode of a recording, counted in one pass, in memory for a row an episode."""

from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.experience import Experience
from etude.experience.arrays import Index
from etude.experience.ids import Ids
from etude.recordings.where import Expression, Reduction, step_values

RETURN: Final = "return"
LENGTH: Final = "length"
STEPS: Final = "steps"
FIGURES: Final = (RETURN, LENGTH, STEPS, "agents", col.TERMINATED, col.TRUNCATED, "done", col.EPISODE_ID)
"""The figures of each episode: the sum of all agents' rewards; the steps of the agent that has most; the steps of all
its agents; how many these are; whether one of them was terminated, or truncated, or either; and the id."""


class _Grown:
    """A column that grows with the episodes that are met."""

    def __init__(self, fill: float, dtype: Any = np.float64) -> None:
        self._fill = fill
        self._values = np.full(1024, fill, dtype)

    def upto(self, count: int) -> NDArray[Any]:
        """The values of the first ``count`` episodes: a view."""
        if count > len(self._values):
            more = np.full(max(count, 2 * len(self._values)) - len(self._values), self._fill, self._values.dtype)
            self._values = np.concatenate([self._values, more])
        return self._values[:count]


_STARTS: Final = {"sum": 0.0, "mean": 0.0, "min": np.inf, "max": -np.inf, "any": 0.0, "all": 1.0}
_MERGES: Final = {
    **{"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum},
    **{"any": np.maximum, "all": np.minimum},
}


class EpisodeTable:
    """The episodes of a stream of experience in the order in which they first come, a row of figures for each.

    Args:
        where: An expression whose reductions are to be figures too.
    """

    def __init__(self, where: Expression | None = None) -> None:
        self._codes: dict[str, int] = {}
        self._agents: dict[str | None, int] = {}
        self._pairs: dict[int, int] = {}  # agents in episodes, by the codes of both
        self._of_pairs = _Grown(0, np.int64)  # the steps of each
        self._rewards = _Grown(0.0)
        self._has_rewards = True
        self._flags = {name: _Grown(False, np.bool_) for name in (col.TERMINATED, col.TRUNCATED)}
        self._where = where
        self._reductions = {} if where is None else where.reductions
        self._reduced = {text: _Grown(_STARTS[r.how]) for text, r in self._reductions.items()}
        self._names = [] if where is None else where.columns

    def __len__(self) -> int:
        return len(self._codes)

    @property
    def ids(self) -> list[str]:
        """The id of each episode."""
        return list(self._codes)

    @property
    def agents(self) -> list[str | None]:
        """The names of all agents."""
        return list(self._agents)

    @property
    def num_steps(self) -> int:
        """Of all agents, lookback left out."""
        return int(self.figures[STEPS].sum())

    def codes(self, exp: Experience) -> Index:
        """``[segments]``: which of these episodes each segment is of."""
        return _coded(exp.segments.episode_id, self._codes)

    def add(self, exp: Experience) -> Index:
        """Take more experience; gives `codes` of it. Not after `figures` were asked for."""
        segments = exp.segments
        codes = self.codes(exp)
        count = len(self._codes)
        keys, inverse = np.unique(codes << 32 | _coded(segments.agent_id, self._agents), return_inverse=True)
        pairs = np.array([self._pairs.setdefault(key, len(self._pairs)) for key in keys.tolist()], np.int64)
        lengths = exp.lengths - np.minimum(segments.lookback, exp.lengths)
        np.add.at(self._of_pairs.upto(len(self._pairs)), pairs[inverse], lengths)
        for name, flags in self._flags.items():
            np.logical_or.at(flags.upto(count), codes, getattr(segments, name))
        if col.REWARD in exp.steps:
            np.add.at(self._rewards.upto(count), codes, exp.returns())
        else:
            self._has_rewards = False
        if self._reductions:
            self._reduce(exp, codes)
        return codes

    def _reduce(self, exp: Experience, codes: Index) -> None:
        trained, count = exp.trained(), len(self._codes)
        of_step = codes[exp.segment_of_step()][trained]
        of_steps = step_values(exp, [col.T_INDEX, *self._names])
        columns = {name: column[trained] for name, column in of_steps.items()}
        for text, reduction in self._reductions.items():
            assert self._where is not None
            values = self._where.of_steps(text, columns)
            _MERGES[reduction.how].at(self._reduced[text].upto(count), of_step, values)

    @cached_property
    def figures(self) -> dict[str, NDArray[Any]]:
        """By name, ``[episodes]`` each; ``return`` is there where rewards are."""
        count = len(self._codes)
        steps, lengths, agents = (np.zeros(count, np.int64) for _ in range(3))
        of_pairs = self._of_pairs.upto(len(self._pairs))
        owners = np.fromiter(self._pairs, np.int64, len(self._pairs)) >> 32
        np.add.at(steps, owners, of_pairs)
        np.maximum.at(lengths, owners, of_pairs)
        np.add.at(agents, owners, 1)
        flags = {name: flags.upto(count) for name, flags in self._flags.items()}
        reduced = {text: _ended(r, self._reduced[text].upto(count), steps) for text, r in self._reductions.items()}
        known = {RETURN: self._rewards.upto(count)} if self._has_rewards else {}
        return {
            **known,
            LENGTH: lengths,
            STEPS: steps,
            "agents": agents,
            **flags,
            "done": np.logical_or.reduce(list(flags.values())),
            col.EPISODE_ID: np.array(self.ids, object),
            **reduced,
        }


def _coded(ids: Ids, known: dict[Any, int]) -> Index:
    """``[n]``: the code of each id in ``known``, to which new ones are added in the order in which they come."""
    used, first, inverse = np.unique(ids.codes, return_index=True, return_inverse=True)
    order = np.argsort(first)
    codes = np.empty(len(used), np.int64)
    codes[order] = [known.setdefault(name, len(known)) for name in ids.names[used[order]].tolist()]
    return codes[inverse]


def _ended(reduction: Reduction, values: NDArray[Any], steps: NDArray[np.int64]) -> NDArray[Any]:
    if reduction.how in ("any", "all"):
        return values.astype(bool)
    return values / np.maximum(steps, 1) if reduction.how == "mean" else values
