# SPDX-License-Identifier: Apache-2.0
"""The sum tree against running sums over all its weights."""

import numpy as np
import pytest

from etude.experience.priorities import SumTree

SIZES = [1, 7, 32, 1024, 1025, 5000, 40_000]


@pytest.mark.parametrize("size", SIZES)
def test_it_finds_what_a_running_sum_finds(size: int) -> None:
    rng = np.random.default_rng(size)
    tree, weights = SumTree(size), np.zeros(size, np.float32)
    for num in (size, 3, 400, 1, 64):
        index = rng.integers(size, size=num)
        new = rng.integers(0, 5, num).astype(np.float32)  # whole numbers, so that sums are exact
        tree.put(index, new)
        weights[index] = new
        if not weights.any():
            tree.put(np.array([0]), 1.0)
            weights[0] = 1.0
        assert tree.weights.tolist() == weights.tolist()
        running = np.cumsum(weights, dtype=np.float64)
        assert tree.total == running[-1]
        values = np.concatenate([rng.random(500) * running[-1], rng.integers(0, int(running[-1]), 500), [0.0]])
        assert tree.find(values).tolist() == np.searchsorted(running, values, side="right").tolist()


@pytest.mark.parametrize("size", SIZES)
def test_weights_of_zero_are_never_found(size: int) -> None:
    rng = np.random.default_rng(size)
    tree = SumTree(size)
    tree.put(
        np.arange(size), np.where(rng.random(size) < 0.3, rng.random(size) * 10.0 ** rng.integers(-20, 20, size), 0)
    )
    tree.put(np.array([size // 2]), 1.0)
    total = tree.total
    values = np.concatenate([rng.random(5000) * total, np.cumsum(tree.weights, dtype=np.float64) * (1 - 1e-16)])
    values = np.concatenate([values, [total, np.nextafter(total, np.inf), np.nextafter(total, 0)]])
    found = tree.find(values)
    assert found.max() < size
    assert (tree.weights[found] > 0).all()


def test_sums_do_not_depend_on_how_the_weights_came_to_be() -> None:
    rng = np.random.default_rng(0)
    size = 40_000
    tree, anew = SumTree(size), SumTree(size)
    for _ in range(50):
        tree.put(rng.integers(size, size=100), rng.random(100))
        _ = tree.total
    anew.weights[:] = tree.weights
    anew.rebuild()
    values = rng.random(5000) * tree.total
    assert tree.total == anew.total
    assert tree.find(values).tolist() == anew.find(values).tolist()
