# SPDX-License-Identifier: Apache-2.0
"""Minibatches of Experience: of rows, or of whole sequences for recurrent modules; for one learner or for a team."""

from collections.abc import Iterator, Mapping
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
    """Pieces of segments, as consecutive rows. Without a recurrent module, each row is a sequence."""

    starts: Index
    """First row of each, int64 ``[num]``."""
    lengths: Index
    """Rows of each, at least 1, int64 ``[num]``."""
    burn_in: Index
    """Rows before each that are processed first, without gradients, int64 ``[num]``."""

    @classmethod
    def rows(cls, exp: Experience) -> "Sequences":
        """The steps of ``exp`` as single rows, without lookback."""
        starts = np.flatnonzero(exp.trained())
        return cls(starts, np.ones_like(starts), np.zeros_like(starts))

    @classmethod
    def cut(cls, exp: Experience, max_len: int, burn_in: int = 0, context: int = 0) -> "Sequences":
        """The steps of ``exp`` in sequences of at most ``max_len``, from the first step of each segment.

        Lookback is used only for burn-in, as the state at the first step after it was recorded. If connectors need
        ``context`` earlier steps, the first of a segment that continues an episode are left out there, too: what
        connectors made of them is not what the module saw.
        """
        begin = exp.offsets[:-1] + exp.segments.lookback
        total = exp.offsets[1:] - begin
        pieces = -(-total // max_len)
        nth = ranges(np.zeros(len(pieces), np.int64), pieces)
        starts = np.repeat(begin, pieces) + nth * max_len
        lengths = np.minimum(max_len, np.repeat(begin + total, pieces) - starts)
        unseen = np.where(exp.segments.t_start > 0, np.minimum(context, exp.segments.lookback), 0)
        return cls(starts, lengths, np.minimum(burn_in, starts - np.repeat(exp.offsets[:-1] + unseen, pieces)))

    @classmethod
    def whole(cls, exp: Experience) -> "Sequences":
        """The segments of ``exp`` as whole sequences, with their lookback as burn-in."""
        lookback = exp.segments.lookback
        return cls(exp.offsets[:-1] + lookback, exp.lengths - lookback, lookback)

    def take(self, which: Index) -> "Sequences":
        """The sequences at these indices, in this order."""
        return Sequences(self.starts[which], self.lengths[which], self.burn_in[which])


def minibatches(
    exp: Experience,
    module: Module,
    device: torch.device,
    *,
    minibatch_size: int | None = None,
    num_minibatches: int | None = None,
    epochs: int = 1,
    rng: np.random.Generator | None = None,
    sparse: int = 1,
    max_seq_len: int = 32,
    burn_in: int = 0,
    context: int = 0,
    sequence_start: Literal["stored", "zeros"] = "stored",
    team: Team | None = None,
) -> Iterator[Batch]:
    """Batches of the steps of ``exp``, without lookback; for a recurrent module, of whole sequences.

    A sequence goes into the minibatch that its first row would be in if minibatches had exactly ``minibatch_size``
    rows. If their number is given, or in a team, sequences are dealt like cards; see `dealt`.

    Args:
        exp: The experience.
        module: The module to which observations, actions and states belong.
        device: The device of the batches.
        minibatch_size: Approximate number of rows in a minibatch. Give this or ``num_minibatches``.
        num_minibatches: Number of minibatches in an epoch.
        epochs: Number of passes over the steps.
        rng: Shuffles each epoch; None keeps the order.
        sparse: Use only every ``sparse``-th step or sequence.
        max_seq_len: See `ModuleLearner.update`, as for the next two.
        burn_in: Steps before each sequence.
        context: See `Sequences.cut`.
        sequence_start: State with which a sequence begins.
        team: Minibatches are formed of the steps of the whole team. A batch is empty if only others have rows of it.

    Raises:
        SettingsError: both or neither of ``minibatch_size`` and ``num_minibatches`` is given, or it is below 1.
    """
    if (minibatch_size is None) == (num_minibatches is None) or (minibatch_size or num_minibatches or 0) < 1:
        raise SettingsError(
            f"minibatch_size is {minibatch_size} and num_minibatches {num_minibatches}: give one of them, at least 1."
        )
    columns = as_tensors(exp.steps, device)
    sequences = Sequences.cut(exp, max_seq_len, burn_in, context) if module.recurrent else Sequences.rows(exp)
    if sparse > 1:
        sequences = sequences.take(np.arange(0, len(sequences.starts), sparse))
    num_rows = int(sequences.lengths.sum())
    owned, rank = [len(sequences.starts)], 0
    if team is not None:
        every = team.gathered((len(sequences.starts), num_rows))
        owned, num_rows, rank = [number for number, _ in every], sum(rows for _, rows in every), team.rank
    for _ in range(epochs):
        order = sequences if rng is None else sequences.take(rng.permutation(len(sequences.starts)))
        if minibatch_size is not None and team is None:
            counts = np.bincount((np.cumsum(order.lengths) - order.lengths) // minibatch_size)
            sizes = counts[counts > 0].tolist()
        else:
            count = num_minibatches or min(sum(owned), -(-num_rows // minibatch_size))  # type: ignore[operator]
            which, sizes = dealt(count, owned, rank)
            order = order.take(which)
        yield from _batches(columns, order, sizes, module, device, stored=sequence_start == "stored")


def batch_from(given: Mapping[str, Array] | Experience, module: Module, device: torch.device) -> Batch:
    """One batch of columns ``[B, ...]``, or of all steps of Experience.

    For a recurrent module, each segment of the Experience is a sequence. It begins with the state that was recorded for
    its first step, or with the initial state if none was. Its lookback is processed first, without gradients.

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
    exp = given.select(given.lengths > given.segments.lookback)
    columns, final_obs = as_tensors(exp.steps, device), as_tensors(exp.final_obs, device)
    stored = all(f"{col.STATE_IN}{col.SEPARATOR}{name}" in exp.steps for name in module.initial_state())
    sequences = Sequences.whole(exp)
    counts = [len(sequences.starts)]
    (batch,) = _batches(columns, sequences, counts, module, device, stored=stored, final_obs=final_obs)
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
    """Batches of sequences in the given order, ``counts[i]`` in each; a count of 0 gives a batch without rows.

    Args:
        columns: The columns that the sequences' rows refer to.
        sequences: The sequences of all batches, one after the other.
        counts: Number of sequences in each batch.
        module: See `minibatches`.
        device: The device of the columns.
        stored: Whether sequences begin with their recorded states or with the initial one.
        final_obs: Columns ``obs...`` ``[num, ...]``: the observation after each sequence.

    Raises:
        DataError: the columns do not hold the module's state.
    """
    if not module.recurrent:
        rows = RowsInOrder(columns, torch.from_numpy(sequences.starts).to(device), counts)
        for i, size in enumerate(counts):
            yield Batch(MinibatchColumns(rows, i), module, size=size)
        return
    starts, lengths, burn_in = sequences
    bounds = np.cumsum([0, *counts])
    sizes = _sums(lengths, bounds)
    rows = RowsInOrder(columns, torch.from_numpy(ranges(starts, lengths)).to(device), sizes)
    first = RowsInOrder(columns, torch.from_numpy(starts - burn_in).to(device), counts)
    burned_rows = torch.from_numpy(ranges(starts - burn_in, burn_in)).to(device)
    before = RowsInOrder(columns, burned_rows, _sums(burn_in, bounds))
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
            burned = MinibatchColumns(before, i)
            walked = {name: burned[name] for name in col.under(columns, col.OBS)}
        padded = PaddedSequences(lengths[own], state, device, burn_in[own] if walked else None, walked, final_obs)
        yield Batch(MinibatchColumns(rows, i), module, padded, size)


def _sums(numbers: Index, bounds: Index) -> list[int]:
    """The sums of ``numbers[bounds[i]:bounds[i + 1]]``, for all i."""
    totals = np.append(0, np.cumsum(numbers))
    return np.diff(totals[bounds]).tolist()  # type: ignore[no-any-return]
