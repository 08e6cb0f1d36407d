# SPDX-License-Identifier: Apache-2.0
"""Stage: the runners of an algorithm with what they act by: modules, weights, and where to record."""

import contextlib
import logging
import sys
from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from etude.algorithms.ray_config import Ray
from etude.errors import DataError
from etude.ray.crew import Crew
from etude.ray.members import Fragment, Member
from etude.ray.policies import Broadcast, acting_of, known_as, sent
from etude.ray.runner_actor import Order, RunnerActor, seed_of
from etude.ray.start import check_connected, connection, room
from etude.runners import ModuleOf
from etude.spaces import Spaces

if TYPE_CHECKING:
    from etude.algorithms.acting import ActingAlgorithm
    from etude.ray.recording import SharedRecording

_log = logging.getLogger("etude.ray")
_PATIENCE = 5.0  # seconds that envs have to close


class Stage:
    """Starts the runners of an algorithm, and lets them act by its newest modules.

    Args:
        algorithm: Whose modules act.
        settings: Of the cluster.

    Raises:
        SettingsError: the config can't be sent to other processes.
    """

    def __init__(self, algorithm: "ActingAlgorithm[Any]", settings: Ray) -> None:
        self._algorithm, self._settings = algorithm, settings
        self._home = connection()
        modules = None if algorithm.config.modules is None else tuple(algorithm.config.modules)
        self._config_ref = sent(algorithm.config, module=None, modules=modules, device="cpu")
        self._cast_ref: Any = None  # of those that act now; None before they are known
        self._cast_version = 0  # of the weights in it
        self._broadcast = Broadcast()
        self._recording: SharedRecording | None = None
        self.first_life = 0
        """The life of runners that are in their first one here, where the run was loaded."""
        self.recorded_before: str | None = None
        """The recording that a loaded run had begun."""
        self._waited = monotonic()
        self.crew = Crew(settings, self._make, self._begin)

    def _make(self, number: int) -> Any:
        own = self._settings
        remote: Any = ray.remote
        actor = remote(concurrency_groups={"pulse": 1})(RunnerActor)
        resources = dict(own.resources_per_runner or {})
        options = {"num_cpus": own.cpus_per_runner, "num_gpus": own.gpus_per_runner, "resources": resources}
        device = "cuda" if own.gpus_per_runner else "cpu"
        return actor.options(**options).remote(self._config_ref, number, device)

    def spaces(
        self, module_ids: list[str], module_of: ModuleOf | None, known: Mapping[str, Spaces] | None = None
    ) -> dict[str, Spaces]:
        """The spaces of each module on the env's side; this process needs no env of its own for it.

        Raises:
            EnvError: the envs can't be made.
        """
        while True:
            for member in [member for member in self.crew.members if member.pid]:
                try:
                    found: dict[str, Spaces] = ray.get(member.actor.spaces.remote(module_ids, module_of, known))
                except RayError as error:
                    self.crew.failed(member, error)
                else:
                    return found
            self.next(1.0)

    def begin_anew(self) -> None:
        """Abandon the running episodes, and what was not yet taken: runners begin new ones with the newest modules."""
        self.crew.forget()
        if self._cast_ref is not None:
            self._cast_ref = None
            for member in self.crew.members:
                member.life += 1

    def _begin(self, member: Member) -> None:
        """Let a runner act, which has envs and nothing else."""
        if self._cast_ref is None:
            return  # nobody acts yet
        record = None if self._recording is None else self._recording.job()
        life = self.first_life + member.life
        seed = seed_of(self._algorithm.runner_seed, member.number, life)
        version = self._broadcast.version
        member.has_begun, member.sent = False, (version if version == self._cast_version else -1, -1, 0)
        self.crew.ask(member, member.actor.begin.remote(self._cast_ref, seed, life, record))

    def ready(self) -> None:
        """See that all that act are known to the runners, and whatever has changed of it."""
        check_connected(self._home)
        algorithm, broadcast = self._algorithm, self._broadcast
        before = dict(broadcast.seq_nos)
        ref = getattr(algorithm.engine, "weights_ref", None)  # of learners elsewhere, if there are some
        if self.crew.must_send_again:
            self.crew.must_send_again, ref = False, None
            broadcast.put_again()
        broadcast.refresh(algorithm, ref)
        if any(broadcast.seq_nos.get(name, 0) < seq_no for name, seq_no in before.items()):
            self.begin_anew()  # an earlier state was loaded: runners would take its weights for old ones
        if self._cast_ref is None:
            self._begin_all()

    def _begin_all(self) -> None:
        own = self._algorithm.config.record
        if own.path is not None and self._recording is None:
            from etude.ray.recording import SharedRecording  # needs pyarrow, which acting does not

            self._recording = SharedRecording(self._algorithm, goes_on=own.path == self.recorded_before)
        self._cast_ref, self._cast_version = ray.put(acting_of(self._algorithm)), self._broadcast.version
        for member in self.crew.members:
            self._begin(member)
        begin = self._waited = monotonic()
        while not all(member.has_begun for member in self.crew.members):
            absent = [member.number for member in self.crew.members if not member.has_begun]
            is_long = monotonic() - begin > self._settings.sample_timeout
            if is_long and len(absent) < len(self.crew.members):
                _log.warning(
                    "of the runners, %s could not begin within %g s; the others go on without. %s",
                    absent,
                    self._settings.sample_timeout,
                    room(),
                )
                break
            self.next(1.0)

    def next(self, timeout: float) -> Fragment | None:
        """See `Crew.next`; says it where nothing has come for long."""
        fragment = self.crew.next(timeout)
        if self.crew.must_send_again:
            self.ready()
        if fragment is not None:
            self._waited = monotonic()
        elif monotonic() - self._waited > self._settings.sample_timeout:
            self._waited = monotonic()
            _log.warning("no runner has given anything for %g s. %s", self._settings.sample_timeout, room())
        return fragment

    def seq_nos(self) -> dict[str | None, int]:
        """The updates of each module, as runners call it."""
        is_only = self._algorithm.config.modules is None
        return {known_as(name, is_only=is_only): seq_no for name, seq_no in self._broadcast.seq_nos.items()}

    def ask(self, member: Member, steps: int, key: tuple[bool, bool]) -> None:
        """Ask a runner for a fragment, by the newest weights."""
        broadcast = self._broadcast
        version, news_version, meta_version = member.sent
        now = (broadcast.version, broadcast.news_version, 0)
        meta = None
        if self._recording is not None:
            self._recording.count(steps)
            now = (*now[:2], self._recording.version)
            meta = None if meta_version == now[2] else self._recording.meta
        order = Order(
            num_steps=steps,
            whole_episodes=key[0],
            explore=key[1],
            seq_nos=broadcast.seq_nos,
            news=None if news_version == broadcast.news_version else broadcast.news,
            meta=meta,
        )
        weights = None if version == broadcast.version else broadcast.ref
        report, parts = member.actor.collect.remote(order, weights)
        member.sent = now
        self.crew.ask(member, report, parts, steps=steps, key=key)

    def flush(self) -> None:
        """Put on the disk what was recorded, but for unfinished episodes that are held.

        Raises:
            DataError: a write failed.
        """
        if self._recording is not None and connection() == self._home:
            refs = [member.actor.flush.remote() for member in self.crew.members]
            done, _ = ray.wait(refs, num_returns=len(refs), timeout=self._settings.sample_timeout)
            for member, ref in zip(list(self.crew.members), refs, strict=True):
                if ref not in done:
                    _log.warning(
                        "runner %d was still busy after %g s (`ray.sample_timeout`), so that the last it has recorded "
                        "is not on the disk yet: a run that goes on from this checkpoint may lack it.",
                        member.number,
                        self._settings.sample_timeout,
                    )
                    continue
                try:
                    member.unwritten = ray.get(ref)
                except RayError as error:
                    self.crew.failed(member, error)

    def close(self) -> None:
        """Close the envs and what is recorded, and end the runners. Does nothing the second time.

        What is recorded has `sample_timeout` to be written, unless this ends because someone has interrupted it.

        Raises:
            DataError: a write failed.
        """
        recording, self._recording = self._recording, None
        if connection() != self._home:
            return  # they have ended with the cluster
        try:
            is_hasty = recording is None or isinstance(sys.exc_info()[1], KeyboardInterrupt)
            self.crew.end(_PATIENCE if is_hasty else self._settings.sample_timeout)
        except BaseException:
            with contextlib.suppress(DataError):  # what runners have told first is raised
                if recording is not None:
                    recording.finish()
            raise
        if recording is not None:
            recording.finish()
