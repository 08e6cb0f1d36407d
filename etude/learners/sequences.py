# SPDX-License-Identifier: Apache-2.0
"""Minibatches of whole sequences, for recurrent modules."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from etude.experience import Experience
from etude.experience.arrays import Index, ranges
from etude.learners.batch import Batch, MinibatchColumns, Shuffled

if TYPE_CHECKING:
    from etude.modules import Module, Output


class Sequences(NamedTuple):
    """Pieces of segments: rows that follow each other."""

    starts: Index
    """int64 ``[num]``: the first row of each."""
    lengths: Index
    """int64 ``[num]``: how many rows, at least 1."""

    @classmethod
    def of(cls, exp: Experience, max_len: int) -> "Sequences":
        """The steps of ``exp`` in sequences of at most ``max_len``, from the first of each segment on.

        Lookback is left out: the state in which the first step after it was seen is known.
        """
        begin = exp.offsets[:-1] + exp.segments.lookback
        total = exp.offsets[1:] - begin
        pieces = -(-total // max_len)
        nth = ranges(np.zeros(len(pieces), np.int64), pieces)
        starts = np.repeat(begin, pieces) + nth * max_len
        return cls(starts, np.minimum(max_len, np.repeat(begin + total, pieces) - starts))

    def shuffled(self, rng: np.random.Generator) -> "Sequences":
        """The same in a random order."""
        order = rng.permutation(len(self.starts))
        return Sequences(self.starts[order], self.lengths[order])


class Layout:
    """How the rows of a minibatch lie in sequences, and the states that these begin with."""

    def __init__(self, lengths: Index, state: dict[str, torch.Tensor], device: torch.device | str) -> None:
        self._state = state
        steps = np.arange(int(lengths.max()))
        first = np.cumsum(lengths) - lengths
        # behind a sequence's end its last row is repeated: always a value that the net can take
        rows = first[:, None] + np.minimum(steps, lengths[:, None] - 1)
        self._shape = rows.shape
        self._rows = self._valid = None
        if rows.size > int(lengths.sum()):
            self._rows = torch.from_numpy(rows.reshape(-1)).to(device)
            self._valid = torch.from_numpy(np.flatnonzero(steps < lengths[:, None])).to(device)

    def forward(self, module: "Module", obs: Mapping[str, torch.Tensor]) -> "Output":
        """Run ``module`` over the sequences; ``obs`` and all that comes are ``[n, ...]``, without padding."""

        def padded(column: torch.Tensor) -> torch.Tensor:
            rows = column if self._rows is None else column.index_select(0, self._rows)
            return rows.reshape(*self._shape, *column.shape[1:])

        def flat(output: torch.Tensor) -> torch.Tensor:
            rows = output.reshape(-1, *output.shape[2:])
            return rows if self._valid is None else rows.index_select(0, self._valid)

        out = module(module.obs_from({name: padded(column) for name, column in obs.items()}), self._state)
        out.dist_inputs = None if out.dist_inputs is None else flat(out.dist_inputs)
        out.value = None if out.value is None else flat(out.value)
        return out  # type: ignore[no-any-return]


def sequence_batches(
    columns: Mapping[str, torch.Tensor], sequences: Sequences, size: int, module: "Module", device: torch.device | str
) -> Iterator[tuple[Batch, int]]:
    """Batches of about ``size`` steps, of whole sequences in the order given; and how many steps exactly.

    A sequence goes into the batch that its first step would be in, were batches of ``size`` steps each.

    Raises:
        DataError: the columns do not hold the module's state.
    """
    starts, lengths = sequences
    if not len(starts):
        return
    batch_of = (np.cumsum(lengths) - lengths) // size
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(batch_of)) + 1, [len(starts)]])
    steps = np.add.reduceat(lengths, bounds[:-1])
    epoch = Shuffled(columns, torch.from_numpy(ranges(starts, lengths)).to(device), steps.tolist())
    states = Shuffled(columns, torch.from_numpy(starts).to(device), np.diff(bounds).tolist())
    for i, (first, last) in enumerate(pairwise(bounds)):
        state = module.state_from(MinibatchColumns(states, i))
        layout = Layout(lengths[first:last], state, device)
        yield Batch(MinibatchColumns(epoch, i), module, layout), int(steps[i])
