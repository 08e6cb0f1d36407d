# SPDX-License-Identifier: Apache-2.0
"""Estimates as functions of how often each episode counts, and their bootstrap intervals."""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BLOCK: Final = 4_000_000
"""Numbers that a table of weights or counts may have; larger ones are made in parts."""


class Statistic(Protocol):
    """What is estimated, from units (agents' parts in episodes) that count so and so often."""

    def of(self, counts: Floats) -> Floats:
        """``[B]`` for ``counts`` ``[B, units]``; NaN where all weights are 0."""


class Ratio:
    """``sum(count * top) / sum(count * bottom)``: a mean, where ``bottom`` is 1."""

    def __init__(self, top: Floats, bottom: Floats | None = None) -> None:
        self._top = top
        self._bottom = np.ones_like(top) if bottom is None else bottom

    def of(self, counts: Floats) -> Floats:
        """See `Statistic.of`."""
        return _divided(counts @ self._top, counts @ self._bottom)


class Stepwise:
    """``mean(base) + sum over t of sum(count * w[t] * x[t]) / sum(count * w[t])``.

    A unit that has ended keeps its last weight, and brings nothing more (Thomas & Brunskill 2016, section 5).

    Args:
        base: float64 ``[units]``.
        log_w: float32 ``[steps]``: logarithms of the weights, -inf for none, of all units one after the other.
        x: float32 ``[steps]``.
        offsets: int64 ``[units + 1]``.
    """

    def __init__(self, base: Floats, log_w: NDArray[np.float32], x: NDArray[np.float32], offsets: Ints) -> None:
        self._base = Ratio(base)
        self._log_w, self._x, self._offsets = log_w, x, offsets
        self._lengths = np.diff(offsets)

    def of(self, counts: Floats) -> Floats:
        """See `Statistic.of`."""
        total = self._base.of(counts)
        for weight, weighted in self._tables():
            total = total + _divided(counts @ weighted, counts @ weight).sum(1)
        return total

    def _tables(self) -> Iterator[tuple[Floats, Floats]]:
        """Weights and weighted ``x``, ``[units, steps of a block]``; the greatest weight of a step is 1."""
        longest, width = int(self._lengths.max(initial=0)), max(1, BLOCK // max(1, len(self._lengths)))
        for begin in range(0, longest, width):
            yield self._table(np.arange(begin, min(begin + width, longest)))

    def _table(self, t: Ints) -> tuple[Floats, Floats]:
        runs = t < self._lengths[:, None]
        rows = self._offsets[:-1, None] + np.minimum(t, self._lengths[:, None] - 1)
        log_w = self._log_w[rows].astype(np.float64)
        most = log_w.max(0)
        weight = np.exp(log_w - np.where(np.isfinite(most), most, 0.0))
        return weight, np.where(runs, weight * self._x[rows], 0.0)


def _divided(top: Floats, bottom: Floats) -> Floats:
    """NaN where ``bottom`` is 0: nothing has any weight."""
    return np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom > 0)


def effective(weights: Floats) -> float:
    """Kish's effective sample size, ``sum(w)^2 / sum(w^2)``; 0 where all are 0."""
    most = weights.max(initial=0.0)
    if most <= 0:
        return 0.0
    scaled = weights / most
    return float(scaled.sum() ** 2 / np.square(scaled).sum())


def intervals(
    statistics: Mapping[str, Statistic], cluster: Ints, *, confidence: float, resamples: int, seed: int
) -> dict[str, tuple[float, float, float]]:
    """Each estimate with the bounds of its interval, by bootstrap over clusters of units (whole episodes).

    The bounds are percentiles of the estimates from resamples (Efron & Tibshirani 1993, "An introduction to the
    bootstrap", 13.3). All estimates see the same resamples. Those in which an estimate is not defined, as all weights
    are 0, are left out of its interval. There is no interval, but NaN, where there is one cluster or no estimate.

    Args:
        statistics: What to estimate, by name.
        cluster: int64 ``[units]``: which units are drawn together, from 0.
        confidence: Of the intervals, between 0 and 1.
        resamples: How many bootstrap samples.
        seed: Of the draws.
    """
    num = int(cluster.max()) + 1
    rng = np.random.default_rng(seed)
    draws: dict[str, list[Floats]] = {name: [] for name in statistics}
    step = max(1, BLOCK // num)
    for begin in range(0, resamples, step):
        size = min(step, resamples - begin)
        index = rng.integers(0, num, (size, num)) + np.arange(size)[:, None] * num
        counts = np.bincount(index.reshape(-1), minlength=size * num).reshape(size, num)[:, cluster].astype(np.float64)
        for name, statistic in statistics.items():
            draws[name].append(statistic.of(counts))
    sides = (1 - confidence) / 2, (1 + confidence) / 2
    found = {}
    for name, statistic in statistics.items():
        estimate = float(statistic.of(np.ones((1, len(cluster))))[0])
        drawn = np.concatenate(draws[name])
        drawn = drawn[np.isfinite(drawn)]
        low = high = math.nan
        if num > 1 and math.isfinite(estimate) and len(drawn):
            low, high = np.quantile(drawn, sides).tolist()
        found[name] = (estimate, low, high)
    return found


def student_t(confidence: float, freedom: int) -> float:
    """How many standard errors a two-sided interval reaches: Student's t by its expansion (Abramowitz & Stegun 1964,
    26.7.5), off by less than 1 % from 5 degrees of freedom at confidence 0.95."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    terms: Sequence[float] = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(sum(term / freedom**i for i, term in enumerate(terms)))
