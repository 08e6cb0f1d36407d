# SPDX-License-Identifier: Apache-2.0
"""Runners: the runners on a cluster, used like the local runner; those that play evaluations; and the pools of actors
in which both wait for results and replace what is lost."""

import contextlib
import logging
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from etude.algorithms.config import AlgorithmConfig
from etude.algorithms.play import Played, evaluation_of
from etude.algorithms.ray_config import Ray
from etude.errors import EngineError, SettingsError
from etude.experience import Experience
from etude.policies import PolicyLike
from etude.ray.cluster import cause_of, check_connected, connection, first_line, raise_from, room, was_lost
from etude.ray.policies import Broadcast, acting_of, known_as, sent
from etude.ray.runner_actor import FragmentReport, RunnerActor, seed_of
from etude.recordings.pieces import copied, in_order
from etude.runners import Finished, ModuleOf
from etude.spaces import Spaces

if TYPE_CHECKING:
    from etude.algorithms.acting import ActingAlgorithm
    from etude.algorithms.algorithm import Algorithm

_log = logging.getLogger("etude.ray")

DEPTH: Final = 2
"""The number of fragments requested from a runner at once, so that it need not wait for the next request; also the
maximum number of fragments in its share of a collection."""
FRAGMENTS: Final = 16
"""Maximum number of fragments in a collection, unless there are more runners; each takes this process about 1 ms."""
LATE: Final = 3.0
"""How many times as long as the others a runner may take before it is late."""
SLACK: Final = 0.1
"""Seconds within which a fragment is never late."""
_PATIENCE: Final = 5.0  # seconds that envs have to close
_POLL: Final = 0.02  # seconds between two checks for late runners


# -- pools of actors ----------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """A call of an actor's method whose result is still to come."""

    number: int
    """The number of the call in the pool; later ones are higher."""
    steps: int
    """The steps or episodes in the result; 0: the actor only prepares."""
    key: Any
    """The kind of result."""
    answer: Any
    """Ray's reference to the result."""


@dataclass(slots=True)
class Member:
    """One actor of a pool."""

    number: int
    life: int
    """The number of earlier actors with this number."""
    actor: Any
    requests: deque[Request] = field(default_factory=deque)
    """In the order in which the actor serves them."""
    since: float = 0.0
    """When it could start with the first of these, in seconds of `time.monotonic`."""
    pace: float | None = None
    """Seconds per requested step: a moving average."""
    is_late: bool = False
    """Whether its next result is so late that the collection does not wait for it."""
    has_begun: bool = False
    """Whether it has received the modules."""
    sent: int = -1
    """The last version of the weights that it was sent."""
    node: str = ""
    pid: int = 0


