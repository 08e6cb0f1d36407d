# SPDX-License-Identifier: Apache-2.0
"""Actors that prepare parts; and connectors in them that ask a copy of the module, which takes new weights."""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import ray
import torch

from etude.connectors import Connector
from etude.errors import EtudeError
from etude.experience import Experience
from etude.modules import Module
from etude.modules.module import load_weights
from etude.ray.data_blocks import Loaded, failed, to_block
from etude.ray.data_source import Shared
from etude.recordings.layers import CONNECTORS
from etude.recordings.pipeline import Job

_COLUMN: Final = "module_updates"
"""The step column with how many gradient steps had made the copy of the module."""


@ray.remote(num_cpus=0, max_restarts=-1)
class Board:
    """Where the newest weights are known; never the weights themselves.

    One that is lost is made anew by Ray, and knows the next weights that are put.
    """

    def __init__(self) -> None:
        self._updates = -1
        self._where: list[Any] = []

    def put(self, updates: int, where: list[Any]) -> None:
        """There are weights of after so many updates."""
        if updates > self._updates:
            self._updates, self._where = updates, where

    def newer(self, updates: int) -> tuple[int, list[Any]] | None:
        """The newest, if they are of later than after so many updates."""
        return (self._updates, self._where) if self._updates > updates else None


@dataclasses.dataclass
class Asking:
    """Connectors that ask a copy of the module.

    Args:
        module: As it is now.
        connectors: The first asks it.
        updates: How many gradient steps have made it.
    """

    module: Module
    connectors: Sequence[Connector]
    updates: int

    def begin(self, board: Any) -> None:
        """In the process that works, with a board on which newer weights will be known."""
        self._board = board
        self.module.to("cuda" if torch.cuda.is_available() and ray.get_gpu_ids() else "cpu").eval()
        self._answer: Any = None
        self._coming: tuple[int, Any] | None = None

    def __call__(self, exp: Experience) -> Experience:
        """What they make of it; with newer weights, if these are there already. Waits for none."""
        self._look()
        for connector in self.connectors:
            exp = connector.offline(exp, self.module)
        return exp.with_steps(**{_COLUMN: np.full(exp.num_steps, self.updates)})

    def _look(self) -> None:
        """Ask for newer weights; and take what has come of questions before."""
        if self._coming is not None:
            updates, where = self._coming
            if ray.wait([where], timeout=0)[0]:
                self._coming = None
                weights = _found(where)
                if weights is not None:
                    load_weights(self.module, {name: torch.from_numpy(np.array(w)) for name, w in weights.items()})
                    self.updates = updates
        elif self._answer is not None and ray.wait([self._answer], timeout=0)[0]:
            answer, self._answer = _found(self._answer), None
            if answer is not None:
                self._coming = (answer[0], answer[1][0])
        if self._answer is None and self._coming is None:
            self._answer = self._board.newer.remote(self.updates)


def _found(ref: Any) -> Any:
    """What a reference stands for; None where it was lost with the learner that had put it: newer ones will come."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayError:
        return None


class Worker:
    """Prepares the parts of which it is given the numbers. Ray Data makes them, as actors.

    Args:
        job: What is done with a part.
        asking: Then, if this is given, with a board.
        board: See `Board`.
    """

    def __init__(self, job: Shared[Job], asking: Shared[Asking] | None = None, board: Any = None) -> None:
        self._asking: Asking | None = None
        self._job: Job | None = None
        try:
            self._job = job.get()
            if asking is not None:
                self._asking = asking.get()
                self._asking.begin(board)
        except EtudeError as error:  # of what fails here, Ray would start one actor after the other
            self._job, self._error = None, error

    def __call__(self, numbers: pa.Table) -> pa.Table:
        """The block of these parts; or the error that they end in."""
        if self._job is None:
            return failed(self._error)
        try:
            return to_block([self._loaded(self._job, k) for k in numbers["part"].to_pylist()])
        except EtudeError as error:
            return failed(error)

    def _loaded(self, job: Job, k: int) -> Loaded:
        made, spent = job(k)
        if made is None or self._asking is None or not len(made):
            return Loaded(made, spent)
        with spent.on(CONNECTORS):
            return Loaded(self._asking(made), spent)


class Publisher:
    """At the learner: puts its weights every so many gradient steps, and says so on the board. Waits for nobody.

    Args:
        learner: Whose module it is.
        board: See `Board`.
        period: Gradient steps from one time to the next.
        publishes: Of several learners, whose weights are the same, one does.
    """

    def __init__(self, learner: Any, board: Any, period: int, *, publishes: bool = True) -> None:
        self._learner, self._board, self._period, self._publishes = learner, board, period, publishes
        self._last: int = learner.updates
        self._thread: threading.Thread | None = None
        self._behind: list[float] = []
        self._newest: Any = None

    def arrived(self, batch: Any) -> Any:
        """See `etude.algorithms.feed.Elsewhere`."""
        steps = dict(batch.steps if isinstance(batch, Experience) else batch)
        self._behind.append(float(self._learner.updates - np.asarray(steps.pop(_COLUMN)).mean()))
        return steps

    def learned(self) -> None:
        """Put the weights, if it is time to, and the last are on their way."""
        updates = int(self._learner.updates)
        is_busy = self._thread is not None and self._thread.is_alive()
        if not self._publishes or is_busy or updates - self._last < self._period:
            return
        self._last = updates
        state = self._learner.module.state_dict()
        weights = {name: tensor.detach().cpu().numpy().copy() for name, tensor in state.items()}
        self._thread = threading.Thread(target=self._put, args=(updates, weights), name="etude-weights", daemon=True)
        self._thread.start()

    def _put(self, updates: int, weights: dict[str, Any]) -> None:
        self._newest = ray.put(weights)  # kept: whoever put an object must be there as long as others need it
        self._board.put.remote(updates, [self._newest])

    def staleness(self) -> list[float]:
        """See `etude.algorithms.feed.Elsewhere`."""
        behind, self._behind = self._behind, []
        return behind
