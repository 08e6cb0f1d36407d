# SPDX-License-Identifier: Apache-2.0
"""LearnerGroup: learners that were started together, and end together."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, NamedTuple, NoReturn, TypeVar

import ray
import torch.distributed
from ray.exceptions import RayError
from ray.train._internal.worker_group import WorkerGroup
from ray.train.torch import TorchConfig

from etude.algorithms.ray_config import Ray
from etude.learners.distributed import TeamLost
from etude.ray.faults import cause_of, first_line, raise_from, was_lost
from etude.ray.learner_actor import LearnerActor
from etude.ray.start import room

_log = logging.getLogger("etude.ray")
T = TypeVar("T")

_GRACE = 5.0  # seconds in which those that waited for a learner in vain may hear why


class LearnerLost(Exception):
    """One of the learners died or hangs, so that none of them can go on."""


class Learned(NamedTuple):
    """What came of it when learners learned."""

    answers: list[Any]
    """Of each."""
    weights_ref: Any
    """Of the new weights: this process owns them, so that they outlive the learners."""
    weights: dict[str, Any]
    """See `LearnerActor.weights`."""
    rest: dict[str, Any]
    """See `LearnerActor.rest`."""


class Asked(NamedTuple):
    """References to what `Learned` holds."""

    answers: list[Any]
    weights: Any
    rest: Any


class LearnerGroup:
    """Learners of one process group.

    The group is set up by Ray Train's own means, its `WorkerGroup` and the backend of its `TorchConfig`, as RLlib's
    learners are: it finds a free port at the first of them, sets what a backend needs in each, and joins them with a
    timeout. A `Trainer` would be the public way there, but it wants the whole loop of training to be a function that it
    calls; the backend needs no more than a group of workers. That ours is a `WorkerGroup` and not a class of our own
    matters: with others, the backend asks for a context of `Trainer` that is not there.

    Args:
        settings: How many, with which resources.
        arguments: Of each `LearnerActor`.

    Raises:
        LearnerLost: one died meanwhile.
        Exception: what was raised while the algorithm was made there.
    """

    def __init__(self, settings: Ray, arguments: Sequence[Any]) -> None:
        self._settings = settings
        resources = {"CPU": settings.cpus_per_learner, "GPU": settings.gpus_per_learner}
        self._size = settings.num_learners
        self._workers: Any = None
        try:
            with _told_if_long(settings.sample_timeout):
                self._workers = self._guarded(
                    lambda: WorkerGroup(settings.num_learners, resources, LearnerActor, tuple(arguments))
                )
            self.call("build", timeout=settings.learner_timeout)
            if self._size > 1:
                config = TorchConfig(_backend(settings), "tcp", max(1, round(settings.learner_timeout)))
                self._guarded(lambda: config.backend_cls().on_start(self._workers, config))
                self.call("join", timeout=settings.learner_timeout)
        except BaseException:
            self.end()
            raise

    @property
    def nodes(self) -> list[str]:
        """The ids of the nodes that they are on."""
        return [worker.metadata.node_id for worker in self._workers.workers]

    @property
    def pids(self) -> list[int]:
        """Their processes."""
        return [worker.metadata.pid for worker in self._workers.workers]

    def call(
        self, method: str, *common: Any, own: Sequence[Any] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Ask all for the same, and wait for their answers.

        Args:
            method: Of `LearnerActor`.
            common: Arguments for all.
            own: A first argument for each, before these.
            timeout: Seconds, at most; None waits.

        Raises:
            LearnerLost: one died, or did not answer in time.
            Exception: what was raised there, with a note of where.
        """
        given = [()] * self._size if own is None else [(one,) for one in own]
        return self.wait([self._method(rank, method, *mine, *common) for rank, mine in enumerate(given)], timeout)

    def learn(
        self, method: str, *common: Any, own: Sequence[Any] | None = None, timeout: float | None = None
    ) -> Learned:
        """As `call` of a method by which they learn, and what they know then: all the same, so that one is asked."""
        return self.learned(self.begin(method, *common, own=own), timeout)

    def begin(self, method: str, *common: Any, own: Sequence[Any] | None = None) -> Asked:
        """As `learn`, without waiting: see `learned`."""
        given = [()] * self._size if own is None else [(one,) for one in own]
        answers = [self._method(rank, method, *mine, *common) for rank, mine in enumerate(given)]
        return Asked(answers, self._method(0, "weights"), self._method(0, "rest"))

    def learned(self, asked: Asked, timeout: float | None = None) -> Learned:
        """What comes of what was begun; waits for it."""
        *answers, weights, rest = self.wait([*asked.answers, asked.weights, asked.rest], timeout)
        return Learned(answers, asked.weights, weights, rest)

    def _method(self, rank: int, method: str, *arguments: Any) -> Any:
        return getattr(self._workers.workers[rank].actor, method).remote(*arguments)

    def wait(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        """The answers of all, in the order asked; see `call`."""
        rank_of = {ref: rank for rank, ref in enumerate(refs)}
        end = None if timeout is None else monotonic() + timeout
        answers: dict[int, Any] = {}
        lost: BaseException | None = None
        while left := [ref for ref, rank in rank_of.items() if rank not in answers]:
            ready, _ = ray.wait(left, num_returns=1, timeout=None if end is None else max(0.0, end - monotonic()))
            if not ready:
                raise LearnerLost(first_line(lost) if lost else f"no answer within {timeout:g} s") from lost
            rank = rank_of[ready[0]]
            try:
                answers[rank] = ray.get(ready[0])
            except RayError as error:
                lost = self._why(error, rank, lost)
                answers[rank] = None
                end = min(end or monotonic() + _GRACE, monotonic() + _GRACE)
        if lost is not None:
            raise LearnerLost(first_line(lost)) from lost
        return [answers[rank] for rank in range(len(refs))]

    def _why(self, error: RayError, rank: int, known: BaseException | None) -> BaseException:
        """What tells most about a loss: of the one that died, not of those that waited for it. Raises what is none."""
        cause = cause_of(error)
        if was_lost(cause):
            return cause
        if isinstance(cause, TeamLost | torch.distributed.DistError):
            return known or cause
        self._fail(error, f"learner {rank if rank < self._size else 0}")

    def _guarded(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except RayError as error:
            raise LearnerLost(first_line(self._why(error, 0, None))) from error

    def _fail(self, error: RayError, where: str) -> NoReturn:
        self.end()  # the others wait for it
        raise_from(error, where)

    def end(self) -> None:
        """End them all, whatever they are doing."""
        if self._workers is not None:
            self._workers.shutdown(patience_s=0)


@contextmanager
def _told_if_long(seconds: float) -> Iterator[None]:
    """Say what is free in the cluster where learners find no room for so long."""
    timer = threading.Timer(seconds, lambda: _log.warning("no learners yet after %g s. %s", seconds, room()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _backend(settings: Ray) -> str:
    """NCCL wants a GPU for each of them alone."""
    if settings.backend != "auto":
        return settings.backend
    return "nccl" if settings.gpus_per_learner >= 1 else "gloo"
