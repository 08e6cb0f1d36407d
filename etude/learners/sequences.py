# SPDX-License-Identifier: Apache-2.0
"""Minibatches of whole sequences, for recurrent modules."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from etude import columns as col
from etude.experience import Experience
from etude.experience.arrays import Index, ranges
from etude.learners.batch import Batch, MinibatchColumns, Shuffled
from etude.learners.splits import SequenceRule, Split

if TYPE_CHECKING:
    from etude.modules import Module, Output


class Sequences(NamedTuple):
    """Pieces of segments: rows that follow each other."""

    starts: Index
    """int64 ``[num]``: the first row of each."""
    lengths: Index
    """int64 ``[num]``: how many rows, at least 1."""
    before: Index
    """int64 ``[num]``: how many rows before these are its burn-in."""

    @classmethod
    def of(cls, exp: Experience, rule: SequenceRule) -> "Sequences":
        """The steps of ``exp`` in sequences of at most ``rule.max_len``, from the first of each segment on.

        Lookback is left out, but for burn-in: the state in which the first step after it was seen is known.
        """
        begin = exp.offsets[:-1] + exp.segments.lookback
        total = exp.offsets[1:] - begin
        pieces = -(-total // rule.max_len)
        nth = ranges(np.zeros(len(pieces), np.int64), pieces)
        starts = np.repeat(begin, pieces) + nth * rule.max_len
        lengths = np.minimum(rule.max_len, np.repeat(begin + total, pieces) - starts)
        return cls(starts, lengths, np.minimum(rule.burn_in, starts - np.repeat(exp.offsets[:-1], pieces)))

    def shuffled(self, rng: np.random.Generator) -> "Sequences":
        """The same in a random order."""
        return self.take(rng.permutation(len(self.starts)))

    def take(self, which: Index) -> "Sequences":
        """Some of them."""
        return Sequences(self.starts[which], self.lengths[which], self.before[which])


class BurnIn(NamedTuple):
    """What sequences of a minibatch are walked through first."""

    lengths: Index
    """int64 ``[num]``."""
    obs: dict[str, torch.Tensor]
    """Columns ``obs...`` ``[sum of lengths, ...]``."""

    def walk(self, module: "Module", state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The states after it, given those before it, without gradients; sequences of one length go together."""
        state = {name: column.clone() for name, column in state.items()}
        first = np.cumsum(self.lengths) - self.lengths
        for length in np.unique(self.lengths[self.lengths > 0]).tolist():
            which = np.flatnonzero(self.lengths == length)
            rows = torch.from_numpy((first[which, None] + np.arange(length)).reshape(-1))
            own = torch.from_numpy(which)
            with torch.no_grad():
                obs = {n: c[rows.to(c.device)].reshape(len(which), length, *c.shape[1:]) for n, c in self.obs.items()}
                after = module(module.obs_from(obs), {n: c[own.to(c.device)] for n, c in state.items()}).state
                for name, column in state.items():
                    column[own.to(column.device)] = after[name].to(column.dtype)
        return state


class Layout:
    """How the rows of a minibatch lie in sequences, and the states that these begin with."""

    def __init__(
        self,
        lengths: Index,
        state: dict[str, torch.Tensor],
        device: torch.device | str,
        burn_in: BurnIn | None = None,
    ) -> None:
        self._state = state
        self._burn_in = burn_in
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

        state = self._state if self._burn_in is None else self._burn_in.walk(module, self._state)
        out = module(module.obs_from({name: padded(column) for name, column in obs.items()}), state)
        out.dist_inputs = None if out.dist_inputs is None else flat(out.dist_inputs)
        out.value = None if out.value is None else flat(out.value)
        return out  # type: ignore[no-any-return]


def sequence_batches(
    columns: Mapping[str, torch.Tensor],
    sequences: Sequences,
    counts: list[int],
    rule: SequenceRule,
    module: "Module",
    device: torch.device | str,
) -> Iterator[Batch]:
    """Batches of whole sequences in the order given, of so many each; where that is 0, a batch without rows.

    Raises:
        DataError: the columns do not hold the module's state.
    """
    starts, lengths, before = sequences
    bounds = np.cumsum([0, *counts])
    steps = _sums(lengths, bounds)
    epoch = _in_order(columns, ranges(starts, lengths), steps, device)
    states = _in_order(columns, starts - before, counts, device)
    burn_in = _in_order(columns, ranges(starts - before, before), _sums(before, bounds), device)
    for i, size in enumerate(steps):
        own = slice(bounds[i], bounds[i + 1])
        if not size:
            yield Batch({}, module, size=0)
            continue
        if rule.start == "zeros":
            shapes = {name: zeros.shape for name, zeros in module.initial_state().items()}
            state = {name: torch.zeros(counts[i], *shape, device=device) for name, shape in shapes.items()}
        else:
            state = module.state_from(MinibatchColumns(states, i))
        walked = None
        if before[own].any():
            obs = MinibatchColumns(burn_in, i)
            walked = BurnIn(before[own], {name: obs[name] for name in col.under(columns, col.OBS)})
        yield Batch(MinibatchColumns(epoch, i), module, Layout(lengths[own], state, device, walked), size)


def _sums(numbers: Index, bounds: Index) -> list[int]:
    """Of ``numbers[bounds[i]:bounds[i + 1]]``, each."""
    totals = np.append(0, np.cumsum(numbers))
    return np.diff(totals[bounds]).tolist()  # type: ignore[no-any-return]


def cut_by(split: Split, sequences: Sequences) -> tuple[Sequences, list[int]]:
    """The sequences of the minibatches one after the other, and how many go into each.

    Where `Split` has a size, minibatches have about so many steps: a sequence goes into the one that its first step
    would be in, were batches of that size each. Where it has a count, they have equally many sequences.
    """
    if split.count is not None:
        counts = split.sizes(len(sequences.starts))
        return sequences.take(split.filled(np.arange(len(sequences.starts)))), counts
    assert split.size is not None
    batch_of = (np.cumsum(sequences.lengths) - sequences.lengths) // split.size
    return sequences, np.unique(batch_of, return_counts=True)[1].tolist()


def _in_order(
    columns: Mapping[str, torch.Tensor], rows: Index, sizes: list[int], device: torch.device | str
) -> Shuffled:
    return Shuffled(columns, torch.from_numpy(rows).to(device), sizes)


def batch_of(exp: Experience, module: "Module", device: torch.device | str) -> Batch:
    """All segments of ``exp`` as one batch, for a recurrent module: each begins with its initial state.

    What is lookback is walked through first, without gradients.
    """
    rule = SequenceRule(max(1, int(exp.lengths.max(initial=1))), int(exp.segments.lookback.max(initial=0)), "zeros")
    sequences = Sequences.of(exp, rule)
    counts = [len(sequences.starts)]
    (batch,) = sequence_batches(exp.to(device).steps, sequences, counts, rule, module, device)
    return batch
