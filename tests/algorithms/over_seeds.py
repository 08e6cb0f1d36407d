# SPDX-License-Identifier: Apache-2.0
"""Scores over several seeds, for tests of what is learned.

One seed of one CPU decides nothing: another instruction set rounds otherwise, and a run that is chaotic then goes
another way. So what such a test asserts is the median over seeds, of what is right and of each mistaken variant, and
between the two lies a wide margin. docs/contributing.md says how wide, and how that was measured.

``ETUDE_FIRST_SEED=100`` takes other seeds, and all of them though fewer decide; ``pytest -rP`` shows the scores.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from etude.algorithms import Algorithm, Stop

FIRST_SEED = int(os.environ.get("ETUDE_FIRST_SEED", "0"))
ALL_SEEDS = "ETUDE_FIRST_SEED" in os.environ


class Median:
    """The median of ``score(seed)`` over an odd number of seeds; nan where a score is.

    A comparison with a number runs only as many seeds as decide it: where two of three are on one side of the number,
    so is the median.
    """

    def __init__(self, score: Callable[[int], float], num: int) -> None:
        assert num % 2
        self.score, self.num = score, num
        self.scores: list[float] = []

    def _run(self) -> None:
        self.scores.append(float(self.score(FIRST_SEED + len(self.scores))))

    def _holds(self, is_so: Callable[[float], bool]) -> bool:
        most = self.num // 2
        while len(self.scores) < self.num:
            so = sum(map(is_so, self.scores))
            if ALL_SEEDS or max(so, len(self.scores) - so) <= most:
                self._run()
            else:
                break
        print("scores", self)
        return sum(map(is_so, self.scores)) > most and not np.isnan(self.scores).any()

    def __lt__(self, bound: float) -> bool:
        return self._holds(lambda one: one < bound)

    def __le__(self, bound: float) -> bool:
        return self._holds(lambda one: one <= bound)

    def __gt__(self, bound: float) -> bool:
        return self._holds(lambda one: one > bound)

    def __ge__(self, bound: float) -> bool:
        return self._holds(lambda one: one >= bound)

    def __float__(self) -> float:
        while len(self.scores) < self.num:
            self._run()
        return float(np.median(self.scores))

    def __repr__(self) -> str:
        return " ".join(f"{one:.3g}" for one in self.scores)


def median_over_seeds(score: Callable[[int], float], num: int = 3) -> Median:
    """The median of ``score(seed)`` over ``num`` seeds."""
    return Median(score, num)


def mistaken(*values: Any) -> Any:
    """The arguments of a test for a variant that must not learn: it shows that the test's threshold tells something.

    `make mutations` runs these, not `make test`.
    """
    return pytest.param(*values, marks=pytest.mark.mistake)


def return_over_seeds(algorithm: type[Algorithm[Any]], stop: Stop, **given: Any) -> Median:
    """The median of the mean returns that an algorithm with these settings ends with."""
    return median_over_seeds(lambda seed: algorithm(algorithm.Config(seed=seed, **given)).fit(stop).return_mean)
