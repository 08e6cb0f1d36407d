# SPDX-License-Identifier: Apache-2.0
"""Medians over seeds that run no more seeds than decide."""

import itertools
import operator
from collections.abc import Callable

import numpy as np
import over_seeds
import pytest
from over_seeds import median_over_seeds


@pytest.fixture(autouse=True)
def as_few_as_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_seeds, "ALL_SEEDS", False)
    monkeypatch.setattr(over_seeds, "FIRST_SEED", 0)


@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge])
def test_comparisons_are_those_of_the_median(compare: Callable[[object, float], bool]) -> None:
    for scores in itertools.product([0.0, 1.0, 2.0], repeat=3):
        for bound in (0.0, 0.5, 1.0, 2.5):
            median = float(np.median(scores))
            assert compare(median_over_seeds(scores.__getitem__), bound) == compare(median, bound)
            assert (0.5 <= median_over_seeds(scores.__getitem__) <= bound) == (0.5 <= median <= bound)
        assert float(median_over_seeds(scores.__getitem__)) == median


def test_the_third_seed_runs_only_where_two_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    alike, apart = median_over_seeds([5.0, 6.0, 0.0].__getitem__), median_over_seeds([5.0, 0.0, 4.0].__getitem__)
    assert alike > 3
    assert apart > 3
    assert (alike.scores, apart.scores) == ([5.0, 6.0], [5.0, 0.0, 4.0])
    monkeypatch.setattr(over_seeds, "ALL_SEEDS", True)
    asked = median_over_seeds([5.0, 6.0, 0.0].__getitem__)
    assert asked > 3
    assert len(asked.scores) == 3


def test_what_is_no_number_is_on_neither_side() -> None:
    scores = [np.nan, 5.0, 6.0]
    assert not median_over_seeds(scores.__getitem__) > 3
    assert not median_over_seeds(scores.__getitem__) < 3
