# SPDX-License-Identifier: Apache-2.0
"""Learners: the learners on a cluster, each an actor with a replica of the algorithm, used like the local learner."""

import copy
import datetime
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast

import numpy as np
import ray
import ray.util
import torch
import torch.distributed
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from etude.algorithms.algorithm import Algorithm
from etude.algorithms.config import AlgorithmConfig, OnPolicyConfig, RecordConfig
from etude.algorithms.offline import OfflineAlgorithm
from etude.algorithms.on_policy import OnPolicyAlgorithm
from etude.algorithms.ray_config import Ray
from etude.errors import DataError, EngineError
from etude.experience import Experience
from etude.interruption import when_parent_ends
from etude.learners import Update
from etude.learners.batch import Sequences
from etude.learners.distributed import Team, TeamLost
from etude.learners.loss import Figures
from etude.ray.cluster import cause_of, check_connected, connection, first_line, raise_from, room, was_lost
from etude.ray.policies import (
    as_arrays,
    fingerprint,
    from_arrays,
    learner_state,
    plain_of,
    sent,
    set_learner_state,
)
from etude.spaces import Spaces
from etude.threads import for_acting, hold

if TYPE_CHECKING:  # importing Ray Data takes seconds, and not all need it
    from etude.algorithms.feed import Feed
    from etude.ray.data import LearnerReport, Shard

_log = logging.getLogger("etude.ray")

_store: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]  # public, but not declared so


class Progress(NamedTuple):
    """The progress of the trained algorithm, as far as losses may depend on it."""

    env_steps: int
    scheduled_at: int
    """The env steps for which schedules have their values."""
    rates: Mapping[str, Mapping[str, float]]
    """The learning rates of each module, by optimizer."""
    plain: Mapping[str, Any]
    """The algorithm's attributes that are numbers, texts or booleans."""
    connectors: Mapping[str, Mapping[str, Any]]
    """The states of the learner's connectors, by module id, if they work at the learners and learn from experience."""


class TrainedShare(NamedTuple):
    """The results of training on a learner's share of a recording."""

    updates: dict[str, Update]
    data: dict[str, float]
    """See `Result.data`."""
    bottleneck: str
    report: "LearnerReport"


