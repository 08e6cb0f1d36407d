# SPDX-License-Identifier: Apache-2.0
"""Scores over several seeds, for tests of what is learned.

One seed of one CPU decides nothing: another instruction set rounds otherwise, and a run that is chaotic then goes
another way. So what such a test asserts is the median over seeds, of what is right and of each mistaken variant, and
between the two lies a wide margin. docs/contributing.md says how wide, and how that was measured.

``ETUDE_FIRST_SEED=100`` takes other seeds; ``pytest -rP`` shows the scores.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from etude.algorithms import Algorithm, Stop

FIRST_SEED = int(os.environ.get("ETUDE_FIRST_SEED", "0"))


def median_over_seeds(score: Callable[[int], float], num: int = 3) -> float:
    """The median of ``score(seed)`` over ``num`` seeds."""
    scores = [float(score(FIRST_SEED + i)) for i in range(num)]
    print("scores", " ".join(f"{one:.3g}" for one in scores))
    return float(np.median(scores))


def return_over_seeds(algorithm: type[Algorithm[Any]], stop: Stop, **given: Any) -> float:
    """The median of the mean returns that an algorithm with these settings ends with."""
    return median_over_seeds(lambda seed: algorithm(algorithm.Config(seed=seed, **given)).fit(stop).return_mean)
