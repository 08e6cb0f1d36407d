# SPDX-License-Identifier: Apache-2.0
"""How many rows go into a minibatch."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from etude.errors import SettingsError

Index = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """Minibatches of a size, or so many of them: one of the two.

    Raises:
        SettingsError: neither or both are given, or one is below 1.
    """

    size: int | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        given = [number for number in (self.size, self.count) if number is not None]
        if len(given) != 1 or given[0] < 1:
            raise SettingsError(
                f"minibatch_size is {self.size} and num_minibatches {self.count}: give one of them, at least 1."
            )

    def sizes(self, rows: int) -> list[int]:
        """Of ``rows`` rows, how many go into each minibatch: alike but for the last, or but for one more or less."""
        if self.size is not None:
            whole, rest = divmod(rows, self.size)
            return [self.size] * whole + [rest] * (rest > 0)
        assert self.count is not None
        if not rows:
            return []
        each, rest = divmod(max(rows, self.count), self.count)
        return [each + (i < rest) for i in range(self.count)]

    def filled(self, order: Index) -> Index:
        """Rows in an order, again from the first where there are fewer than minibatches."""
        if self.count is None or not 0 < len(order) < self.count:
            return order
        return np.resize(order, self.count)


def dealt(count: int, owned: Sequence[int], rank: int) -> tuple[Index, list[int]]:
    """Deal what the ranks of a team own, like cards, into minibatches: together these differ by one at most.

    Args:
        count: How many minibatches.
        owned: How many rows, or sequences, each rank has. Where they are fewer than minibatches, they come again.
        rank: For which of them.

    Returns:
        int64 ``[n]``: those of its own, counted from 0, in order of minibatches; and how many go into each of these.
    """
    total, first = sum(owned), sum(owned[:rank])
    if total >= count:
        own = np.arange(owned[rank])
        return own, np.bincount((first + own) % count, minlength=count).tolist()
    places = np.arange(count)
    own = places % total - first
    places = places[(own >= 0) & (own < owned[rank])]
    return own[places], np.bincount(places, minlength=count).tolist()


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceRule:
    """How a recurrent module's segments are cut; see `ModuleLearner.update`."""

    max_len: int
    burn_in: int = 0
    start: Literal["stored", "zeros"] = "stored"