class LearnerActor:
    """A replica of the trained algorithm that makes no envs, keeps no replay and records nothing.

    Args:
        rank: The index of this learner.
        kind: The class of the algorithm.
        config: Its settings, for the local engine, without callbacks and recording.
        spaces: The spaces of each module, on the env's side.
    """

    def __init__(
        self, rank: int, kind: type[Algorithm[Any]], config: AlgorithmConfig, spaces: dict[str, Spaces]
    ) -> None:
        when_parent_ends(lambda: os._exit(1))  # a thread may wait for data for ever
        self._rank, self._arguments = rank, (kind, config, spaces)
        self._feeds: dict[str, Feed] = {}
        self._store: Any = None

    def build(self) -> tuple[str, int]:
        """Create the replica; return the ids of the node and of the process.

        This is not done in the constructor, so that errors keep their type.
        """
        kind, config, spaces = self._arguments
        hold(for_acting(config.compute.threads))
        self._algorithm = kind(config, saved_spaces=spaces)
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def serve(self, size: int, timeout: float) -> tuple[str, int]:
        """Open the store at which ``size`` learners meet, on a free port; return its host and port."""
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._store = _store(host, 0, size, True, datetime.timedelta(seconds=timeout), wait_for_workers=False)
        return host, self._store.port

    def join(self, address: tuple[str, int], size: int, backend: str, timeout: float) -> None:
        """Join the process group of ``size`` learners that meet at ``address``, and learn together with them."""
        seconds = datetime.timedelta(seconds=timeout)
        store = self._store or _store(*address, size, False, seconds)
        torch.distributed.init_process_group(backend, store=store, rank=self._rank, world_size=size, timeout=seconds)
        team = Team()
        for learner in self._algorithm.learner.modules.values():
            learner.team = team
            for connector in learner.connectors.connectors:
                connector.sum_over_learners = team.sum_array_

    # -- state --------------------------------------------------------------------------------------------------

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the states of all modules' learners, by module id: see `learner_state`."""
        for name, own in state.items():
            set_learner_state(self._algorithm.learner.modules[name], own)

    def state(self) -> dict[str, Any]:
        """The state of the learner of each module, including its connectors if they learn here."""
        learners, connectors = self._algorithm.learner.modules, bool(self._feeds)
        return {name: learner_state(own, connectors=connectors) for name, own in learners.items()}

    # -- learning -----------------------------------------------------------------------------------------------

    def update(self, parts: Mapping[str, Experience], progress: Progress, connects: bool) -> dict[str, Update]:
        """Learn from this learner's share of experience, one module at a time; ``connects``: prepare it here first."""
        algorithm = self._apply(progress)
        assert isinstance(algorithm, OnPolicyAlgorithm)
        updates = {}
        for name, exp in parts.items():
            updates[name] = algorithm.learn(name, algorithm.prepared(name, exp) if connects else exp)
        return updates

    def update_from(
        self, batches: Sequence[Any], module_id: str, progress: Progress
    ) -> tuple[Update, list[dict[str, Any]]]:
        """Learn from this learner's share of each batch; also return what the loss kept of each, by row."""
        algorithm = self._apply(progress)
        learner, kept = algorithm.learner.modules[module_id], list[dict[str, Any]]()

        def given() -> Iterator[Any]:
            for batch in batches:
                yield batch
                kept.append(as_arrays(learner.kept))

        with algorithm.settings_of(module_id):
            return learner.update_from(given()), kept

    def open(self, shard: "Shard") -> None:
        """Use this share of the recording from now on."""
        from etude.ray.data import feeds_of

        self._feeds = feeds_of(shard, self._algorithm)  # type: ignore[arg-type]

    def train(self, num_updates: int, module_ids: Sequence[str], progress: Progress) -> TrainedShare:
        """Make gradient steps of each module, from its feed."""
        from etude.algorithms.feed import report
        from etude.ray.data import report_of

        algorithm = self._apply(progress)
        begin = time.perf_counter()
        updates = {}
        for name in module_ids:
            with algorithm.settings_of(name):
                batches = self._feeds[name].take(num_updates * algorithm.config.optimizer.accumulate)
                updates[name] = algorithm.learner.modules[name].update_from(batches)
        data, bottleneck = report(self._feeds, time.perf_counter() - begin, 0)
        return TrainedShare(updates, data, bottleneck, report_of(self._feeds))

    def _apply(self, progress: Progress) -> Algorithm[Any]:
        algorithm = self._algorithm
        algorithm.learner.set_env_steps(progress.scheduled_at)
        for name, rates in progress.rates.items():
            algorithm.learner.modules[name].lr.update(rates)
        for name, state in progress.connectors.items():
            algorithm.learner.modules[name].connectors.load_state_dict(copy.deepcopy(dict(state)))
        algorithm.env_steps = progress.env_steps
        vars(algorithm).update(progress.plain)
        algorithm.before_update(progress.env_steps)
        vars(algorithm).update(progress.plain)  # again, as the trained algorithm has called `before_update`, too
        return algorithm


# -- the group of all learners ------------------------------------------------------------------------------------

