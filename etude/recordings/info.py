# SPDX-License-Identifier: Apache-2.0
"""What experience adds up to, counted over every row in bounded memory."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.experience import Experience
from etude.experience.arrays import Index
from etude.recordings.episodes import RETURN, STEPS, EpisodeTable


def counts_of(pieces: Iterable[Experience]) -> dict[str, Any]:
    """Episodes, agents, steps, returns and sums of ``pieces``, as JSON data.

    Counts and sums are over steps that are not lookback. ``final_obs_sum`` is over the last observations of episodes
    that ended; ``return_*`` are of episodes (the sum over their agents), unfinished ones included; the sums of
    observations and actions are float64 over all numbers in them, as recorded.
    """
    table, env_steps = EpisodeTable(), _EnvSteps()
    sums = {col.OBS: 0.0, col.FINAL_OBS: 0.0, col.ACTION: 0.0}
    for exp in pieces:
        trained, segments = exp.trained(), exp.segments
        env_steps.add(exp, table.add(exp), trained)
        for root in (col.OBS, col.ACTION):
            for values in col.subtree(exp.steps, root).values():
                sums[root] += _sum(values if trained.all() else values[trained])
        ends = segments.done & segments.has_final_obs
        for values in exp.final_obs.values():
            sums[col.FINAL_OBS] += _sum(values[ends])
    figures, num = table.figures, len(table)
    returns = figures.get(RETURN, np.zeros(num)) if num else np.array([np.nan])
    return {
        "episodes": num,
        "agents": sorted(agent for agent in table.agents if agent is not None),
        "env_steps": env_steps.total(),
        "agent_steps": int(figures[STEPS].sum()),
        "terminated": int(figures[col.TERMINATED].sum()),
        "truncated": int(figures[col.TRUNCATED].sum()),
        "unfinished": num - int(figures["done"].sum()),
        "return_total": float(np.nansum(returns)),
        "return_mean": _or_none(returns.mean()),
        "return_min": _or_none(returns.min()),
        "return_max": _or_none(returns.max()),
        "obs_sum": sums[col.OBS],
        "final_obs_sum": sums[col.FINAL_OBS],
        "action_sum": sums[col.ACTION],
    }


class _EnvSteps:
    """Counts the steps of the envs: several agents that act at one time are one step."""

    def __init__(self) -> None:
        self._spans: list[Index] = []
        """Of the env's clock, ``[n, 3]``: episode, first, last + 1."""

    def add(self, exp: Experience, codes: Index, trained: NDArray[np.bool_]) -> None:
        """Take experience, the code of the episode of each segment, and which steps are not lookback."""
        if col.ENV_T in exp.steps:
            clock = np.asarray(exp.steps[col.ENV_T])[trained]
            episode = codes[exp.segment_of_step()][trained]
            self._spans.append(np.stack([episode, clock, clock + 1], axis=1).astype(np.int64))
        else:
            first = exp.segments.t_start + exp.segments.lookback
            stop = exp.segments.t_start + exp.lengths
            self._spans.append(np.stack([codes, first, stop], axis=1)[stop > first])
        if len(self._spans) > 256:
            self._spans = [_united(np.concatenate(self._spans))]

    def total(self) -> int:
        """All of them."""
        spans = _united(np.concatenate(self._spans)) if self._spans else np.zeros((0, 3), np.int64)
        return int((spans[:, 2] - spans[:, 1]).sum())


def _sum(values: Any) -> float:
    if values.dtype == object:
        return 0.0
    return float(np.asarray(values).sum(dtype=np.float64))


def _united(spans: Index) -> Index:
    """Spans of each episode with those that touch or overlap made one."""
    spans = spans[np.lexsort((spans[:, 1], spans[:, 0]))]
    if not len(spans):
        return spans
    # Episodes are put behind each other on one line, so that one running maximum serves all of them.
    width = int(spans[:, 2].max()) + 2
    starts, stops = spans[:, 0] * width + spans[:, 1], spans[:, 0] * width + spans[:, 2]
    reach = np.maximum.accumulate(stops)
    heads = np.flatnonzero(np.append(True, starts[1:] > reach[:-1]))
    tails = np.append(heads[1:], len(spans)) - 1
    episode = spans[heads, 0]
    return np.stack([episode, starts[heads] - episode * width, reach[tails] - episode * width], axis=1)


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