class RunnerPool:
    """Runner actors of one kind, with the requests whose results are still to come.

    Lost actors are replaced here and not by Ray's ``max_restarts``: a new actor's seed depends on its life, and it
    first needs the newest modules.

    Args:
        num: The number of actors.
        num_gpus: The GPUs of each actor.
        config: A reference to the algorithm's settings, see `RunnerActor`.
        settings: The actors' other resources, and whether, and how often, lost ones are replaced.
    """

    kind: ClassVar[str]
    """The name of the actors in messages."""

    def __init__(self, num: int, num_gpus: float, config: Any, settings: Ray) -> None:
        self._num_gpus, self._config, self._settings, self._home = num_gpus, config, settings, connection()
        self._num_requests = 0
        self.restarts = 0
        """The number of replaced actors, over the lifetime."""
        self.counts: defaultdict[str, float] = defaultdict(float)
        """Counts of what was lost since they were last cleared, by name."""
        self.has_lost_inputs = False
        """Whether an object sent to actors was lost, perhaps the weights: store it in the object store again."""
        self.members = [Member(number, 0, self._started()) for number in range(num)]
        for member in self.members:
            self._open(member)

    def _open(self, member: Member) -> None:
        """Prepare a new actor; called again with each one that replaces a lost one."""

    def _started(self) -> Any:
        """A new actor."""
        own, remote = self._settings, ray.remote(RunnerActor)
        resources = dict(own.resources_per_runner or {})
        options = {"num_cpus": own.cpus_per_runner, "num_gpus": self._num_gpus, "resources": resources}
        device = "cuda" if self._num_gpus else "cpu"
        return remote.options(**options).remote(self._config, device, own.step_timeout)

    def request(self, member: Member, answer: Any, *, steps: int = 0, key: Any = None) -> None:
        """Register a call; see `Request`."""
        self._num_requests += 1
        if not member.requests:
            member.since = monotonic()
        member.requests.append(Request(self._num_requests, steps, key, answer))

    def answer(self, timeout: float) -> tuple[Member, Request, Any] | None:
        """The next result with its request, the oldest first. None: there was no result within ``timeout`` seconds, or
        an actor was lost.

        Raises:
            EngineError: actors were lost too often, or all of them.
            Exception: raised by an actor; a note says where.
        """
        heads = {member.requests[0].answer: member for member in self.members if member.requests}
        refs = sorted(heads, key=lambda ref: heads[ref].requests[0].number)
        ready = ray.wait(refs, num_returns=1, timeout=timeout, fetch_local=False)[0] if refs else []
        if not ready:
            return None
        member = heads[ready[0]]
        try:
            answer = ray.get(ready[0])
        except RayError as error:
            self.failed(member, error)
            return None
        return member, self._done(member), answer

    def _done(self, member: Member) -> Request:
        member.is_late, member.since = False, monotonic()
        return member.requests.popleft()

    def failed(self, member: Member, error: RayError) -> None:
        """Handle a request that failed: replace the actor if it is gone, and count what is lost.

        Raises:
            EngineError: actors were lost too often, or all of them.
            Exception: raised by the actor; a note says where.
        """
        cause = cause_of(error)
        if isinstance(cause, ObjectLostError) and member.requests and member.requests[0].steps:
            request = self._done(member)  # its result or arguments are lost, but not the actor itself
            self.counts["lost_fragments"] += 1
            if cause is error:  # its result: it has made these steps
                self.counts["lost_steps"] += request.steps
            member.sent, self.has_lost_inputs = -1, True
            _log.warning("%s: a fragment or its inputs are lost: %s", self.name(member), first_line(cause))
        elif was_lost(cause):
            self._replace(member, cause)
        else:
            raise_from(error, self.name(member))

    def _replace(self, member: Member, error: BaseException) -> None:
        ray.kill(member.actor)
        self.counts["lost_fragments"] += sum(1 for request in member.requests if request.steps)
        name, settings = self.name(member), self._settings
        _log.warning("%s was lost: %s", name, first_line(error))
        if not settings.restart_failed_runners and self.kind == "runner":
            self.members.remove(member)
            if not self.members:
                raise EngineError(
                    f"{name}, the last one, was lost: {first_line(error)} See `ray.restart_failed_runners`."
                ) from error
            return
        if self.restarts >= settings.max_restarts:
            raise EngineError(
                f"{name} was lost, and `ray.max_restarts` ({settings.max_restarts}) is used up: {first_line(error)}"
            ) from error
        self.restarts += 1
        self.counts["runner_restarts"] += 1
        new = Member(member.number, member.life + 1, self._started(), pace=member.pace)
        self.members[self.members.index(member)] = new
        self._open(new)

    def name(self, member: Member) -> str:
        """The name of a member in messages."""
        where = f" (process {member.pid} on node {member.node[:12]})" if member.pid else ""
        return f"{self.kind} {member.number}{where}"

    def kill(self) -> None:
        """End all actors at once. Does nothing the second time."""
        if connection() != self._home:  # they have ended with the cluster
            return
        members, self.members = self.members, []
        for member in members:
            for request in member.requests:  # fetched, because Ray would print each error among them in full
                if ray.wait([request.answer], timeout=0, fetch_local=False)[0]:
                    with contextlib.suppress(RayError):
                        ray.get(request.answer)
            ray.kill(member.actor)


