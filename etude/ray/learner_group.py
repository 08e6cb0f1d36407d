# SPDX-License-Identifier: Apache-2.0
"""LearnerGroup: learners that were started together, and end together."""

import logging
from collections.abc import Sequence
from time import monotonic
from typing import Any

import ray
import torch.distributed
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from etude.algorithms.ray_config import Ray
from etude.learners.distributed import TeamLost
from etude.ray.faults import cause_of, first_line, raise_from, was_lost
from etude.ray.learner_actor import LearnerActor
from etude.ray.start import room

_log = logging.getLogger("etude.ray")

_GRACE = 5.0  # seconds in which those that waited for a learner in vain may hear why


class LearnerLost(Exception):
    """One of the learners died or hangs, so that none of them can go on."""


class LearnerGroup:
    """Learners in one placement group of Ray and one process group of torch.

    Args:
        settings: How many, with which resources.
        arguments: Of each `LearnerActor`, after its rank.

    Raises:
        LearnerLost: one died meanwhile.
        Exception: what was raised while the algorithm was made there.
    """

    def __init__(self, settings: Ray, arguments: Sequence[Any]) -> None:
        self._actors: list[Any] = []
        size, timeout = settings.num_learners, settings.learner_timeout
        resources = {"CPU": settings.cpus_per_learner, "GPU": settings.gpus_per_learner}
        bundle = {name: amount for name, amount in resources.items() if amount > 0}
        # Tune's trials have a placement group already, with room for their learners, which Ray places there.
        is_placed = not bundle or get_current_placement_group() is not None
        self._placement = None if is_placed else placement_group([bundle] * size)
        try:
            while self._placement is not None and not self._placement.wait(settings.sample_timeout):
                _log.warning("no learners yet after %g s. %s", settings.sample_timeout, room())
            for rank in range(size):
                strategy = (
                    "DEFAULT"
                    if self._placement is None
                    else PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=rank)
                )
                options = {"num_cpus": resources["CPU"], "num_gpus": resources["GPU"], "scheduling_strategy": strategy}
                self._actors.append(ray.remote(LearnerActor).options(**options).remote(rank, *arguments))
            built = self.call("build", timeout=timeout)
            self.nodes = [node for node, _ in built]
            """The ids of the nodes that they are on."""
            self.pids = [pid for _, pid in built]
            """Their processes."""
            if size > 1:
                (address,) = self.wait([self._actors[0].serve.remote(size, timeout)], timeout)
                self.call("join", address, size, _backend(settings), timeout, timeout=timeout + _GRACE)
        except BaseException:
            self.end()
            raise

    def begin(self, method: str, *common: Any, own: Sequence[Any] | None = None) -> list[Any]:
        """Call a method of each learner, without waiting; gives references to the answers.

        Args:
            method: Of `LearnerActor`.
            common: Arguments for all.
            own: A first argument for each, before these.
        """
        given = [()] * len(self._actors) if own is None else [(one,) for one in own]
        return [getattr(actor, method).remote(*mine, *common) for actor, mine in zip(self._actors, given, strict=True)]

    def call(
        self, method: str, *common: Any, own: Sequence[Any] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """As `begin`, and `wait` for the answers."""
        return self.wait(self.begin(method, *common, own=own), timeout)

    def state(self) -> Any:
        """A reference to the state of the first learner, as it will be after what was begun: all have the same."""
        return self._actors[0].state.remote()

    def wait(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        """The answers, in the order of the calls.

        Args:
            refs: Of the answers of the learners, by rank; then perhaps others of the first.
            timeout: Seconds, at most; None waits.

        Raises:
            LearnerLost: one died, or did not answer in time.
            Exception: what was raised there, with a note of where.
        """
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
                lost = self._reason(error, rank, lost)
                answers[rank] = None
                end = min(end or monotonic() + _GRACE, monotonic() + _GRACE)
        if lost is not None:
            raise LearnerLost(first_line(lost)) from lost
        return [answers[rank] for rank in range(len(refs))]

    def _reason(self, error: RayError, rank: int, known: BaseException | None) -> BaseException:
        """The best known reason of a loss: of the learner that died, rather than of those that waited for it."""
        cause = cause_of(error)
        if was_lost(cause):
            return cause
        if isinstance(cause, TeamLost | torch.distributed.DistError):
            return known or cause
        self.end()  # the others wait for it
        raise_from(error, f"learner {rank if rank < len(self._actors) else 0}")

    def end(self) -> None:
        """End them all, whatever they are doing."""
        for actor in self._actors:
            ray.kill(actor)
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None


def _backend(settings: Ray) -> str:
    """NCCL wants a GPU for each of them alone."""
    if settings.backend != "auto":
        return settings.backend
    return "nccl" if settings.gpus_per_learner >= 1 else "gloo"
