# SPDX-License-Identifier: Apache-2.0
"""Minibatches of Experience: of rows, or of whole sequences for recurrent modules; for one learner or for a team."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from etude import columns as col
from etude.errors import ModuleError, SettingsError
from etude.experience import Experience
from etude.experience.arrays import Array, Index, ranges
from etude.learners.batch import Batch, MinibatchColumns, PaddedSequences, RowsInOrder, as_tensors
from etude.learners.distributed import Team, dealt
from etude.modules import Module


class Sequences(NamedTuple):
    """Pieces of segments: consecutive rows. For a module without memory, each row is one by itself."""

    starts: Index
    """int64 ``[num]``: the first row of each."""
    lengths: Index
    """int64 ``[num]``: how many rows, at least 1."""
    burn_in: Index
    """int64 ``[num]``: how many rows before these are walked through first."""

    @classmethod
    def rows(cls, exp: Experience) -> "Sequences":
        """The steps of ``exp`` one by one, lookback left out."""
        starts = np.flatnonzero(exp.trained())
        return cls(starts, np.ones_like(starts), np.zeros_like(starts))

    @classmethod
    def cut(cls, exp: Experience, max_len: int, burn_in: int = 0) -> "Sequences":
        """The steps of ``exp`` in sequences of at most ``max_len``, from the first of each segment on.

        Lookback is left out, but for burn-in: the state in which the first step after it was seen is known.
        """
        begin = exp.offsets[:-1] + exp.segments.lookback
        total = exp.offsets[1:] - begin
        pieces = -(-total // max_len)
        nth = ranges(np.zeros(len(pieces), np.int64), pieces)
        starts = np.repeat(begin, pieces) + nth * max_len
        lengths = np.minimum(max_len, np.repeat(begin + total, pieces) - starts)
        return cls(starts, lengths, np.minimum(burn_in, starts - np.repeat(exp.offsets[:-1], pieces)))

    @classmethod
    def whole(cls, exp: Experience) -> "Sequences":
        """The segments of ``exp``, each as a whole, after its lookback."""
        lookback = exp.segments.lookback
        return cls(exp.offsets[:-1] + lookback, exp.lengths - lookback, lookback)

    def take(self, which: Index) -> "Sequences":
        """Some of them, in this order."""
        return Sequences(self.starts[which], self.lengths[which], self.burn_in[which])


@dataclass(frozen=True, slots=True)
class Split:
    """How the steps of an update are split into minibatches; see `ModuleLearner.update`.

    Minibatches have about ``size`` rows, or there are ``count`` of them: one of the two. The other fields are for
    recurrent modules.

    Raises:
        SettingsError: both or neither is given, or it is below 1.
    """

    size: int | None = None
    count: int | None = None
    max_seq_len: int = 32
    burn_in: int = 0
    start: Literal["stored", "zeros"] = "stored"

    def __post_init__(self) -> None:
        given = [number for number in (self.size, self.count) if number is not None]
        if len(given) != 1 or given[0] < 1:
            raise SettingsError(
                f"minibatch_size is {self.size} and num_minibatches {self.count}: give one of them, at least 1."
            )

    def cut(
        self, sequences: Sequences, team_has: list[tuple[int, int]] | None, rank: int
    ) -> tuple[Sequences, list[int]]:
        """The sequences of the minibatches one after the other, and how many go into each.

        By size, a sequence goes into the minibatch that its first row would be in, were minibatches of exactly that
        size. By count, or in a team, they are dealt like cards; see `dealt`.

        Args:
            sequences: Those of this learner.
            team_has: How many sequences each learner of a team has, and of how many rows; None: there is no team.
            rank: Of this learner in the team.
        """
        if self.size is not None and team_has is None:
            minibatch_of = (np.cumsum(sequences.lengths) - sequences.lengths) // self.size
            counts = np.bincount(minibatch_of)
            return sequences, counts[counts > 0].tolist()
        every = [(len(sequences.starts), 0)] if team_has is None else team_has
        owned = [number for number, _ in every]
        count = self.count
        if self.size is not None:
            count = min(sum(owned), -(-sum(rows for _, rows in every) // self.size))
        which, sizes = dealt(count or 0, owned, rank)
        return sequences.take(which), sizes


def minibatches(
    exp: Experience,
    split: Split,
    module: Module,
    device: torch.device,
    *,
    epochs: int = 1,
    sparse: int = 1,
    rng: np.random.Generator | None = None,
    team: Team | None = None,
) -> Iterator[Batch]:
    """Batches of the steps of ``exp``, lookback left out; for a recurrent module, of whole sequences.

    Args:
        exp: The experience.
        split: How many rows, or sequences, go into a minibatch.
        module: Whose observations, actions and states these are.
        device: Where batches go.
        epochs: How often each step comes.
        sparse: Of the steps, or sequences, only every so many come.
        rng: Shuffles each epoch; None keeps the order.
        team: The minibatches are of everyone's steps together. A batch has no rows where only others have some.
    """
    columns = exp.to(device).steps
    sequences = Sequences.cut(exp, split.max_seq_len, split.burn_in) if module.recurrent else Sequences.rows(exp)
    if sparse > 1:
        sequences = sequences.take(np.arange(0, len(sequences.starts), sparse))
    own = (len(sequences.starts), int(sequences.lengths.sum()))
    team_has, rank = (None, 0) if team is None else (team.gathered(own), team.rank)
    for _ in range(epochs):
        order = sequences if rng is None else sequences.take(rng.permutation(len(sequences.starts)))
        order, counts = split.cut(order, team_has, rank)
        yield from _batches(columns, order, counts, module, device, stored=split.start == "stored")


def batch_from(given: Mapping[str, Array] | Experience, module: Module, device: torch.device) -> Batch:
    """One batch of columns ``[B, ...]``, or of all steps of Experience.

    For a recurrent module, each segment of the Experience is a sequence. It begins with the state that was recorded for
    its first step, or with the initial state where none was; its lookback is walked through first, without gradients.

    Raises:
        ModuleError: the module is recurrent, and the columns are of single steps, which have no order in time.
    """
    if not module.recurrent:
        return Batch(as_tensors(given.trained_steps() if isinstance(given, Experience) else given, device), module)
    if not isinstance(given, Experience):
        raise ModuleError(
            f"{type(module.net).__name__} is recurrent, and can't learn from batches of single steps, which "
            "have no order in time. Take a network without a memory here, or give batches of Experience."
        )
    if not given.num_steps:
        return Batch({}, module, size=0)
    exp = given.select(given.lengths > given.segments.lookback).to(device)
    stored = all(f"{col.STATE_IN}{col.SEPARATOR}{name}" in exp.steps for name in module.initial_state())
    sequences = Sequences.whole(exp)
    counts = [len(sequences.starts)]
    (batch,) = _batches(exp.steps, sequences, counts, module, device, stored=stored, final_obs=exp.final_obs)
    return batch


def _batches(
    columns: Mapping[str, torch.Tensor],
    sequences: Sequences,
    counts: list[int],
    module: Module,
    device: torch.device,
    *,
    stored: bool,
    final_obs: dict[str, torch.Tensor] | None = None,
) -> Iterator[Batch]:
    """Batches of sequences in the order given, of ``counts[i]`` each; where that is 0, a batch without rows.

    Args:
        columns: The columns that ``sequences`` are rows of.
        sequences: The sequences of the batches, one after the other.
        counts: How many of them go into each batch.
        module: See `minibatches`.
        device: Where the columns are.
        stored: Sequences begin with their recorded states, else with the initial one.
        final_obs: Columns ``obs...`` ``[num, ...]``: what was observed after each sequence.

    Raises:
        DataError: the columns do not hold the module's state.
    """
    if not module.recurrent:
        rows = RowsInOrder(columns, sequences.starts, counts, device)
        for i, size in enumerate(counts):
            yield Batch(MinibatchColumns(rows, i), module, size=size)
        return
    starts, lengths, burn_in = sequences
    bounds = np.cumsum([0, *counts])
    sizes = _sums(lengths, bounds)
    rows = RowsInOrder(columns, ranges(starts, lengths), sizes, device)
    first = RowsInOrder(columns, starts - burn_in, counts, device)
    before = RowsInOrder(columns, ranges(starts - burn_in, burn_in), _sums(burn_in, bounds), device)
    for i, size in enumerate(sizes):
        if not size:
            yield Batch({}, module, size=0)
            continue
        own = slice(bounds[i], bounds[i + 1])
        if stored:
            state = module.state_from(MinibatchColumns(first, i))
        else:
            initial = module.initial_state().items()
            state = {name: torch.zeros(counts[i], *zeros.shape, device=device) for name, zeros in initial}
        walked: dict[str, torch.Tensor] = {}
        if burn_in[own].any():
            walked = {name: before.part(name, i) for name in col.under(columns, col.OBS)}
        padded = PaddedSequences(lengths[own], state, device, burn_in[own] if walked else None, walked, final_obs)
        yield Batch(MinibatchColumns(rows, i), module, padded, size)


def _sums(numbers: Index, bounds: Index) -> list[int]:
    """Of ``numbers[bounds[i]:bounds[i + 1]]``, each."""
    totals = np.append(0, np.cumsum(numbers))
    return np.diff(totals[bounds]).tolist()  # type: ignore[no-any-return]
