# SPDX-License-Identifier: Apache-2.0
"""Learners in several processes that make each gradient step together: splitting rows, averaging gradients."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from etude.errors import EngineError
from etude.experience.arrays import Index
from etude.learners.loss import Figures, Loss, numbers_of
from etude.learners.optim import FlatParameters, Optimizer

T = TypeVar("T")


class TeamLost(EngineError):
    """Another learner died, hangs or can't be reached, so that a joint operation can't be completed."""


class Team:
    """The processes of a `torch.distributed` process group, each with a learner of the same module.

    All processes must call each method in the same order; a call waits for the others.

    Args:
        group: The process group; None: the default group, which must have been set up.

    Raises:
        TeamLost: from each method, if another process is gone or does not join the call within the group's timeout.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        """Rank of this process, from 0."""
        self.size = dist.get_world_size(group)
        """The number of processes."""
        self._device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")

    def sum_(self, tensor: torch.Tensor) -> None:
        """Replace a tensor, in place, by the sum over all processes, which is bit for bit the same in each."""
        with _errors_named():
            dist.all_reduce(tensor, dist.ReduceOp.SUM, self._group)

    def sum_array_(self, array: NDArray[np.float64]) -> None:
        """Like `sum_`, for an array."""
        tensor = torch.from_numpy(array).to(self._device)
        self.sum_(tensor)
        array[...] = tensor.cpu().numpy()

    def total(self, number: int) -> int:
        """The sum of a number over all processes."""
        tensor = torch.tensor(number, dtype=torch.int64, device=self._device)
        self.sum_(tensor)
        return int(tensor.item())

    def gathered(self, thing: T) -> list[T]:
        """The ``thing`` of each process, plain data, by rank."""
        things: list[Any] = [None] * self.size
        with _errors_named():
            dist.all_gather_object(things, thing, self._group)
        return things

    def take_from(self, rank: int, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite tensors with those of process ``rank``."""
        for tensor in tensors:
            with _errors_named():
                dist.broadcast(tensor, group_src=rank, group=self._group)


@contextmanager
def _errors_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # the only type that the backends raise
        raise TeamLost(f"a learner could not reach the others: {str(error).strip().splitlines()[0]}") from error


def dealt(count: int, owned: Sequence[int], rank: int) -> tuple[Index, list[int]]:
    """Deal rows, like cards, into minibatches whose sizes differ by at most one.

    Args:
        count: Number of minibatches.
        owned: Number of rows, or sequences, of each rank. If they are fewer than the minibatches, they are reused.
        rank: The rank whose part is returned.

    Returns:
        The rank's own rows, counted from 0, in the order of minibatches, int64 ``[n]``; and how many go into each.
        There are no minibatches if no rank has a row.
    """
    total, first = sum(owned), sum(owned[:rank])
    if not total:
        return np.zeros(0, np.int64), []
    if total >= count:
        own = np.arange(owned[rank])
        return own, np.bincount((first + own) % count, minlength=count).tolist()
    places = np.arange(count)
    own = places % total - first
    places = places[(own >= 0) & (own < owned[rank])]
    return own[places], np.bincount(places, minlength=count).tolist()


# -- gradients ----------------------------------------------------------------------------------------------------


class TeamGradients:
    """Gradients of a learner in a team: their mean, weighted by rows, is the gradient of one learner with all rows.

    The gradients of all optimizers, and a few numbers, are summed in one call. They are in one block of memory, so that
    nothing is copied for this. The loss of each batch is multiplied by its weight, and the sums are divided by the sum
    of the weights.

    Args:
        team: The learners.
        optimizers: The optimizers whose gradients are averaged.
        accumulate: Number of batches whose mean gradient makes a step.
        device: The device of the module.
    """

    def __init__(self, team: Team, optimizers: Mapping[str, Optimizer], accumulate: int, device: torch.device) -> None:
        self._team, self._names, self._accumulate = team, list(optimizers), accumulate
        self._rows = 0
        numbers = 2 + len(self._names)
        main = (torch.float32, device)
        kinds: dict[tuple[torch.dtype, torch.device], list[FlatParameters]] = {main: []}
        for optimizer in optimizers.values():
            flat = optimizer.parameters
            kinds.setdefault((flat.grad.dtype, flat.grad.device), []).append(flat)
        self._blocks, self._grads = [], []
        for (dtype, where), members in kinds.items():
            sizes = [sum(grad.numel() for grad in member.grads) for member in members]
            size = sum(sizes)
            extra = numbers if (dtype, where) == main else 0
            block = torch.zeros(size + extra, dtype=dtype, device=where)
            for member, own in zip(members, torch.split(block[:size], sizes), strict=True):
                member.keep_grads_in(own)
            self._blocks.append(block)
            self._grads.append(block[:size])
        self._numbers = self._blocks[0][-numbers:]
        """The sum of weights, the sum of losses times weights, and for each optimizer whether it rests."""

    def begin(self) -> None:
        """Begin a step; the caller sets the gradients to 0."""
        self._numbers.zero_()
        self._rows = 0

    def weight(self, rows: int) -> float:
        """The factor of a batch's loss, given the rows that this learner has of it."""
        if self._accumulate == 1:
            return float(rows)  # divided by the team's number of rows in `average`
        together = self._team.total(rows)
        self._rows += together
        return rows / together if together else math.nan

    def add(self, loss: Loss | None, weight: float) -> None:
        """Add a batch's loss after its gradients; None if only others have rows of it."""
        if loss is None:
            self._numbers[2:] = 0.0
            return
        self._numbers[0] += weight
        self._numbers[1] += loss.total.detach() * weight
        for i, name in enumerate(self._names):
            self._numbers[2 + i] = float(name in loss.resting)

    def average(self) -> tuple[int, torch.Tensor, frozenset[str]]:
        """Replace the gradients by the team's mean. All learners of the team must call this.

        Returns:
            The number of rows in it, their mean loss (a scalar), and the optimizers that rest, according to the loss of
            the last batch.
        """
        for block in self._blocks:
            self._team.sum_(block)
        weight, loss, *rests = self._numbers.tolist()
        for grads in self._grads:
            grads.div_(weight)  # 0 if no learner had a row: not finite, like the mean loss of no rows
        rows = self._rows if self._accumulate > 1 else round(weight) if math.isfinite(weight) else 0
        mean = torch.tensor(loss / weight if weight else math.nan, device=self._blocks[0].device)
        return rows, mean, frozenset(n for n, rest in zip(self._names, rests, strict=True) if rest)


# -- what is reported ---------------------------------------------------------------------------------------------


class BatchResult(NamedTuple):
    """A learner's result from one batch."""

    rows: int
    """Rows that this learner had of the batch."""
    losses: Figures
    """Parts of the loss; {} without rows."""
    metrics: Figures
    """Logged figures; without rows, none from the loss."""


def move_to_host(results: Sequence[BatchResult]) -> None:
    """Replace the tensors in results by Python numbers, all moved in one go."""
    every: list[Figures] = []
    values: list[Any] = []
    for result in results:
        every += (result.losses, result.metrics)
        values += (*result.losses.values(), *result.metrics.values())
    numbers = iter(numbers_of(values))
    for figures in every:
        for name in figures:
            figures[name] = next(numbers)


def results_of_all(
    team: Team, names: list[str], results: list[BatchResult]
) -> tuple[list[str], list[BatchResult], list[int]]:
    """Join the results that the learners of a team got from the batches of an update.

    Args:
        team: The learners.
        names: The parts of the loss that this learner has computed.
        results: Its results, in numbers, of the same batches for each learner.

    Returns:
        The names of all learners; the result of each batch, averaged over all rows; the number of rows of each rank.
    """
    every = team.gathered((names, results))
    joined = [
        BatchResult(
            sum(result.rows for result in of_batch),
            _mean_by_rows([(result.rows, result.losses) for result in of_batch]),
            _mean_by_rows([(result.rows, result.metrics) for result in of_batch]),
        )
        for of_batch in zip(*(theirs for _, theirs in every), strict=True)
    ]
    rows = [sum(result.rows for result in theirs) for _, theirs in every]
    return [name for theirs, _ in every for name in theirs], joined, rows


def _mean_by_rows(weighed: Sequence[tuple[int, Figures]]) -> Figures:
    sums: dict[str, list[float]] = {}
    for rows, figures in weighed:
        for name, value in figures.items() if rows else ():
            total = sums.setdefault(name, [0.0, 0.0])
            total[0] += rows * value
            total[1] += rows
    return {name: total / rows for name, (total, rows) in sums.items()}


def blamed(team: Team, message: str, parts: Figures) -> str:
    """One of the team's messages, the same for all: that of the first learner whose own loss is not finite."""
    is_to_blame = any(not part.isfinite().all() for part in parts.values())
    found = team.gathered((is_to_blame, bool(parts), message))
    return max(found, key=lambda one: one[:2])[2]