# -- fragments of experience --------------------------------------------------------------------------------------


class Fragment(NamedTuple):
    """The experience that a runner has collected for one request."""

    number: int
    """The number of the request; later ones are higher."""
    runner: int
    life: int
    report: FragmentReport
    parts: dict[str | None, Experience]
    """The experience by module id."""


def put_together(fragments: Sequence[Fragment], *, joined: bool) -> dict[str | None, Experience]:
    """The experience of fragments by module id, ordered by runner, and by time for each runner.

    Args:
        fragments: The fragments, in any order. The returned arrays are copies and may be changed.
        joined: Join segments that continue in a runner's next fragment.
    """
    parts: dict[str | None, list[Experience]] = {}
    for fragment in sorted(fragments, key=lambda fragment: (fragment.runner, fragment.number)):
        for module_id, exp in fragment.parts.items():
            parts.setdefault(module_id, []).append(exp)
    found = {}
    for module_id, several in sorted(parts.items(), key=lambda item: str(item[0])):
        exp = Experience.concat(several) if len(several) > 1 else copied(several[0])
        found[module_id] = in_order(exp).join() if joined and len(several) > 1 else exp
    return found


class FinishedEpisodes:
    """Finished episodes of all runners, with envs numbered over all runners.

    Args:
        num_envs: The number of envs of each runner.
    """

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._parts: list[Finished] = []
        self._next: dict[int, tuple[int, int, int]] = {}  # by runner: its life, its first number, and the next one

    def add(self, fragment: Fragment) -> None:
        """Add the episodes of a fragment."""
        finished, runner = fragment.report.finished, fragment.runner
        life, first, stop = self._next.get(runner, (fragment.life, 0, 0))
        if life != fragment.life:  # a new runner counts its episodes from 0 again
            life, first = fragment.life, stop
        numbers = finished.numbers + first
        self._next[runner] = (life, first, int(max(stop, numbers.max(initial=-1) + 1)))
        self._parts.append(finished._replace(envs=finished.envs + runner * self._num_envs, numbers=numbers))

    def take(self) -> Finished:
        """The episodes since the last call."""
        parts, self._parts = self._parts, []
        return merged(parts)


def merged(parts: Sequence[Finished]) -> Finished:
    """The episodes of several runners together; no episodes if there are no parts."""
    reals, whole = np.zeros(0), np.zeros(0, np.int64)
    parts = [Finished(reals, whole, {}, {}, reals, whole, whole), *parts]
    columns = ("returns", "lengths", "durations", "envs", "numbers")
    by_name = ("agent_returns", "module_returns", "custom", "histograms")
    found: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in columns}
    found |= {name: _by_name(getattr(part, name) for part in parts) for name in by_name}
    return Finished(**found, media={name: picture for part in parts for name, picture in part.media.items()})


def _by_name(parts: Iterable[Mapping[str, NDArray[np.float64]]]) -> dict[str, NDArray[np.float64]]:
    found: dict[str, list[NDArray[np.float64]]] = {}
    for part in parts:
        for name, values in part.items():
            found.setdefault(name, []).append(values)
    return {name: np.concatenate(values) for name, values in sorted(found.items())}


# -- collecting ---------------------------------------------------------------------------------------------------


