# SPDX-License-Identifier: Apache-2.0
"""Tally: what is counted of the fragments that several runners have made."""

from collections import defaultdict
from collections.abc import Mapping

from etude.ray.fragments import Ended
from etude.ray.members import Fragment


class Tally:
    """Counts of fragments that were given out.

    Args:
        num_envs: Of each runner.
    """

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._behind = 0  # updates, summed over steps
        self._steps = 0
        self.ended = Ended(num_envs)
        self.counts: defaultdict[str, float] = defaultdict(float)
        """By name, since they were last taken."""
        self.env_steps = 0
        self.agent_steps = 0
        self.times: dict[str, float] = {}
        self.turns = 0

    def add(self, fragment: Fragment, seq_nos: Mapping[str | None, int]) -> None:
        """Count a fragment, while modules have had so many updates."""
        report = fragment.report
        self.env_steps += report.env_steps
        self.agent_steps += report.agent_steps
        self.turns += report.turns
        for name, seconds in report.times.items():
            self.times[name] = self.times.get(name, 0.0) + seconds
        for name, count in report.stats.items():
            self.counts[self._of_all(name, fragment.runner)] += count
        self.ended.add(fragment)
        for module_id, exp in fragment.parts.items():
            steps = exp.num_steps - int(exp.segments.lookback.sum())
            self._behind += steps * max(0, seq_nos.get(module_id, 0) - report.seq_nos[module_id])
            self._steps += steps

    def _of_all(self, name: str, runner: int) -> str:
        """The name of a count where envs are numbered over all runners."""
        before, _, env = name.partition("steps/env_")
        return f"steps/env_{runner * self._num_envs + int(env)}" if not before and env.isdecimal() else name

    def take_counts(self) -> dict[str, float]:
        """What was counted since this was last asked, with ``policy_lag``, which is a mean over steps."""
        found = {"sample_timeouts": 0.0, **self.counts, "policy_lag": self._behind / max(1, self._steps)}
        self.counts.clear()
        self._behind = self._steps = 0
        return found
