# SPDX-License-Identifier: Apache-2.0
"""Team: learners in several processes that make each gradient step together."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from etude.errors import EngineError

T = TypeVar("T")


class TeamLost(EngineError):
    """Another learner died, hangs or can't be reached: what was begun together can't be ended."""


class Team:
    """The processes of a `torch.distributed` process group, each with a learner of the same module.

    Everything here is done by all of them, in the same order; it waits for the others.

    Args:
        group: Which processes; None: all that the default group has. It must have been set up.

    Raises:
        TeamLost: from each method: another process is gone, or did not come within the group's timeout.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        """Which of them this process is, from 0 on."""
        self.size = dist.get_world_size(group)
        """How many there are."""
        self._device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")

    def sum_(self, tensor: torch.Tensor) -> None:
        """Make a tensor, in place, the sum of those that all have: the same numbers everywhere, to the bit."""
        with _said():
            dist.all_reduce(tensor, dist.ReduceOp.SUM, self._group)

    def sum_array_(self, array: NDArray[np.float64]) -> None:
        """As `sum_`, of an array."""
        tensor = torch.from_numpy(array).to(self._device)
        self.sum_(tensor)
        array[...] = tensor.cpu().numpy()

    def total(self, number: int) -> int:
        """The sum of everyone's number."""
        tensor = torch.tensor(number, dtype=torch.int64, device=self._device)
        self.sum_(tensor)
        return int(tensor.item())

    def gathered(self, thing: T) -> list[T]:
        """What everyone has, by rank: plain data."""
        things: list[Any] = [None] * self.size
        with _said():
            dist.all_gather_object(things, thing, self._group)
        return things

    def take_from(self, rank: int, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite tensors with those of one of the processes."""
        for tensor in tensors:
            with _said():
                dist.broadcast(tensor, group_src=rank, group=self._group)


@contextmanager
def _said() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # all that the backends raise
        raise TeamLost(f"a learner waited for the others in vain: {str(error).strip().splitlines()[0]}") from error