_GRACE: Final = 5.0  # seconds to wait for the error of the learner that failed first


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
                strategy: Any = "DEFAULT"
                if self._placement is not None:
                    strategy = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=rank)
                options = {"num_cpus": resources["CPU"], "num_gpus": resources["GPU"], "scheduling_strategy": strategy}
                self._actors.append(ray.remote(LearnerActor).options(**options).remote(rank, *arguments))
            built = self.call("build", timeout=timeout)
            self.nodes = [node for node, _ in built]
            """The ids of the learners' nodes."""
            self.pids = [pid for _, pid in built]
            """The ids of the learners' processes."""
            if size > 1:
                (address,) = self.wait([self._actors[0].serve.remote(size, timeout)], timeout)
                backend = settings.backend
                if backend == "auto":  # NCCL needs a GPU for each learner alone
                    backend = "nccl" if settings.gpus_per_learner >= 1 else "gloo"
                self.call("join", address, size, backend, timeout, timeout=timeout + _GRACE)
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
        end = None if timeout is None else time.monotonic() + timeout
        answers: dict[int, Any] = {}
        lost: BaseException | None = None
        while left := [ref for ref, rank in rank_of.items() if rank not in answers]:
            ready, _ = ray.wait(left, num_returns=1, timeout=None if end is None else max(0.0, end - time.monotonic()))
            if not ready:
                raise LearnerLost(first_line(lost) if lost else f"no answer within {timeout:g} s") from lost
            rank = rank_of[ready[0]]
            try:
                answers[rank] = ray.get(ready[0])
            except RayError as error:
                lost = self._reason(error, rank, lost)
                answers[rank] = None
                end = min(end or time.monotonic() + _GRACE, time.monotonic() + _GRACE)
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


_Ask: TypeAlias = Callable[[LearnerGroup], list[Any]]
"""Begins an update with a group: returns references to the results."""


