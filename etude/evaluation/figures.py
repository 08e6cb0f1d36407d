# SPDX-License-Identifier: Apache-2.0
"""Figures of episodes, from which all estimates are made: collected in one pass over the data."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.evaluation.fqe import FQE, Values
from etude.experience import Experience

Floats = NDArray[np.float64]

NEVER = -1e4
"""Stands for the logarithm of a ratio that is 0, while it is summed."""
MOST = 690.0
"""Logarithms of weights are at most this, so that they don't overflow."""


@dataclasses.dataclass
class Figures:
    """A row a unit: an agent's part in a whole episode."""

    episode_id: NDArray[np.object_]
    lengths: NDArray[np.int64]
    returns: Floats
    """Discounted from each one's first step."""
    truncated: NDArray[np.bool_]
    """Stopped from outside: what would have followed has a value."""
    log_weight: Floats | None = None
    """Of whole episodes; -inf where the policy would never have played one."""
    per_decision: Floats | None = None
    """Sums of discounted rewards, each weighed by the ratio up to its step (Precup, Sutton & Singh 2000, eq. 5)."""
    log_ratio: NDArray[np.float32] | None = None
    """``[steps]``: logarithms of the ratios up to each step."""
    reward: NDArray[np.float32] | None = None
    """``[steps]``: discounted rewards."""
    advantage: NDArray[np.float32] | None = None
    """``[steps]``: ``gamma^t * (r + gamma * V(s') - Q(s, a))``."""
    start: Floats | None = None
    """Value of the first observation, by members of the fit that have not learned from the episode."""
    doubly_robust: Floats | None = None
    """See `etude.evaluation.evaluate`: what ``dr`` is the mean of."""
    member_values: Floats | None = None
    """``[members]``: the mean value of first observations, by each member over its own sample of episodes."""
    mean_value: float = 0.0
    """The same by all members over all episodes."""
    effective_by_step: float = 0.0
    """See `EffectiveByStep`."""


def collect(
    chunks: Callable[[], Iterator[Experience]],
    log_ratio: Callable[[Experience], Floats] | None,
    fqe: FQE | None,
    gamma: float,
    *,
    by_step: bool,
) -> Figures:
    """One pass.

    Args:
        chunks: Makes it: whole episodes as the module sees them.
        log_ratio: Gives ``[steps]``: log-probabilities under the policy evaluated less those under the one that played;
            None where no weights are wanted.
        fqe: Fitted; None where no values are wanted.
        gamma: Discount.
        by_step: Keep figures of steps.
    """
    rows: list[dict[str, Any]] = []
    tops = bottoms = total = np.zeros(0)
    by_steps = EffectiveByStep()
    for seen in chunks():
        values = None if fqe is None else fqe.values(seen)
        summed = None if log_ratio is None else _summed(log_ratio(seen), seen)
        if summed is not None:
            by_steps.add(summed, seen)
        rows.append(_figures(seen, summed, values, gamma, by_step))
        if values is not None:
            tops = _added(tops, (values.start * values.times.T).sum(1))
            bottoms = _added(bottoms, values.times.sum(0).astype(np.float64))
            total = _added(total, values.start.sum(1))
    if not rows:
        return Figures(np.zeros(0, object), np.zeros(0, np.int64), np.zeros(0), np.zeros(0, bool))
    found: dict[str, Any] = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    figures = Figures(**found)
    if log_ratio is not None:
        figures.effective_by_step = by_steps.mean(gamma)
    if fqe is not None:
        figures.member_values = np.divide(tops, bottoms, out=np.full_like(tops, np.nan), where=bottoms > 0)
        figures.mean_value = float(total.mean() / len(figures.lengths))
    return figures


def _added(total: Floats, more: Floats) -> Floats:
    return more if not len(total) else total + more


def _figures(
    seen: Experience, summed: Floats | None, values: Values | None, gamma: float, by_step: bool
) -> dict[str, Any]:
    first = seen.offsets[:-1]
    discount = gamma ** seen.t().astype(np.float64)
    reward = discount * seen.steps[col.REWARD].astype(np.float64)
    out: dict[str, Any] = {
        "episode_id": np.asarray(seen.segments.episode_id),
        "lengths": seen.lengths,
        "truncated": seen.segments.truncated & ~seen.segments.terminated,
        "returns": np.add.reduceat(reward, first),
    }
    advantage = np.zeros(0)
    if values is not None:
        out["start"] = values.at[first]
        advantage = reward + discount * (gamma * values.after - values.taken)
    if summed is not None:
        weight = np.exp(np.minimum(summed, MOST))
        out["log_weight"] = summed[seen.offsets[1:] - 1]
        out["per_decision"] = np.add.reduceat(weight * reward, first)
        if values is not None:
            out["doubly_robust"] = out["start"] + np.add.reduceat(weight * advantage, first)
        if by_step:
            out |= {"log_ratio": summed.astype(np.float32), "reward": reward.astype(np.float32)}
            if values is not None:
                out["advantage"] = advantage.astype(np.float32)
    return out


def _summed(log_ratio: Floats, seen: Experience) -> Floats:
    """``[steps]``: the sum of log ratios from each episode's first step on; -inf from where one is."""
    finite = np.maximum(log_ratio, NEVER)
    total = np.cumsum(finite)
    before = total[seen.offsets[:-1]] - finite[seen.offsets[:-1]]
    summed = total - np.repeat(before, seen.lengths)
    return np.where(summed <= 0.5 * NEVER, -np.inf, summed)


class EffectiveByStep:
    """The effective sample size of the weights at each step, summed up as episodes come; one that has ended keeps its
    last weight."""

    def __init__(self) -> None:
        self._running = np.zeros((3, 0))
        self._ended = np.zeros((3, 0))

    def add(self, summed: Floats, seen: Experience) -> None:
        """Take a chunk with the logarithms of its weights ``[steps]``."""
        weight = np.exp(np.minimum(summed, MOST / 2))
        t, lengths, last = seen.t(), seen.lengths, weight[seen.offsets[1:] - 1]
        longest = max(self._running.shape[1], int(lengths.max()) + 1)
        self._running, self._ended = (
            np.pad(table, ((0, 0), (0, longest - table.shape[1]))) for table in (self._running, self._ended)
        )
        for i, power in enumerate((weight**0, weight, weight**2)):
            self._running[i] += np.bincount(t, power, longest)
        for i, power in enumerate((last**0, last, last**2)):
            self._ended[i] += np.bincount(lengths, power, longest)

    def mean(self, gamma: float) -> float:
        """Over all steps, each weighed by its discount."""
        _, sums, squares = self._running + self._ended.cumsum(1)
        sizes = np.divide(sums**2, squares, out=np.zeros_like(sums), where=squares > 0)
        share = self._running[0] * gamma ** np.arange(len(sums), dtype=np.float64)
        return float((sizes * share).sum() / share.sum())
