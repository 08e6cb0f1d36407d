# SPDX-License-Identifier: Apache-2.0
"""What is known of each episode of a recording, counted in one pass, in memory for a row an episode."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.experience import Experience
from etude.recordings.edited import columns_of_pass
from etude.recordings.recording import Recording
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


class Episodes:
    """The episodes of a recording in the order in which they first come, with the figures of each.

    Args:
        recording: What to look at, in pieces: memory is bounded by these and by a row for each episode.
        where: An expression whose reductions are to be figures too.

    Raises:
        DataError: something can't be read.
        SettingsError: the expression names what is not there.
    """

    def __init__(self, recording: Recording, where: Expression | None = None) -> None:
        self._codes: dict[str, int] = {}
        self._agents: dict[tuple[int, str | None], int] = {}
        self._of_agents = _Grown(0, np.int64)  # the steps of each agent in an episode
        self._rewards = _Grown(0.0)
        self._flags = {name: _Grown(False, np.bool_) for name in (col.TERMINATED, col.TRUNCATED)}
        self._where = where
        self._reductions = {} if where is None else where.reductions
        self._reduced = {text: _Grown(_STARTS[r.how]) for text, r in self._reductions.items()}
        self._has_rewards = col.REWARD in recording.columns
        if where is not None:
            where.check_names([n for n in FIGURES if n != RETURN or self._has_rewards], recording.columns)
        self._names = [] if where is None else where.columns
        wanted = {*self._names, col.REWARD} & set(recording.columns)
        for exp in recording.stream(columns=columns_of_pass(recording, sorted(wanted), recording.columns)):
            self._add(exp)
        self.figures = self._figures()
        """By name, ``[episodes]`` each; ``return`` is there where rewards are."""

    def __len__(self) -> int:
        return len(self._codes)

    @property
    def num_steps(self) -> int:
        """Of all agents, lookback left out."""
        return int(self.figures[STEPS].sum())

    def codes(self, exp: Experience) -> NDArray[np.int64]:
        """``[segments]``: which of these episodes each segment is of."""
        return np.array([self._codes[episode] for episode in exp.segments.episode_id.tolist()], np.int64)

    def _add(self, exp: Experience) -> None:
        if not exp.num_segments:
            return
        segments = exp.segments
        codes = np.array([self._codes.setdefault(e, len(self._codes)) for e in segments.episode_id.tolist()], np.int64)
        count = len(self._codes)
        keys = zip(codes.tolist(), segments.agent_id.tolist(), strict=True)
        agents = np.array([self._agents.setdefault(key, len(self._agents)) for key in keys], np.int64)
        lengths = exp.lengths - np.minimum(segments.lookback, exp.lengths)
        np.add.at(self._of_agents.upto(len(self._agents)), agents, lengths)
        for name, flags in self._flags.items():
            np.logical_or.at(flags.upto(count), codes, getattr(segments, name))
        rewards = self._rewards.upto(count)
        if self._has_rewards:
            np.add.at(rewards, codes, exp.returns())
        trained = exp.trained()
        of_step = codes[exp.segment_of_step()][trained]
        of_steps = step_values(exp, [col.T_INDEX, *self._names]) if self._reductions else {}
        columns = {name: column[trained] for name, column in of_steps.items()}
        for text, reduction in self._reductions.items():
            assert self._where is not None
            values = self._where.of_steps(text, columns)
            _MERGES[reduction.how].at(self._reduced[text].upto(count), of_step, values)

    def _figures(self) -> dict[str, NDArray[Any]]:
        count = len(self._codes)
        steps, lengths, agents = (np.zeros(count, np.int64) for _ in range(3))
        of_agents = self._of_agents.upto(len(self._agents))
        owners = np.fromiter((code for code, _ in self._agents), np.int64, len(self._agents))
        np.add.at(steps, owners, of_agents)
        np.maximum.at(lengths, owners, of_agents)
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
            col.EPISODE_ID: np.array(list(self._codes), object),
            **reduced,
        }


def _ended(reduction: Reduction, values: NDArray[Any], steps: NDArray[np.int64]) -> NDArray[Any]:
    if reduction.how in ("any", "all"):
        return values.astype(bool)
    return values / np.maximum(steps, 1) if reduction.how == "mean" else values