class Learners:
    """Distributes each update of an algorithm's modules over learners on a cluster.

    Each learner has a replica of the algorithm and learns from its share of the rows. Gradients are averaged in
    proportion to the shares, so that each step equals that of one learner with all rows (see `ModuleLearner.team`). The
    results of an update are loaded here at once, so the algorithm's own modules, optimizers and counts are always the
    newest. Changes that are made here in between, in ``after_update`` or by a callback, are sent to the learners before
    the next update.

    If a learner dies, its group ends, because the others wait for it. All learners are then made again with the
    algorithm's state here, and the update is repeated with the same shares.

    Connectors run here, on all data, with two exceptions: learner connectors while updates run beside collecting, and
    offline connectors that process each batch just before learning. These run at the learners, on their shares. The
    former learn from the data here, and the learners get their states; of the latter, if they learn from the data, the
    state of the first learner's is kept.

    Args:
        algorithm: The algorithm whose modules learn.
        settings: The engine's settings.
    """

    def __init__(self, algorithm: Algorithm[Any], settings: Ray) -> None:
        self._algorithm, self._settings = algorithm, settings
        self._config = algorithm.config
        self._home = connection()
        self._group: LearnerGroup | None = None
        self._is_fed = False
        self._in_empty: dict[str, int] = {}  # see `count_without_blocks`
        self._running: tuple[_Ask, list[Any]] | None = None  # an update, and the references that `_retry` returned
        self._last_results: dict[str, Update] | None = None  # results of the latest of these, not returned yet
        self._known: Any = None
        self._restarts = self._told_restarts = self._left_out = self._unshared = 0

    @property
    def pids(self) -> list[int]:
        """The ids of the learners' processes; none before the first update."""
        return [] if self._group is None else self._group.pids

    # -- learning -----------------------------------------------------------------------------------------------

    def update(self, parts: Mapping[str, Experience], env_steps: int) -> dict[str, Update]:
        """Update each module from prepared experience, like `OnPolicyAlgorithm.learn`.

        Args:
            parts: The experience by module id; a module without steps learns nothing.
            env_steps: The env steps sampled over the lifetime.

        Raises:
            EngineError: more learners were lost than allowed.
            Exception: raised by a learner; a note says where.
        """
        some = {name: self._shares(name, exp.numpy()) for name, exp in parts.items() if exp.trained().any()}
        if not some:
            return {name: Update({}, {}) for name in parts}
        done = self._together(self._update_of(some, env_steps))
        return {name: done[0].get(name, Update({}, {})) for name in parts}

    def update_next(self, seen: Mapping[str, Experience], env_steps: int) -> dict[str, Update] | None:
        """Start an update that runs while more is collected; return the results of the update before, or None.

        The learners run their connectors, which use the module's weights there, on shares of whole segments. Changes
        to the modules here in the meantime are overwritten by the results.

        Args:
            seen: The experience by module id, after the connectors between env and module.
            env_steps: The env steps sampled over the lifetime.

        Raises:
            EngineError: as in `update`, like all other errors.
        """
        before, self._last_results = self._ended(), None
        num = self._settings.num_learners
        some = {name: shares_of(exp.numpy(), num, max_seq_len=sys.maxsize) for name, exp in seen.items()}
        ask = self._update_of(some, env_steps, connects=True)
        self._running = ask, self._retry(ask, waits=False)
        for name, exp in seen.items():
            learner = self._algorithm.learner.modules[name]
            learner.connectors.update(exp, learner.module)
        return before

    def _update_of(self, shares: Mapping[str, list[Experience]], env_steps: int, *, connects: bool = False) -> _Ask:
        """Make the function that begins an update from the learners' shares; ``connects``: their connectors run."""
        # put at once, as connectors learn on while the update runs
        progress = ray.put(self._progress(env_steps, connectors=connects))
        refs = [ray.put({name: own[i] for name, own in shares.items()}) for i in range(self._settings.num_learners)]
        return lambda group: group.begin("update", progress, connects, own=refs)

    def _ended(self) -> dict[str, Update] | None:
        """Wait for the running update, if there is one, and return its results."""
        if self._running is not None:
            (ask, refs), self._running = self._running, None
            self._last_results = self._together(ask, refs)[0]
        return self._last_results

    def _shares(self, name: str, exp: Experience) -> list[Experience]:
        algorithm, num = self._algorithm, self._settings.num_learners
        policy = algorithm.policies[name]
        if not policy.module.recurrent:
            return shares_of(exp, num)
        with algorithm.settings_of(name):
            sequences = cast(OnPolicyConfig, algorithm.config).sequences
            # a learner leaves the first of the steps before a sequence out where connectors look back
            before = sequences.burn_in + policy.connectors.context if sequences.burn_in else 0
            return shares_of(exp, num, max_seq_len=sequences.max_len, burn_in=before)

    def update_from(self, module_id: str, batches: Iterable[Any], env_steps: int) -> tuple[Update, list[Figures]]:
        """Like `ModuleLearner.update_from`; also return what the loss kept of each batch, by row (its ``kept``).

        Args:
            module_id: The module that learns.
            batches: Columns ``[B, ...]`` by name, or Experience; all are drawn before the first is learned from.
            env_steps: The env steps sampled over the lifetime.

        Raises:
            EngineError: as in `update`, like all other errors.
            DataError: a batch of an offline algorithm has fewer rows than there are learners.
        """
        num, recurrent = self._settings.num_learners, self._algorithm.policies[module_id].module.recurrent
        shares = [shares_of_batch(batch, num, recurrent=recurrent) for batch in batches]
        if isinstance(self._algorithm, OfflineAlgorithm) and not recurrent:  # see `mean_over_learners`
            for rows in (len(next(iter(share.values()))) for of_batch in shares for share in of_batch):
                if not rows:
                    raise DataError(f"a batch has fewer rows than there are learners, {num}: give larger batches.")
        refs = [ray.put([of_batch[i] for of_batch in shares]) for i in range(num)]
        progress = self._progress(env_steps)
        done = self._together(lambda group: group.begin("update_from", module_id, progress, own=refs))
        kept = [[own[1][i] for own in done] for i in range(len(shares))]
        return done[0][0], [_joined(of_batch) for of_batch in kept]

    def train(self, num_updates: int) -> tuple[dict[str, Update], dict[str, float], str]:
        """Make gradient steps of each module to train, from the recording, which the learners read themselves.

        Returns the updates, the figures of the data flow over all learners, and the slowest layer at the first learner.

        Raises:
            EngineError: as in `update`, like all other errors.
        """
        from etude.ray.data import open_shards  # importing Ray Data takes seconds

        algorithm = cast(OfflineAlgorithm[Any], self._algorithm)

        def ask(group: LearnerGroup) -> list[Any]:
            if not self._is_fed:
                shards = open_shards(algorithm, self._settings, group.nodes)
                group.call("open", own=shards, timeout=self._settings.learner_timeout)
                self._is_fed = algorithm.has_seen_data = True
            names = list(algorithm.learner.chosen(dict.fromkeys(algorithm.policies)))
            return group.begin("train", num_updates, names, self._progress(algorithm.env_steps))

        done: list[TrainedShare] = self._together(ask)
        self._read_reports(algorithm, done)
        data = {name: sum(own.data.get(name, 0.0) for own in done) for name in done[0].data}
        for name in data.keys() & {"wait", "queue"}:
            data[name] /= len(done)  # learners wait in parallel; the work of layers adds up
        return done[0].updates, data, done[0].bottleneck

    def _read_reports(self, algorithm: OfflineAlgorithm[Any], done: list[TrainedShare]) -> None:
        """Process the learners' reports about the recording."""
        from etude.ray.data import count_without_blocks, unshared

        reports = [own.report for own in done]
        count_without_blocks(algorithm, reports, self._in_empty)
        self._left_out = sum(own.left_out for own in reports) + sum(self._in_empty.values())
        self._unshared = unshared(reports)
        for own in done:
            for k, counts in own.report.bad.items():
                algorithm.recording.count(k, counts)
        for name in algorithm.policies:
            sizes = [own.report.epochs.get(name) for own in done]
            if None not in sizes:
                algorithm.epoch_sizes[name] = sum(size for size in sizes if size is not None)

    def _progress(self, env_steps: int, *, connectors: bool = False) -> Progress:
        algorithm, learners = self._algorithm, self._algorithm.learner.modules
        rates = {name: dict(own.lr) for name, own in learners.items()}
        states = {n: own.connectors.state_dict() for n, own in learners.items() if connectors and own.connectors.learns}
        return Progress(env_steps, algorithm.learner.env_steps, rates, plain_of(algorithm), states)

    # -- the learners' state ------------------------------------------------------------------------------------

    def pull(self) -> None:
        """Wait for a running update; its results bring all of the learners' state here."""
        self._ended()

    def push(self) -> None:
        """Send the algorithm's state here to the learners before the next update; its modules may have changed."""
        if self._is_fed or self._config is not self._algorithm.config:
            self._end()  # Ray Data begins an epoch only when all learners have finished the previous one
        self._config = self._algorithm.config
        self._known, self._is_fed = None, False
        self._running = self._last_results = None

    def stats(self) -> dict[str, float]:
        """The counts since the last call: ``learner_restarts``.

        If learners read a recording, also ``left_out/early_or_dropped``, the steps of an epoch that could not be
        learned from, and ``left_out/unshared``, those that no learner got, because all get equally many.
        """
        new, self._told_restarts = self._restarts - self._told_restarts, self._restarts
        left_out = {"early_or_dropped": self._left_out, "unshared": self._unshared}
        return {"learner_restarts": float(new)} | {f"left_out/{kind}": float(n) for kind, n in left_out.items() if n}

    def _marks(self) -> Any:
        """A value that shows whether weights here have changed."""
        return {name: fingerprint(policy.module) for name, policy in self._algorithm.policies.items()}

    def _together(self, ask: _Ask, begun: list[Any] | None = None) -> list[Any]:
        """Run an update, or wait for one that has ``begun``; load the new state, and return the results."""
        *answers, state = self._retry(ask, begun, waits=True)
        for name, learner in self._algorithm.learner.modules.items():
            set_learner_state(learner, state[name])
        self._known = self._marks()
        return answers

    def _retry(self, ask: _Ask, refs: list[Any] | None = None, *, waits: bool) -> list[Any]:
        """Begin an update, or continue the one with ``refs``; begin it again with a new group if a learner is lost.

        Returns references to the results and to the learners' state after the update; if it ``waits``, the values.
        """
        while True:
            try:
                group = self._group
                if refs is None or group is None:
                    group = self._ready()
                    refs = [*ask(group), group.state()]
                return group.wait(refs, self._settings.learner_timeout) if waits else refs
            except LearnerLost as error:
                refs = None
                self._lost(error)
            except BaseException:
                self._end()  # the others' progress is unknown
                raise

    def _ready(self) -> LearnerGroup:
        """A group with the algorithm's current state."""
        check_connected(self._home)
        algorithm, settings = self._algorithm, self._settings
        if self._group is None:
            device = "cuda" if settings.gpus_per_learner > 0 else self._config.compute.device
            config = sent(self._config, record=RecordConfig(), callbacks=(), device=device)
            self._group = LearnerGroup(settings, (type(algorithm), config, algorithm.spaces))
            self._known = None
        if self._known is None or self._known != self._marks():
            learners = algorithm.learner.modules
            state = {name: learner_state(own) for name, own in learners.items()}
            self._group.call("load", ray.put(state), timeout=settings.learner_timeout)
            self._known = self._marks()
        return self._group

    # -- what fails ---------------------------------------------------------------------------------------------

    def _lost(self, error: LearnerLost) -> None:
        self._end()
        most = self._settings.max_restarts
        if self._restarts >= most:
            raise EngineError(
                f"a learner was lost, and `ray.max_restarts` ({most}) is used up: {first_line(error)}"
            ) from error
        self._restarts += 1
        _log.warning(
            "a learner was lost, and all are made again with their state before this update: %s", first_line(error)
        )

    def _end(self) -> None:
        group, self._group = self._group, None
        self._is_fed = False
        if group is not None:
            group.end()

    def close(self) -> None:
        """End the learners. Does nothing the second time."""
        if connection() == self._home:  # otherwise they have ended with the cluster
            self._end()


