# SPDX-License-Identifier: Apache-2.0
"""Runners: many runners of a cluster in place of one here."""

import logging
from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

from etude.algorithms.ray_config import Ray
from etude.errors import EngineError
from etude.experience import Experience
from etude.policies import PolicyLike
from etude.ray.dealing import deal, find_late, size_for
from etude.ray.fragments import put_together
from etude.ray.members import Fragment
from etude.ray.stage import Stage
from etude.ray.tally import Tally
from etude.runners import Finished, ModuleOf
from etude.spaces import Spaces

if TYPE_CHECKING:
    from etude.algorithms.acting import ActingAlgorithm

_log = logging.getLogger("etude.ray")

_LOOK = 0.02  # seconds between two looks at who is late


class Runners:
    """Lets runners on a cluster act, each with `num_envs` envs of its own, and gives what they make as one runner does.

    Where the learner waits for them, what was asked for is dealt out in fragments, taken as they come, and made by the
    newest weights; as a rule exactly as much comes. A runner that lags far behind the others is not waited for: others
    make up for it, and its fragment counts in the collection in which it comes. So a collection may hold up to a
    fragment more than was asked for, and steps by older weights (``policy_lag``).

    Else each runner has `in_flight` fragments to make at any time, and goes on while the learner learns. None is ever
    thrown away: when the learner is slow, runners wait for it.

    The same seed gives each runner the same stream of experience; which fragments a collection holds follows from that
    where `fragment_steps` is `num_steps / num_runners`, the learner waits, and no runner lags.

    Callbacks run where the envs are, a copy of each in each runner; what they log comes with the finished episodes,
    what they keep is not in checkpoints.

    Args:
        algorithm: Whose modules act.
        settings: Of the cluster.
        asynchronous: The learner does not wait for all that it wants.

    Raises:
        SettingsError: the config can't be sent to other processes.
    """

    def __init__(self, algorithm: "ActingAlgorithm[Any]", settings: Ray, *, asynchronous: bool = False) -> None:
        self._algorithm, self._settings, self._asynchronous = algorithm, settings, asynchronous
        self._by_agent = algorithm.config.count_steps_by == "agent_steps"
        self._stage = Stage(algorithm, settings)
        self._tally = Tally(algorithm.config.num_envs)

    def spaces(
        self, module_ids: list[str], module_of: ModuleOf | None, known: Mapping[str, Spaces] | None = None
    ) -> dict[str, Spaces]:
        """The spaces of each module on the env's side; this process needs no env of its own for it.

        Raises:
            EnvError: the envs can't be made.
        """
        return self._stage.spaces(module_ids, module_of, known)

    def set_policies(
        self, policies: PolicyLike | Mapping[str, PolicyLike], *, module_of: ModuleOf | None = None
    ) -> None:
        """Let the algorithm's policies act from now on, which these are. The running episodes are abandoned."""
        self.begin_anew()

    def begin_anew(self) -> None:
        """Abandon the running episodes, and what was not yet taken: runners begin new ones with the newest modules."""
        self._stage.begin_anew()

    # -- collecting ---------------------------------------------------------------------------------------------

    def collect_each(
        self,
        *,
        num_steps: int | None = None,
        num_episodes: int | None = None,
        whole_episodes: bool = False,
        explore: bool = True,
    ) -> dict[str | None, Experience]:
        """Give experience by module id, see `Runner.collect_each`.

        Args:
            num_steps: How many steps, see the class; at least these where runners go on beside the learner.
            num_episodes: Is refused: evaluations have runners of their own.
            whole_episodes: Each runner gives only episodes that have ended.
            explore: Draw actions; else take the most likely ones.

        Raises:
            EngineError: runners were lost more often than they may be, or all of them.
            Exception: what an env, a connector or a module raised, with a note of where.
        """
        if num_episodes is not None or num_steps is None or num_steps < 1:
            raise EngineError("runners of a cluster collect steps, at least one: give num_steps, not num_episodes.")
        self._stage.ready()
        begin = monotonic()
        taken = self._gathered(num_steps, (whole_episodes, explore))
        if self._asynchronous:
            self._ask_ahead(num_steps, (whole_episodes, explore))
        self._tally.counts["sample_wait_s"] += monotonic() - begin
        joined = self._algorithm.config.max_trajectory_length is None
        return put_together(taken, joined=joined)

    def _gathered(self, num_steps: int, key: tuple[bool, bool]) -> list[Fragment]:
        """Fragments of enough steps."""
        taken: list[Fragment] = []
        crew, have, begin = self._stage.crew, 0, monotonic()
        size = self._settings.fragment_steps or size_for(crew.members, num_steps, self._settings.num_runners)
        while have < num_steps:
            if self._asynchronous:
                self._ask_ahead(num_steps, key)
            else:
                self._deal(num_steps, num_steps - have, size, key)
            if taken and monotonic() - begin > self._settings.sample_timeout:
                self._tally.counts["sample_timeouts"] += 1
                break
            fragment = self._stage.next(_LOOK if taken else 0.5)
            if fragment is None:
                find_late(crew.members)
            elif fragment.key != key:
                crew.lose(1, fragment.report.env_steps)
            else:
                taken.append(fragment)
                have += fragment.report.agent_steps if self._by_agent else fragment.report.env_steps
                self._tally.add(fragment, self._stage.seq_nos())
        return taken

    # -- asking -------------------------------------------------------------------------------------------------

    def _deal(self, whole: int, left: int, size: int, key: tuple[bool, bool]) -> None:
        """Ask for the steps that are left of a collection, of those that are free."""
        for member, steps in deal(self._stage.crew.members, whole, left, size):
            self._stage.ask(member, steps, key)

    def _ask_ahead(self, num_steps: int, key: tuple[bool, bool]) -> None:
        """Let each runner have as many fragments to make as are allowed."""
        size = self._settings.fragment_steps or num_steps
        for member in self._stage.crew.members:
            for _ in range(self._settings.in_flight - sum(1 for ask in member.asks if ask.steps)):
                self._stage.ask(member, size, key)

    # -- the rest -----------------------------------------------------------------------------------------------

    @property
    def env_steps(self) -> int:
        """Steps of envs over the lifetime."""
        return self._tally.env_steps

    @env_steps.setter
    def env_steps(self, steps: int) -> None:
        self._tally.env_steps = steps

    @property
    def agent_steps(self) -> int:
        """Steps of agents likewise."""
        return self._tally.agent_steps

    @agent_steps.setter
    def agent_steps(self, steps: int) -> None:
        self._tally.agent_steps = steps

    @property
    def times(self) -> dict[str, float]:
        """Seconds by phase, of all runners together; see `Runner.times`."""
        return self._tally.times

    @property
    def turns(self) -> int:
        """Turns of all runners together."""
        return self._tally.turns

    def take_finished(self) -> Finished:
        """See `Runner.take_finished`: episodes of all runners. ``envs`` are numbered over all of them."""
        return self._tally.ended.take()

    def stats(self) -> dict[str, float]:
        """What was counted since this was last asked: of all envs, see `Arena.stats`; and of the runners.

        ``runner_restarts``; ``hung_runners`` among them; ``lost_fragments``; ``lost_steps``, those of fragments whose
        length is known, and those that envs failed in; ``sample_timeouts``; ``sample_wait_s``, the seconds in which the
        learner waited for experience; ``policy_lag``, the updates of a module since the weights that made a step, in
        the mean over steps.
        """
        counts = self._tally.take_counts()
        for name, count in self._stage.crew.take_counts().items():
            counts[name] = counts.get(name, 0.0) + count
        return counts

    def state_dict(self) -> dict[str, Any]:
        """The counts, and what gives other episodes to a run that goes on; running episodes are not kept.

        What was recorded is on the disk then, but for unfinished episodes that are held.
        """
        stage = self._stage
        stage.flush()
        return {
            "runners": "ray",
            "steps": [self.env_steps, self.agent_steps],
            "lives": stage.first_life + max((member.life for member in stage.crew.members), default=0) + 1,
            "recorded": self._algorithm.config.record.path,
        }

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Go on from `state_dict`, in new episodes."""
        self.env_steps, self.agent_steps = state["steps"]
        self._stage.first_life, self._stage.recorded_before = state["lives"], state["recorded"]
        self.begin_anew()
        return "new episodes: those of remote runners are not kept in checkpoints"

    def close(self) -> None:
        """Close the envs and what is recorded, and end the runners. Does nothing the second time.

        Raises:
            DataError: a write failed.
        """
        self._stage.close()