class Runners(RunnerPool):
    """Collects experience with runners on a cluster, each with `num_envs` envs of its own, like a single runner.

    If the learner waits for the runners, a collection is divided into equal fragments, made with the newest weights;
    usually there are exactly as many steps as requested. A runner that is far slower than the others is not waited for:
    the others make up for it, and its fragment counts in the collection in which it arrives. So a collection may have
    up to one fragment more than requested, and steps from older weights (``policy_lag``).

    Otherwise each runner has `in_flight` requests at any time, and goes on while the learner learns. No fragment is
    ever thrown away: if the learner is slow, runners wait for it.

    The same seed gives each runner the same stream of experience. Which fragments are in a collection is repeatable
    only if `fragment_steps` is `num_steps / num_runners`, the learner waits, and no runner is late.

    Callbacks run in the runners, each of which has a copy. The values that they log arrive with the finished episodes;
    their state is not in checkpoints.

    Args:
        algorithm: The algorithm whose modules act.
        settings: The engine's settings.

    Raises:
        SettingsError: the config can't be sent to other processes.
    """

    kind = "runner"

    def __init__(self, algorithm: "ActingAlgorithm[Any]", settings: Ray) -> None:
        self._algorithm, self.asynchronous = algorithm, algorithm.collects_in_background
        self._num_envs = algorithm.config.num_envs
        self._by_agent = algorithm.config.trajectories.count_steps_by == "agent_steps"
        config = _sent(algorithm.config, device="cpu")
        self._acting_ref: Any = None  # None: not sent yet
        self._broadcast = Broadcast()
        self._first_life = 0  # the first life of runners here; higher after loading a run
        self._heard = monotonic()
        self._finished = FinishedEpisodes(self._num_envs)
        self._lag = [0, 0]  # sum of updates over steps, and number of steps
        self.env_steps = 0
        """The env steps over the lifetime."""
        self.agent_steps = 0
        """The agent steps over the lifetime."""
        self.times: dict[str, float] = {}
        """Seconds by phase, of all runners together; see `Runner.times`."""
        self.turns = 0
        """Turns of all runners together."""
        super().__init__(settings.num_runners, settings.gpus_per_runner, config, settings)

    # -- policies -----------------------------------------------------------------------------------------------

    def _open(self, member: Member) -> None:
        self.request(member, member.actor.open.remote(), key="open")
        self._begin(member)

    def _begin(self, member: Member) -> None:
        """Let a runner that has made its envs act."""
        if self._acting_ref is None:
            return
        seed = seed_of(self._algorithm.runner_seed, member.number, self._first_life + member.life)
        member.has_begun, member.sent = False, -1
        self.request(member, member.actor.begin.remote(self._acting_ref, seed), key="begin")

    def spaces(
        self, module_ids: list[str], module_of: ModuleOf | None, before: Mapping[str, Spaces] | None = None
    ) -> dict[str, Spaces]:
        """The env's spaces of each module; this process needs no env for that.

        Raises:
            EnvError: the envs can't be made.
        """
        while True:
            for member in [member for member in self.members if member.pid]:
                try:
                    found: dict[str, Spaces] = ray.get(member.actor.spaces.remote(module_ids, module_of, before))
                except RayError as error:
                    self.failed(member, error)
                else:
                    return found
            self._next(1.0)

    def set_policies(
        self, policies: PolicyLike | Mapping[str, PolicyLike], *, module_of: ModuleOf | None = None
    ) -> None:
        """Replace the policies; they must be those of the algorithm. The running episodes are abandoned."""
        self.abandon_episodes()

    def restart_episodes(self, seed: int) -> None:
        """Abandon the running episodes, and begin others, which depend on ``seed`` and differ from a new run's."""
        self._first_life = seed
        self.abandon_episodes()

    def abandon_episodes(self) -> None:
        """Abandon the running episodes and fragments: runners begin new episodes with the newest modules."""
        for member in self.members:
            for request in [request for request in member.requests if request.steps]:
                member.requests.remove(request)
            member.is_late = False
            member.life += self._acting_ref is not None
        self._acting_ref = None

    def _ready(self) -> None:
        """Send runners the newest policies and weights, if needed."""
        check_connected(self._home)
        before = self._broadcast.seq_nos
        self._broadcast.refresh(self._algorithm, again=self.has_lost_inputs)
        self.has_lost_inputs = False
        if any(self._broadcast.seq_nos.get(name, 0) < seq_no for name, seq_no in before.items()):
            self.abandon_episodes()  # an earlier state was loaded, whose weights runners would refuse as old
        if self._acting_ref is not None:
            return
        timeout = self._settings.sample_timeout
        self._acting_ref = ray.put(acting_of(self._algorithm))
        for member in self.members:
            self._begin(member)
        begin = self._heard = monotonic()
        while absent := [member.number for member in self.members if not member.has_begun]:
            if monotonic() - begin > timeout and len(absent) < len(self.members):
                words = "of the runners, %s could not begin within %g s; the others continue without them. %s"
                _log.warning(words, absent, timeout, room())
                break
            self._next(1.0)

    # -- collecting ---------------------------------------------------------------------------------------------

    def collect_each(
        self,
        *,
        num_steps: int | None = None,
        num_episodes: int | None = None,
        whole_episodes: bool = False,
        explore: bool = True,
    ) -> dict[str | None, Experience]:
        """Collect experience, by module id, see `Runner.collect_each`.

        Args:
            num_steps: The number of steps, see the class; at least as many if runners go on while the learner learns.
            num_episodes: Not supported: evaluations have separate runners.
            whole_episodes: Each runner returns only finished episodes.
            explore: Sample actions; otherwise take the most likely ones.

        Raises:
            EngineError: more runners were lost than allowed, or all of them.
            Exception: raised by an env, a connector or a module; a note says where.
        """
        if num_episodes is not None or num_steps is None or num_steps < 1:
            raise EngineError("runners of a cluster collect steps, at least one: give num_steps, not num_episodes.")
        self._ready()
        key, own, begin = (whole_episodes, explore), self._settings, monotonic()
        parts = max(1, min(DEPTH, FRAGMENTS // own.num_runners))
        share = num_steps if self.asynchronous else math.ceil(num_steps / (own.num_runners * parts))
        size = own.fragment_steps or share
        taken: list[Fragment] = []
        have = 0
        while have < num_steps:
            self._ask(num_steps - have, size, key)
            if taken and monotonic() - begin > own.sample_timeout:
                self.counts["sample_timeouts"] += 1
                break
            answer = self._next(_POLL if taken else 0.5)
            if answer is None:
                find_late(self.members)
            elif answer[1] != key:
                self.counts["lost_fragments"] += 1
                self.counts["lost_steps"] += answer[0].report.env_steps
            else:
                taken.append(answer[0])
                report = taken[-1].report
                have += report.agent_steps if self._by_agent else report.env_steps
                self._count(taken[-1])
        if self.asynchronous:
            self._ask(0, size, key)
        self.counts["sample_wait_s"] += monotonic() - begin
        return put_together(taken, joined=self._algorithm.config.trajectories.max_length is None)

    def _ask(self, wanted: int, size: int, key: tuple[bool, bool]) -> None:
        """Request fragments with ``wanted`` steps; if asynchronous, as many from each runner as allowed."""
        if not self.asynchronous:
            for member, steps in dealt(self.members, wanted, size):
                self._order(member, steps, key)
            return
        for member in self.members:
            for _ in range(self._settings.in_flight - sum(1 for request in member.requests if request.steps)):
                self._order(member, size, key)

    def _order(self, member: Member, steps: int, key: tuple[bool, bool]) -> None:
        """Request a fragment from a runner, with the newest weights."""
        weights = None if member.sent == self._broadcast.version else self._broadcast.ref
        member.sent = self._broadcast.version
        self.request(member, member.actor.collect.remote(weights, steps, *key), steps=steps, key=key)

    def _next(self, timeout: float) -> tuple[Fragment, Any] | None:
        """The next fragment with its request's key; None after ``timeout`` seconds, or if anything else happened."""
        answer = self.answer(timeout)
        if self.has_lost_inputs:
            self._ready()
        if answer is not None:
            self._heard = monotonic()
            return self._received(*answer)
        if monotonic() - self._heard > self._settings.sample_timeout:
            self._heard = monotonic()
            _log.warning("no runner has returned anything for %g s. %s", self._settings.sample_timeout, room())
        return None

    def _received(self, member: Member, request: Request, answer: Any) -> tuple[Fragment, Any] | None:
        if request.key == "open":
            member.node, member.pid = answer
            return None
        if request.key == "begin":
            member.has_begun = True
            return None
        report, parts = answer
        pace = report.seconds / request.steps
        member.pace = pace if member.pace is None else 0.7 * member.pace + 0.3 * pace
        return Fragment(request.number, member.number, member.life, report, parts), request.key

    # -- counts -------------------------------------------------------------------------------------------------

    def _count(self, fragment: Fragment) -> None:
        report, first_env = fragment.report, fragment.runner * self._num_envs
        self.env_steps += report.env_steps
        self.agent_steps += report.agent_steps
        self.turns += report.turns
        for name, seconds in report.times.items():
            self.times[name] = self.times.get(name, 0.0) + seconds
        for name, count in report.stats.items():
            env = name.removeprefix("steps/env_")
            is_of_env = env != name and env.isdecimal()
            self.counts[f"steps/env_{first_env + int(env)}" if is_of_env else name] += count
        self._finished.add(fragment)
        is_only = self._algorithm.config.agents.modules is None
        newest = {known_as(name, is_only=is_only): seq_no for name, seq_no in self._broadcast.seq_nos.items()}
        for module_id, exp in fragment.parts.items():
            steps = exp.num_steps - int(exp.segments.lookback.sum())
            self._lag[0] += steps * max(0, newest.get(module_id, 0) - report.seq_nos[module_id])
            self._lag[1] += steps

    def take_finished(self) -> Finished:
        """See `Runner.take_finished`: episodes of all runners. ``envs`` are numbered over all of them."""
        return self._finished.take()

    def stats(self) -> dict[str, float]:
        """The counts since the last call: those of all envs, see `Arena.stats`, and of the runners:

        ``runner_restarts``; ``lost_fragments``; ``lost_steps``, in lost fragments of known length and in failed envs;
        ``sample_timeouts``; ``sample_wait_s``, the seconds in which the learner waited for experience; and
        ``policy_lag``, the number of updates of a module after the weights that made a step, as a mean over steps.
        """
        names = ("sample_timeouts", "runner_restarts", "lost_fragments", "lost_steps")
        found = dict.fromkeys(names, 0.0) | {"policy_lag": self._lag[0] / max(1, self._lag[1])} | self.counts
        self.counts.clear()
        self._lag = [0, 0]
        return found

    # -- the rest -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The counts, and what a resumed run needs to get other episodes; running episodes are not saved."""
        return {
            "runners": "ray",
            "steps": [self.env_steps, self.agent_steps],
            "lives": self._first_life + max((member.life for member in self.members), default=0) + 1,
        }

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Restore a `state_dict`, with new episodes."""
        self.env_steps, self.agent_steps = state["steps"]
        self._first_life = state["lives"]
        self.abandon_episodes()
        return "new episodes: those of remote runners are not saved in checkpoints"

    def close(self) -> None:
        """Close the envs, and end the runners. Does nothing the second time.

        Raises:
            Exception: closing an env failed; a note says where.
        """
        if connection() != self._home:
            return
        called = {member.actor.close.remote(): member for member in self.members}
        closed = ray.wait(list(called), num_returns=len(called), timeout=_PATIENCE)[0] if called else []
        try:
            for ref in closed:
                try:
                    ray.get(ref)
                except RayTaskError as error:
                    raise_from(error, self.name(called[ref]))
                except RayError:
                    pass  # it has ended already
        finally:
            self.kill()


class EvaluationRunners(RunnerPool):
    """Plays an algorithm's evaluations on separate runners, each of which plays some of the episodes.

    If a runner dies or hangs, its episodes are lost, and it is replaced up to `max_restarts` times.

    Args:
        algorithm: The algorithm whose modules play.
        settings: The engine's settings.
    """

    kind = "evaluation runner"

    def __init__(self, algorithm: "Algorithm[Any]", settings: Ray) -> None:
        if algorithm.config.env is None:
            raise SettingsError("there is no env to evaluate in: set `env`.")
        self._algorithm, self._updates = algorithm, 0
        super().__init__(settings.num_evaluation_runners, 0.0, _sent(algorithm.config, callbacks=()), settings)

    def next(self, num_episodes: int, *, seed: int | None) -> Played | None:
        """Start new episodes with the current modules, without waiting, and return the results of the last ones.

        The result is None the first time, and if all of it was lost. See `finished`.

        Args:
            num_episodes: The number of whole episodes, divided evenly.
            seed: The seed of envs and actions, from which each runner's is derived; None: a random one.
        """
        check_connected(self._home)
        found = self.finished() if any(member.requests for member in self.members) else None
        members = self.members
        ref, self._updates = ray.put(acting_of(self._algorithm)), self._algorithm.updates
        seeds = np.random.SeedSequence(seed).generate_state(len(members), np.uint64) >> np.uint64(1)
        for i, member in enumerate(members):
            own = num_episodes // len(members) + (i < num_episodes % len(members))
            if own:
                self.request(member, member.actor.play.remote(ref, own, int(seeds[i])), steps=own)
        return found

    def finished(self) -> Played | None:
        """Wait for the last episodes and return their results, with the gradient steps of the modules that played.

        None if all of it was lost. The algorithm's metrics get ``evaluation_restarts``, the number of lost runners.

        Raises:
            EngineError: more runners were lost than allowed.
            Exception: raised by an env, a connector or a module; a note says where.
        """
        before, parts = self.restarts, dict[int, tuple[Finished, int, float]]()
        while any(member.requests for member in self.members):
            answer = self.answer(1.0)
            if answer is not None:
                parts[answer[0].number] = answer[2]
        self._algorithm.metrics.log("evaluation_restarts", float(self.restarts - before), by="sum")
        if not parts:
            return None
        played, faulty, seconds = zip(*(parts[i] for i in sorted(parts)), strict=True)
        finished = merged(played)
        return Played(evaluation_of(finished, sum(faulty), updates=self._updates, seconds=max(seconds)), finished)

    def close(self) -> None:
        """End the runners; their running episodes are lost. Does nothing the second time."""
        self.kill()


def _sent(config: AlgorithmConfig, **changes: Any) -> Any:
    """See `sent`; without networks, which runners get with the policies."""
    modules = config.agents.modules
    return sent(config, module=None, modules=None if modules is None else tuple(modules), **changes)


# -- shares of the work -------------------------------------------------------------------------------------------


def dealt(members: Sequence[Member], wanted: int, size: int) -> Iterator[tuple[Member, int]]:
    """Decide how many steps to request from which runner, so that ``wanted`` steps arrive, with those on their way.

    The caller requests each before taking the next one. Late runners get no requests and are not counted on.

    Args:
        members: All runners.
        wanted: The number of steps that are still missing.
        size: The steps of a fragment; the last one may have fewer.
    """
    for depth in range(DEPTH):
        for member in members:
            counted = (other for other in members if not other.is_late)
            owed = wanted - sum(request.steps for other in counted for request in other.requests)
            if owed <= 0:
                return
            if member.has_begun and not member.is_late and len(member.requests) <= depth:
                yield member, min(size, owed)


def find_late(members: Sequence[Member]) -> None:
    """If a runner is idle, mark those as late that take several times as long as usual."""
    paces = [member.pace for member in members if member.pace]
    if not paces or all(member.requests for member in members if member.has_begun):
        return
    usual, now = median(paces), monotonic()
    for member in members:
        if member.requests and member.requests[0].steps and not member.is_late:
            member.is_late = now - member.since > LATE * usual * member.requests[0].steps + SLACK
