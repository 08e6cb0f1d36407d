# SPDX-License-Identifier: Apache-2.0
"""LearnerGroup: learners that start together and end together."""

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

_GRACE = 5.0  # seconds to wait for the error of the learner that failed first


class LearnerLost(Exception):
    """A learner died or hung, so that none of them can go on."""


class LearnerGroup:
    """Learners in one placement group of Ray and one process group of torch.

    Args:
        settings: The number of learners and their resources.
        arguments: The arguments of each `LearnerActor` after its rank.

    Raises:
        LearnerLost: a learner died meanwhile.
        Exception: raised while a replica of the algorithm was created.
    """

    def __init__(self, settings: Ray, arguments: Sequence[Any]) -> None:
        self._actors: list[Any] = []
        size, timeout = settings.num_learners, settings.learner_timeout
        resources = {"CPU": settings.cpus_per_learner, "GPU": settings.gpus_per_learner}
        bundle = {name: amount for name, amount in resources.items() if amount > 0}
        # Tune's trials already have a placement group with room for their learners, where Ray places them.
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
            """The ids of the learners' nodes."""
            self.pids = [pid for _, pid in built]
            """The ids of the learners' processes."""
            if size > 1:
                (address,) = self.wait([self._actors[0].serve.remote(size, timeout)], timeout)
                self.call("join", address, size, _backend(settings), timeout, timeout=timeout + _GRACE)
        except BaseException:
            self.end()
            raise

    def begin(self, method: str, *common: Any, own: Sequence[Any] | None = None) -> list[Any]:
        """Call a method of each learner without waiting; return references to the results.

        Args:
            method: The name of a method of `LearnerActor`.
            common: Arguments for all learners.
            own: A first argument for each learner, before the common ones.
        """
        given = [()] * len(self._actors) if own is None else [(one,) for one in own]
        return [getattr(actor, method).remote(*mine, *common) for actor, mine in zip(self._actors, given, strict=True)]

    def call(
        self, method: str, *common: Any, own: Sequence[Any] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Call `begin`, and `wait` for the results."""
        return self.wait(self.begin(method, *common, own=own), timeout)

    def state(self) -> Any:
        """A reference to the first learner's state after the calls so far; all learners have the same state."""
        return self._actors[0].state.remote()

    def wait(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        """The results, in the order of the calls.

        Args:
            refs: References to the results of all learners, by rank; then possibly further ones of the first.
            timeout: The longest wait in seconds; None: no limit.

        Raises:
            LearnerLost: a learner died, or did not answer in time.
            Exception: raised by a learner; a note says where.
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
        """The best known reason for a loss: that of the learner that died, not of those that waited for it."""
        cause = cause_of(error)
        if was_lost(cause):
            return cause
        if isinstance(cause, TeamLost | torch.distributed.DistError):
            return known or cause
        self.end()  # the others are waiting for it
        raise_from(error, f"learner {rank if rank < len(self._actors) else 0}")

    def end(self) -> None:
        """End all learners at once."""
        for actor in self._actors:
            ray.kill(actor)
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None


def _backend(settings: Ray) -> str:
    """NCCL needs a GPU for each learner alone."""
    if settings.backend != "auto":
        return settings.backend
    return "nccl" if settings.gpus_per_learner >= 1 else "gloo"
