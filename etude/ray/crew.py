# SPDX-License-Identifier: Apache-2.0
"""Crew: the runners of a cluster as the process that learns sees them: asked, waited for, ended and made anew."""

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from etude.algorithms.ray_config import Ray
from etude.errors import EngineError
from etude.ray.faults import cause_of, first_line, raise_from, was_lost
from etude.ray.members import Ask, Fragment, Member
from etude.ray.pulse import hung

_log = logging.getLogger("etude.ray")

_TICK = 0.5  # seconds between two looks at who hangs
_COUNTS = ("runner_restarts", "hung_runners", "lost_fragments", "lost_steps", "lost_recorded_steps")


class Crew:
    """The runners, each with what it was asked for.

    A runner that dies is made anew as a new actor, not by Ray's ``max_restarts``: its seed depends on its life, it must
    be sent the newest modules before anything else, and one budget is for all runners together; so a restart is the
    same few calls as the start. Ray's own would make it of the first arguments, and not say that it has.

    Args:
        settings: How many runners, and what becomes of those that fail.
        make: Makes the actor of a runner, by its number.
        begin: Lets a member that was made anew begin.
    """

    def __init__(self, settings: Ray, make: Callable[[int], Any], begin: Callable[[Member], None]) -> None:
        self._settings = settings
        self._make, self._begin = make, begin
        self._asked = 0
        self._looked = 0.0
        self.restarts = 0
        """Over the lifetime."""
        self._counts = dict.fromkeys(_COUNTS, 0.0)
        self.must_send_again = False
        """Weights were lost from the store."""
        self.members = [Member(number, 0, make(number)) for number in range(settings.num_runners)]
        for member in self.members:
            self.ask_open(member)

    # -- asking -------------------------------------------------------------------------------------------------

    def ask_open(self, member: Member) -> None:
        """Let a runner make its envs."""
        self.ask(member, member.actor.open.remote())

    def ask(self, member: Member, report: Any, parts: Any = None, *, steps: int = 0, key: Any = None) -> None:
        """Take note of what was asked for."""
        self._asked += 1
        if not member.asks:
            member.since = monotonic()
        member.asks.append(Ask(self._asked, steps, key, report, parts))

    def forget(self) -> None:
        """Want nothing more of the fragments that were asked for."""
        for member in self.members:
            member.asks = deque(ask for ask in member.asks if not ask.steps)
            member.is_late = False

    # -- waiting ------------------------------------------------------------------------------------------------

    def next(self, timeout: float) -> Fragment | None:
        """The next fragment that has come, the one asked for first; None where something else happened, or nothing.

        Args:
            timeout: Seconds, at most.

        Raises:
            EngineError: runners were lost more often than they may be, or all of them.
            Exception: what an env, a connector or a module raised, with a note of where.
        """
        heads = {member.asks[0].report: member for member in self.members if member.asks}
        refs = sorted(heads, key=lambda ref: heads[ref].asks[0].number)
        ready = ray.wait(refs, num_returns=1, timeout=min(timeout, _TICK), fetch_local=False)[0] if refs else []
        now = monotonic()
        if now - self._looked > _TICK:
            self._looked = now
            self._look_after_hanging(heads, now)
        if not ready or heads[ready[0]] not in self.members:
            return None
        member = heads[ready[0]]
        return self._received(member) if member.asks and member.asks[0].report == ready[0] else None

    def _received(self, member: Member) -> Fragment | None:
        ask = member.asks[0]
        try:
            report = ray.get(ask.report)
        except RayError as error:
            self.failed(member, error)
            return None
        self._done(member)
        if not ask.steps:
            if report is not None:
                member.node, member.pid = report
            else:
                member.has_begun, member.unwritten = True, 0
            return None
        member.unwritten = report.unwritten
        pace = report.seconds / ask.steps
        member.pace = pace if member.pace is None else 0.7 * member.pace + 0.3 * pace
        try:
            parts = ray.get(ask.parts)
        except ObjectLostError as error:  # the node that it lay on is gone
            self.lose(1, report.env_steps)
            _log.warning(
                "%s: a fragment of %d steps is lost: %s", self._name(member), report.env_steps, first_line(error)
            )
            return None
        except RayError as error:
            self.failed(member, error)
            return None
        return Fragment(ask.number, member.number, member.life, ask.key, report, parts)

    def _done(self, member: Member) -> None:
        member.asks.popleft()
        member.since = monotonic()
        member.is_late = False

    # -- what fails ---------------------------------------------------------------------------------------------

    def failed(self, member: Member, error: RayError) -> None:
        """See to a member of which something did not come that was asked for.

        Raises:
            Exception: what was raised there.
        """
        cause = cause_of(error)
        if isinstance(cause, ObjectLostError) and member.asks and member.asks[0].steps:
            # what it was sent, or its answer: the runner itself is well
            self._done(member)
            self.lose(1, 0)
            member.sent, self.must_send_again = (-1, -1, member.sent[2]), True
            _log.warning("%s: a fragment is lost, or what it needed: %s", self._name(member), first_line(cause))
        elif was_lost(cause):
            self.replace(member, cause)
        else:
            raise_from(error, self._name(member))

    def replace(self, member: Member, error: BaseException) -> None:
        """End a runner, if it has not ended, and let another take its place, if that is allowed.

        Raises:
            EngineError: it is not, and there is no other, or this has happened too often.
        """
        ray.kill(member.actor)
        self.lose(sum(1 for ask in member.asks if ask.steps), 0)
        name, settings = self._name(member), self._settings
        self._counts["lost_recorded_steps"] += member.unwritten
        recorded = f" So are {member.unwritten} steps that it had yet to record." if member.unwritten else ""
        _log.warning("%s was lost: %s%s", name, first_line(error), recorded)
        if not settings.restart_failed_runners:
            self.members.remove(member)
            if not self.members:
                raise EngineError(
                    f"{name}, the last one, was lost: {first_line(error)} Set `ray.restart_failed_runners`, and those "
                    "that are lost are made anew."
                ) from error
            return
        if self.restarts >= settings.max_restarts:
            raise EngineError(
                f"{name} was lost, and `ray.max_restarts` ({settings.max_restarts}) are used up. The cause: "
                f"{first_line(error)} See Ray's logs of that process and node."
            ) from error
        self.restarts += 1
        self._counts["runner_restarts"] += 1
        anew = Member(member.number, member.life + 1, self._make(member.number), pace=member.pace)
        self.members[self.members.index(member)] = anew
        self.ask_open(anew)
        self._begin(anew)

    def lose(self, fragments: int, steps: int) -> None:
        """Count what was lost; 0 steps where nobody knows."""
        self._counts["lost_fragments"] += fragments
        self._counts["lost_steps"] += steps

    def take_counts(self) -> dict[str, float]:
        """What went wrong since this was last asked; see `Runners.stats`."""
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0.0)
        return counts

    # -- what hangs ---------------------------------------------------------------------------------------------

    def _look_after_hanging(self, heads: dict[Any, Member], now: float) -> None:
        """Ask the runners at work how far they are, and replace those that have made no turn for too long."""
        limit = self._settings.step_timeout
        if limit is None or not heads:
            return
        _, unfinished = ray.wait(list(heads), num_returns=len(heads), timeout=0, fetch_local=False)
        for member in [heads[ref] for ref in unfinished]:
            still = member.pulse.still_for(member.actor, member.since, now)
            # one that has never answered may not have been started for want of room
            if still > limit and (member.has_begun or member.pulse.turns is not None):
                self._counts["hung_runners"] += 1
                self.replace(member, TimeoutError(hung(limit)))

    def _name(self, member: Member) -> str:
        where = f" (process {member.pid} on node {member.node[:12]})" if member.pid else ""
        return f"runner {member.number}{where}"

    # -- the end ------------------------------------------------------------------------------------------------

    def end(self, patience: float) -> None:
        """Let runners close their envs and what they record, and end them.

        Says of whom, and how much, what was to be recorded is lost.

        Args:
            patience: Seconds that they have for it, behind what they are doing.

        Raises:
            Exception: what went wrong with a recording.
        """
        members, self.members = self.members, []
        told = {member.actor.close.remote(): member for member in members}
        closed, late = ray.wait(list(told), num_returns=len(told), timeout=patience) if told else ([], [])
        errors = []
        for ref in late:
            self._unrecorded(told[ref], f"was still busy after {patience:g} s")
        for ref in closed:
            try:
                ray.get(ref)
            except RayTaskError as error:
                errors.append((error, self._name(told[ref])))
            except RayError as error:
                self._unrecorded(told[ref], first_line(error))
        for member in members:
            _leave_out(member)
            ray.kill(member.actor)
        if errors:
            raise_from(*errors[0])

    def _unrecorded(self, member: Member, why: str) -> None:
        """Say what is lost with a runner that could not close its recording."""
        if member.unwritten:
            _log.warning(
                "%s could not finish what it records: %s. At least %d steps are lost; the files that are there are "
                "whole.",
                self._name(member),
                why,
                member.unwritten,
            )


def _leave_out(member: Member) -> None:
    """Hear of errors that nobody waits for any more: Ray would show each at length."""
    for ask in member.asks:
        if ray.wait([ask.report], timeout=0, fetch_local=False)[0]:
            try:
                ray.get(ask.report)
            except RayError:
                with contextlib.suppress(RayError):  # the same
                    if ask.parts is not None:
                        ray.get(ask.parts)
