# SPDX-License-Identifier: Apache-2.0
"""Minibatches of steps from an Experience."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from etude.experience import arrays
from etude.experience.arrays import Array

if TYPE_CHECKING:
    from etude.experience.experience import Experience


def minibatches(
    exp: "Experience",
    size: int,
    *,
    shuffle: bool = True,
    epochs: int = 1,
    rng: np.random.Generator | None = None,
    names: Sequence[str] | None = None,
) -> Iterator[dict[str, Array]]:
    """Columns of ``size`` steps at a time; the last batch of an epoch is smaller where ``size`` does not divide.

    Every step that is not lookback comes once an epoch.

    Args:
        exp: The experience.
        size: Steps in a batch, at least 1.
        shuffle: In a new random order each epoch; else in order.
        epochs: How many times over.
        rng: The random stream for the order; a fresh one where None.
        names: The columns wanted; None is all.
    """
    if size < 1:
        raise ValueError(f"a minibatch needs a size of at least 1, not {size}.")
    columns = {name: exp.steps[name] for name in (exp.steps if names is None else names)}
    rows = np.flatnonzero(exp.trained())
    rng = rng if rng is not None or not shuffle else np.random.default_rng()
    for _ in range(epochs):
        order = rng.permutation(rows) if shuffle and rng is not None else rows
        for start in range(0, len(order), size):
            index = order[start : start + size]
            yield {name: arrays.take(column, index) for name, column in columns.items()}
