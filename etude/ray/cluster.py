# SPDX-License-Identifier: Apache-2.0
"""The cluster that an algorithm lives on: what it asks for, started when it asks for it."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from etude.algorithms.acting import ActingAlgorithm
from etude.algorithms.algorithm import Algorithm
from etude.algorithms.config import AlgorithmConfig
from etude.algorithms.engine import Ray
from etude.algorithms.offline import OfflineAlgorithm
from etude.errors import SettingsError
from etude.ray.resources import actors_of
from etude.ray.start import check_room, ensure_started, let_go

if TYPE_CHECKING:
    from etude.algorithms.feed import Feed
    from etude.ray.evaluation import EvaluationRunners
    from etude.ray.learners import Learners
    from etude.ray.runners import Runners


P = TypeVar("P")


class RayCluster:
    """See `etude.algorithms.engine.Cluster`.

    Args:
        config: Of the algorithm.

    Raises:
        EngineError: there is no cluster to connect to, or the one started here lacks what is asked for.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        assert config.engine != "local"
        self.settings = settings = Ray() if config.engine == "ray" else config.engine
        self.num_learners = settings.num_learners
        self.has_evaluators = settings.num_evaluation_runners > 0
        self._parts: list[Any] = []
        if config.device != "cpu" and settings.num_learners and not settings.gpus_per_learner:
            raise SettingsError(
                f"`device` is {config.device!r}, but learners on the cluster have no GPUs: set `ray.gpus_per_learner`, "
                "and they learn on these."
            )
        wanted = actors_of(config)
        num_cpus = sum(each.get("CPU", 0.0) for each in wanted)
        self._is_ours = ensure_started(settings.address, settings.runtime_env, num_cpus)
        try:
            check_room(wanted, can_grow=not self._is_ours)
        except BaseException:
            self.close()
            raise

    def runners(self, algorithm: ActingAlgorithm[Any]) -> "Runners":
        """Start those of an algorithm."""
        from etude.ray.runners import Runners

        return self._kept(Runners(algorithm, self.settings, asynchronous=algorithm.collects_beside))

    def learners(self, algorithm: Algorithm[Any]) -> "Learners":
        """Start those of an algorithm."""
        from etude.ray.learners import Learners

        return self._kept(Learners(algorithm, self.settings))

    def evaluators(self, algorithm: Algorithm[Any]) -> "EvaluationRunners":
        """Start those of an algorithm.

        Raises:
            SettingsError: evaluations are to be recorded, or to call back, which these do not.
        """
        from etude.ray.evaluation import EvaluationRunners

        config = algorithm.config
        if isinstance(algorithm, OfflineAlgorithm) and (config.callbacks or config.record.path is not None):
            raise SettingsError(
                "`callbacks` and `record` are of evaluations here, which `ray.num_evaluation_runners` play elsewhere, "
                "without either: leave these runners out, and this process plays them."
            )
        return self._kept(EvaluationRunners(algorithm, self.settings))

    def feeds(self, algorithm: OfflineAlgorithm[Any]) -> "dict[str, Feed]":
        """What feeds each module with batches, where the algorithm learns here."""
        from etude.ray.data import open_feeds

        return open_feeds(algorithm, self.settings)

    def _kept(self, part: P) -> P:
        self._parts.append(part)
        return part

    def close(self) -> None:
        """End all that was started, and the cluster, if it was started for this."""
        parts, self._parts = self._parts, []
        with ExitStack() as closing:  # whatever fails on the way
            if self._is_ours:
                self._is_ours = False
                closing.callback(let_go)
            for part in parts:
                closing.callback(part.close)