def _joined(kept: list[Mapping[str, Any]]) -> Figures:
    """What a loss kept of a batch, by row, joined from the learners' shares."""
    some = [from_arrays(own) for own in kept if own]
    return {name: torch.cat([own[name] for own in some]) for name in (some[0] if some else {})}


# -- shares of the learners ---------------------------------------------------------------------------------------


def shares_of(exp: Experience, num: int, *, max_seq_len: int = 1, burn_in: int = 0) -> list[Experience]:
    """Split ``exp`` into ``num`` consecutive parts with equally many steps to train on, give or take half a sequence.

    Segments are cut where that is needed; connectors have already added their columns.

    Args:
        exp: Experience that is ready for the loss.
        num: The number of parts.
        max_seq_len: For a recurrent module: the length of the sequences that it learns from, which are not cut.
        burn_in: For a recurrent module: the number of steps before a cut that the next part also gets, as lookback.
    """
    if num == 1:
        return [exp]
    inside = np.setdiff1d(Sequences.cut(exp, max_seq_len).starts, exp.offsets[:-1] + exp.segments.lookback)
    allowed = np.union1d(exp.offsets, inside)  # lookback stays with its segment
    done = np.append(0, np.cumsum(exp.trained()))[allowed]
    nearest = np.searchsorted((done[1:] + done[:-1]) / 2, done[-1] * np.arange(1, num) // num)
    bounds = np.union1d(exp.offsets, allowed[nearest])
    parent = np.searchsorted(exp.offsets, bounds[:-1], side="right") - 1
    pieces = exp.pieces(parent, bounds[:-1], bounds[1:], burn_in)
    borders = np.searchsorted(bounds, [0, *allowed[nearest], exp.num_steps]).tolist()
    return [pieces[first:last] for first, last in pairwise(borders)]


def shares_of_batch(batch: Mapping[str, Any] | Experience, num: int, *, recurrent: bool) -> list[Any]:
    """Split a batch into ``num`` parts whose sizes differ by one row at most, or by one segment if ``recurrent``."""
    if isinstance(batch, Experience):
        if recurrent:
            return [batch[first:last] for first, last in pairwise(_evenly(len(batch), num))]
        batch = batch.steps
    borders = _evenly(len(next(iter(batch.values()))), num)
    return [{name: column[first:last] for name, column in batch.items()} for first, last in pairwise(borders)]


def _evenly(size: int, num: int) -> list[int]:
    return [size * i // num for i in range(num + 1)]
