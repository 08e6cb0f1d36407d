# SPDX-License-Identifier: Apache-2.0
"""RayEngine: an algorithm's runners, learners and evaluation runners on a Ray cluster."""

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from etude.algorithms.engine import Engine, Learned, OfflineUpdate
from etude.algorithms.offline import OfflineAlgorithm
from etude.algorithms.play import Played
from etude.algorithms.ray_config import Ray
from etude.errors import SettingsError
from etude.experience import Experience
from etude.learners import Update, mean_of
from etude.ray.cluster import actors_of, check_room, ensure_started, release_cluster
from etude.runners import ModuleOf
from etude.spaces import Spaces

if TYPE_CHECKING:  # importing Ray Data takes seconds, and not all need it
    from etude.ray.learners import Learners
    from etude.ray.runners import EvaluationRunners, Runners

P = TypeVar("P", bound=Any)

_AT_ONCE = 32
"""The approximate number of a replay's batches that learners get together, rounded to whole gradient steps."""


class RayEngine(Engine):
    """The Ray engine. Each of its parts is started on first use; parts without actors run in this process.

    Args:
        algorithm: The `ActingAlgorithm` or `OfflineAlgorithm` that owns the runners and learners.

    Raises:
        SettingsError: the learners' device needs GPUs, but they have none; or evaluations that runners are to play have
            callbacks or are recorded, which these runners can't do.
    """

    def __init__(self, algorithm: Any) -> None:
        super().__init__(algorithm)
        config = algorithm.config
        self.settings = settings = Ray() if config.engine == "ray" else config.engine
        self._config = config
        self._runners: Runners | None = None
        self._learners: Learners | None = None
        self._ending = ExitStack()  # ends the rest even if something fails
        self._is_started = False
        self.is_asked = not settings.num_learners  # with learners, True once they are started
        if config.compute.device != "cpu" and settings.num_learners and not settings.gpus_per_learner:
            raise SettingsError(
                f"`compute.device` is {config.compute.device!r}, but learners have no GPUs: set `ray.gpus_per_learner`."
            )
        evaluates = config.env is not None and config.evaluation.interval and settings.num_evaluation_runners
        watches = config.callbacks or config.record.path is not None
        if evaluates and watches and isinstance(algorithm, OfflineAlgorithm):
            raise SettingsError(
                "`callbacks` and `record` do not work with `ray.num_evaluation_runners`: leave these runners out."
            )

    # -- acting -------------------------------------------------------------------------------------------------

    @property
    def has_envs(self) -> bool:
        """Whether the runners have been started."""
        return self._runners is not None

    def spaces(
        self, module_ids: list[str], module_of: ModuleOf | None, before: Mapping[str, Spaces] | None = None
    ) -> dict[str, Spaces]:
        """The spaces of each module on the env's side; starts the runners."""
        if self._runners is None:
            from etude.ray.runners import Runners

            self._start()
            self._runners = self._kept(Runners(self._algorithm, self.settings))
            self.samples_in_background = self._runners.asynchronous
        return self._runners.spaces(module_ids, module_of, before)

    def runner(self) -> "Runners":  # type: ignore[override]
        """All runners, as one; also prepares recording if the settings ask for it."""
        assert self._runners is not None  # `spaces` has started them
        self._algorithm.recorder.open()
        return self._runners

    def can_resume(self, state: Mapping[str, Any]) -> bool:
        """Whether ``state`` comes from runners on a cluster."""
        return "lives" in state

    @property
    def is_repeatable(self) -> bool:
        """False: which steps are collected, and in which order, depends on timing."""
        return False

    # -- learning -----------------------------------------------------------------------------------------------

    @property
    def learners(self) -> "Learners | None":
        """The learners that share each update, started on first use. None: this process learns."""
        if self._learners is None and self.settings.num_learners:
            from etude.ray.learners import Learners

            self._start()
            self._learners = self._kept(Learners(self._algorithm, self.settings))
            self.is_asked = True
        return self._learners

    def update(self, parts: Mapping[str, Experience]) -> dict[str, Update] | None:
        """Update each module from raw experience, while more is collected if the algorithm allows that."""
        algorithm, learners = self._algorithm, self.learners
        if learners is None:
            return super().update(parts)
        updates: dict[str, Update] | None
        seen = {name: algorithm.connected(name, exp) for name, exp in parts.items()}
        if algorithm.collects_in_background:
            with algorithm.timed("update"):
                updates = learners.update_next(seen, algorithm.env_steps)
        else:
            batches = {name: algorithm.prepared(name, exp) for name, exp in seen.items()}
            with algorithm.timed("update"):
                updates = learners.update(batches, algorithm.env_steps)
            for name, exp in seen.items():
                learner = algorithm.learner.modules[name]
                learner.connectors.update(exp, learner.module)
        for name, exp in parts.items():
            algorithm.policies[name].connectors.update(exp)
        return updates

    def update_from(self, module_id: str, batches: Iterable[Any], learned: Learned | None = None) -> Update:
        """Update one module from batches. With ``learned``, several batches are drawn before the first is used."""
        algorithm, learners = self._algorithm, self.learners
        if learners is None:
            return super().update_from(module_id, batches, learned)
        if learned is None:
            return learners.update_from(module_id, batches, algorithm.env_steps)[0]
        done, accumulate, given = [], algorithm.config.optimizer.accumulate, iter(batches)
        while some := list(islice(given, max(1, _AT_ONCE // accumulate) * accumulate)):
            update, kept = learners.update_from(module_id, some, algorithm.env_steps)
            for rows in kept:
                learned(rows)
            done.append(update)
        return mean_of(done)

    def train(self) -> OfflineUpdate:
        """An iteration's gradient steps of each module from the recording, which the learners read themselves."""
        learners = self.learners
        if learners is None:
            return super().train()
        begin = time.perf_counter()
        done = learners.train(self._algorithm.config.updates_per_iteration)
        return OfflineUpdate(*done, time.perf_counter() - begin)

    def pull(self) -> None:
        """Load the learners' state here, if they were started."""
        if self._learners is not None:
            self._learners.pull()

    def push(self) -> None:
        """Send the state here to the learners, if they were started."""
        if self._learners is not None:
            self._learners.push()

    def stats(self) -> dict[str, float]:
        """The learners' counts."""
        return {} if self._learners is None else self._learners.stats()

    # -- the rest -----------------------------------------------------------------------------------------------

    @cached_property
    def evaluators(self) -> "EvaluationRunners | None":
        """Runners that play evaluations during training, started on first use; None if there are none."""
        if not self.settings.num_evaluation_runners:
            return None
        from etude.ray.runners import EvaluationRunners

        self._start()
        return self._kept(EvaluationRunners(self._algorithm, self.settings))

    def evaluate(self, num_episodes: int, seed: int) -> Played | None:
        """Play whole episodes. With evaluation runners, this returns the results of the previous call."""
        evaluators = self.evaluators
        return super().evaluate(num_episodes, seed) if evaluators is None else evaluators.next(num_episodes, seed=seed)

    def last_evaluation(self) -> Played | None:
        """Wait for the evaluation that was begun last, and return it."""
        evaluators = self.evaluators
        return super().last_evaluation() if evaluators is None else evaluators.finished()

    def _start(self) -> None:
        """Connect to the cluster, or start one.

        Raises:
            EngineError: there is no cluster to connect to, or a cluster started here lacks resources.
        """
        if self._is_started:
            return
        wanted = actors_of(self._config)
        num_cpus = sum(each.get("CPU", 0.0) for each in wanted)
        is_ours = ensure_started(self.settings.address, self.settings.runtime_env, num_cpus)
        if is_ours:
            self._ending.callback(release_cluster)
        self._is_started = True
        try:
            check_room(wanted, can_grow=not is_ours)
        except BaseException:
            self.close()
            raise

    def _kept(self, part: P) -> P:
        self._ending.callback(part.close)
        return part

    def close(self) -> None:
        """End everything that was started, and the cluster if it was started for this."""
        self._runners, self._is_started, self.samples_in_background = None, False, False
        self._ending.close()
