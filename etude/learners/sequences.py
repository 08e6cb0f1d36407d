# SPDX-License-Identifier: Apache-2.0
"""Minibatches of whole sequences, for recurrent modules."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch

from etude import columns as col
from etude.experience import Experience
from etude.experience.arrays import Index, ranges
from etude.learners.batch import Batch, MinibatchColumns, Shuffled
from etude.learners.splits import SequenceRule, Split

if TYPE_CHECKING:
    from etude.modules import Module, Output


Tensors: TypeAlias = dict[str, torch.Tensor]

Walk: TypeAlias = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]
"""What runs along sequences: columns ``obs...`` ``[B, T, ...]`` and the state before them ``[B, ...]``, to what it says
of each step, ``[B, T, ...]`` by name, and the state after them."""


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
    """The steps before the sequences of a minibatch, which a module walks through first."""

    lengths: Index
    """int64 ``[num]``."""
    obs: Tensors
    """Columns ``obs...`` ``[sum of lengths, ...]``."""

    def walk(self, walk: Walk, state: Tensors) -> Tensors:
        """The states after it, given those before it, without gradients; sequences of one length go together."""
        state = {name: column.clone() for name, column in state.items()}
        first = np.cumsum(self.lengths) - self.lengths
        for length in np.unique(self.lengths[self.lengths > 0]).tolist():
            which = np.flatnonzero(self.lengths == length)
            rows = torch.from_numpy((first[which, None] + np.arange(length)).reshape(-1))
            own = torch.from_numpy(which)
            with torch.no_grad():
                obs = {n: c[rows.to(c.device)].reshape(len(which), length, *c.shape[1:]) for n, c in self.obs.items()}
                _, after = walk(obs, {n: c[own.to(c.device)] for n, c in state.items()})
                for name, column in state.items():
                    column[own.to(column.device)] = after[name].to(column.dtype)
        return state


class Layout:
    """How the rows of a minibatch lie in sequences, and the states that these begin with.

    Args:
        lengths: int64 ``[num]``: rows of each sequence.
        state: Before the first of them, ``[num, ...]``.
        device: Where the columns are.
        burn_in: What is walked through before them.
        final_obs: Columns ``obs...`` ``[num, ...]``: what was observed after each sequence.
    """

    def __init__(
        self,
        lengths: Index,
        state: Tensors,
        device: torch.device | str,
        burn_in: BurnIn | None = None,
        final_obs: Tensors | None = None,
    ) -> None:
        self._lengths, self._state, self._device = lengths, state, device
        self._burn_in, self._final_obs = burn_in, final_obs
        steps = np.arange(int(lengths.max()))
        first = np.cumsum(lengths) - lengths
        # behind a sequence's end its last row is repeated: always a value that the net can take
        rows = first[:, None] + np.minimum(steps, lengths[:, None] - 1)
        self._shape = rows.shape
        self._rows = self._valid = None
        if rows.size > int(lengths.sum()):
            self._rows = torch.from_numpy(rows.reshape(-1)).to(device)
            self._valid = torch.from_numpy(np.flatnonzero(steps < lengths[:, None])).to(device)

    def forward(self, module: "Module", obs: Mapping[str, torch.Tensor], ahead: torch.Tensor | None = None) -> "Output":
        """Run ``module`` over the sequences; ``obs`` and all that comes are ``[n, ...]``, without padding.

        Args:
            module: A recurrent one.
            obs: Columns ``obs...``.
            ahead: int64 ``[n]``: for each row, what the module says so many steps later, at most after the sequence.
        """

        def walk(obs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
            out = module(module.obs_from(obs), state)
            said = {"dist_inputs": out.dist_inputs, "value": out.value}
            return {name: part for name, part in said.items() if part is not None}, out.state

        from etude.modules.network import Output

        said = self.along(walk, obs, self._state, ahead)
        return Output(said.get("dist_inputs"), said.get("value"), dist=module.dist)

    def zeros(self, initial: Tensors) -> Tensors:
        """The states ``[num, ...]`` that all sequences begin with, where each begins with ``initial``."""
        return {name: part.to(self._device).expand(len(self._lengths), *part.shape) for name, part in initial.items()}

    def along(
        self, walk: Walk, obs: Mapping[str, torch.Tensor], state: Tensors, ahead: torch.Tensor | None = None
    ) -> Tensors:
        """What ``walk`` says of each row (or ``ahead`` of it), ``[n, ...]``, from ``state`` before the burn-in on."""
        if self._burn_in is not None:
            state = self._burn_in.walk(walk, state)
        padded = {name: self._padded(column) for name, column in obs.items()}
        if ahead is None:
            said, _ = walk(padded, state)
            rows = {name: part.reshape(-1, *part.shape[2:]) for name, part in said.items()}
            return rows if self._valid is None else {n: part.index_select(0, self._valid) for n, part in rows.items()}
        assert self._final_obs is not None
        last = torch.from_numpy(self._lengths).to(self._device)
        every = torch.arange(len(self._lengths), device=self._device)
        for name, column in padded.items():
            final = self._final_obs[name].to(column.dtype)
            padded[name] = torch.cat([column, final.unsqueeze(1)], 1)
            padded[name][every, last] = final
        said, _ = walk(padded, state)
        # the row of each step where each sequence has a row more
        rows_of = np.arange(self._shape[0])[:, None] * (self._shape[1] + 1) + np.arange(self._shape[1])
        at = torch.from_numpy(rows_of.reshape(-1)).to(self._device)
        at = (at if self._valid is None else at.index_select(0, self._valid)) + ahead
        return {name: part.reshape(-1, *part.shape[2:]).index_select(0, at) for name, part in said.items()}

    def _padded(self, column: torch.Tensor) -> torch.Tensor:
        rows = column if self._rows is None else column.index_select(0, self._rows)
        return rows.reshape(*self._shape, *column.shape[1:])


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
    """All segments of ``exp`` as one batch, for a recurrent module.

    Each begins with the state that was recorded for its first step, or, where none was, with the initial one. What is
    lookback is walked through first, without gradients.
    """
    exp = exp.select(exp.lengths > exp.segments.lookback).to(device)
    lookback, lengths = exp.segments.lookback, exp.lengths - exp.segments.lookback
    first = exp.offsets[:-1]

    def taken(rows: Index) -> MinibatchColumns:
        return MinibatchColumns(Shuffled(exp.steps, torch.from_numpy(rows).to(device), [len(rows)]), 0)

    initial = {name: torch.from_numpy(zeros) for name, zeros in module.initial_state().items()}
    if all(f"{col.STATE_IN}{col.SEPARATOR}{name}" in exp.steps for name in initial):
        state = module.state_from(taken(first))
    else:
        state = {name: zeros.to(device).repeat(len(first), *[1] * zeros.dim()) for name, zeros in initial.items()}
    burn_in = None
    if lookback.any():
        context = taken(ranges(first, lookback))
        burn_in = BurnIn(lookback, {name: context[name] for name in col.under(exp.steps, col.OBS)})
    rows = ranges(first + lookback, lengths)
    return Batch(taken(rows), module, Layout(lengths, state, device, burn_in, exp.final_obs), len(rows))
