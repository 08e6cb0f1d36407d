# SPDX-License-Identifier: Apache-2.0
"""What an algorithm asks of the cluster that its runners and learners live on."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from etude.algorithms.policies import Spaces
from etude.algorithms.result import Evaluation
from etude.experience import Experience
from etude.learners import Update
from etude.learners.loss import Figures
from etude.policies import PolicyLike
from etude.runners import Finished, ModuleOf

if TYPE_CHECKING:
    from etude.algorithms.acting import ActingAlgorithm
    from etude.algorithms.base import Algorithm
    from etude.algorithms.feeding import Feed
    from etude.algorithms.offline import OfflineAlgorithm


class Collector(Protocol):
    """What collects experience for an algorithm: a `Runner`, or many of them elsewhere; see there."""

    env_steps: int
    agent_steps: int

    @property
    def times(self) -> Mapping[str, float]:
        """Seconds by phase."""

    @property
    def turns(self) -> int:
        """Turns made."""

    def collect_each(
        self, *, num_steps: int | None = None, whole_episodes: bool = False, explore: bool = True
    ) -> dict[str | None, Experience]:
        """Act, and give what was lived through."""

    def take_finished(self) -> Finished:
        """What episodes brought that ended since this was last asked."""

    def stats(self) -> dict[str, float]:
        """What was counted since this was last asked."""

    def begin_anew(self) -> None:
        """Abandon the running episodes."""

    def set_policies(
        self, policies: PolicyLike | Mapping[str, PolicyLike], *, module_of: ModuleOf | None = None
    ) -> None:
        """Let these act from now on."""

    def state_dict(self) -> dict[str, Any]:
        """What the next collection depends on."""

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Go on from `state_dict`; says how."""

    def close(self) -> None:
        """Close the envs."""


class Runners(Collector, Protocol):
    """Runners elsewhere, each with envs of its own. They keep the recording, where there is to be one."""

    def spaces(
        self, module_ids: list[str], module_of: ModuleOf | None, known: Mapping[str, Spaces] | None = None
    ) -> dict[str, Spaces]:
        """See `etude.algorithms.policies.spaces_in`."""


class Learners(Protocol):
    """Learners elsewhere, which share each update. After it, the algorithm's own modules have the new weights."""

    def update(self, parts: Mapping[str, Experience], env_steps: int) -> dict[str, Update]:
        """Let each module learn from prepared experience, as `OnPolicyAlgorithm.learn` does."""

    def update_next(self, seen: Mapping[str, Experience], env_steps: int) -> dict[str, Update] | None:
        """As `update` of what modules saw, while more is collected; gives what the one before brought, if any."""

    def update_from(self, module_id: str, batches: Iterable[Any], env_steps: int) -> tuple[Update, list[Figures]]:
        """As `ModuleLearner.update_from`, and what the loss kept of each batch, by row (`ModuleLearner.kept`)."""

    def train(self, num_updates: int) -> tuple[dict[str, Update], dict[str, float], str]:
        """Gradient steps of each module that is trained from the recording, which learners read themselves.

        Gives what they brought, how the data flowed, and the slowest layer, see `Result.data` and `Result.bottleneck`.
        """

    def pull(self) -> None:
        """Bring all that learners know to the algorithm: before a checkpoint."""

    def push(self) -> None:
        """Bring all that the algorithm knows to the learners: after a load, or where modules have come or gone."""

    def stats(self) -> dict[str, float]:
        """What was counted since this was last asked, such as ``learner_restarts``."""


class Evaluators(Protocol):
    """Runners that play the episodes of evaluations while training goes on."""

    def next(self, num_episodes: int, *, seed: int | None) -> tuple[Evaluation | None, Finished | None]:
        """What the episodes brought that were asked for the last time; waits for their end. None the first time.

        Then lets the modules, as they are now, play so many without exploring; returns while they do.
        """


class Cluster(Protocol):
    """Where runners and learners live, if not here."""

    num_learners: int
    has_evaluators: bool

    def runners(self, algorithm: "ActingAlgorithm[Any]") -> Runners:
        """Start those of an algorithm."""

    def learners(self, algorithm: "Algorithm[Any]") -> Learners:
        """Start those of an algorithm."""

    def evaluators(self, algorithm: "Algorithm[Any]") -> Evaluators:
        """Start those of an algorithm."""

    def feeds(self, algorithm: "OfflineAlgorithm[Any]") -> "dict[str, Feed]":
        """What feeds each module with batches, where the algorithm learns here."""

    def close(self) -> None:
        """End all that was started."""
