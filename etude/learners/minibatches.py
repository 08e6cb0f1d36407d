# SPDX-License-Identifier: Apache-2.0
"""Minibatches of Experience, for one learner or for a team that agrees on how many there are."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from etude.errors import ModuleError
from etude.experience import Experience
from etude.experience.arrays import Array, Index
from etude.learners.batch import Batch, MinibatchColumns, Shuffled, as_tensors
from etude.learners.sequences import Sequences, batch_of, cut_by, sequence_batches
from etude.learners.splits import SequenceRule, Split, dealt
from etude.learners.team import Team
from etude.modules import Module


class Going(NamedTuple):
    """How experience is gone over."""

    split: Split
    sequences: SequenceRule
    epochs: int = 1
    sparse: int = 1
    """Of the steps, or sequences, only every so many."""
    rng: np.random.Generator | None = None
    """Shuffles each epoch; None: everything is in order."""
    team: Team | None = None
    """Whose minibatches, of everyone's steps together, these are parts of."""


def minibatches(exp: Experience, going: Going, module: Module, device: torch.device) -> Iterator[Batch]:
    """Batches of the steps of ``exp``, lookback left out; without rows, where only others of the team have some."""
    columns = exp.to(device).steps
    if module.recurrent:
        yield from _of_sequences(exp, columns, going, module, device)
        return
    rows = np.flatnonzero(exp.trained())[:: going.sparse]
    if going.team is None:
        sizes = going.split.sizes(len(rows))
        which = going.split.filled(np.arange(len(rows)))
    else:
        which, sizes = _dealt(going.split, len(rows), len(rows), going.team)
    for _ in range(going.epochs):
        order = rows if going.rng is None else going.rng.permutation(rows)
        epoch = Shuffled(columns, torch.from_numpy(order[which]).to(device), sizes)
        for i, size in enumerate(sizes):
            yield Batch(MinibatchColumns(epoch, i), module, size=size)


def _of_sequences(
    exp: Experience, columns: Mapping[str, torch.Tensor], going: Going, module: Module, device: torch.device
) -> Iterator[Batch]:
    rule = going.sequences
    sequences = Sequences.of(exp, rule)
    sequences = sequences.take(np.arange(0, len(sequences.starts), going.sparse))
    deal = None
    if going.team is not None:
        deal = _dealt(going.split, len(sequences.starts), int(sequences.lengths.sum()), going.team)
    for _ in range(going.epochs):
        order = sequences if going.rng is None else sequences.shuffled(going.rng)
        order, counts = cut_by(going.split, order) if deal is None else (order.take(deal[0]), deal[1])
        yield from sequence_batches(columns, order, counts, rule, module, device)


def _dealt(split: Split, items: int, steps: int, team: Team) -> tuple[Index, list[int]]:
    """Which of its rows, or sequences, this learner puts into the minibatches of its team, and how many into each."""
    every = team.gathered((items, steps))
    owned = [number for number, _ in every]
    count = split.count
    if count is None:
        assert split.size is not None
        count = min(sum(owned), -(-sum(number for _, number in every) // split.size))
    return dealt(count, owned, team.rank) if sum(owned) else (np.zeros(0, np.int64), [])


def batch_from(given: Mapping[str, Array] | Experience, module: Module, device: torch.device) -> Batch:
    """A batch of columns ``[B, ...]``; for a recurrent module, of the segments of Experience.

    Raises:
        ModuleError: the module is recurrent, and the columns are of single steps, which have no order in time.
    """
    if isinstance(given, Experience):
        if module.recurrent:
            return batch_of(given, module, device) if given.num_steps else Batch({}, module, size=0)
        given = given.trained_steps()
    if module.recurrent:
        raise ModuleError(
            f"{type(module.net).__name__} is recurrent, and can't learn from batches of single steps, which "
            "have no order in time. Take a network without a memory here, or give batches of Experience."
        )
    return Batch(as_tensors(given, device), module)
