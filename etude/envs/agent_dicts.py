# SPDX-License-Identifier: Apache-2.0
"""Many agents in one env by dicts keyed by agent: a small protocol of our own."""

import copy
from collections.abc import Collection
from typing import Any, Final, Protocol

from etude.envs.agents import Agents, check_dicts
from etude.envs.copies import Row
from etude.errors import EnvError
from etude.spaces import Space

ALL: Final = "__all__"
"""The key in ``terminated`` and ``truncated`` that ends the episode for every agent."""
MAX_IDLE: Final = 1000
"""Steps in a row, and episodes in a row, in which no agent has anything to do, before that is an error."""


class MultiAgentEnv(Protocol):
    """An env in which several agents act: at the same time, in turns, or now and then. Nothing need be inherited.

    The agents that are in the obs dict act next, and no others: an agent may come late, sit out, and leave early. What
    it is rewarded between two of its actions belongs to the former of them; what it is rewarded before its first action
    belongs to that one. It ends by its own flag, or with all others by that of ``__all__``; its last observation is the
    one that comes beside the flag, if there is one. After its end it stays away until the next reset.
    """

    possible_agents: list[str]
    """Every agent that may ever take part."""

    def observation_space(self, agent: str) -> Space:
        """The space of an agent's observations. A dict ``observation_spaces`` does as well."""

    def action_space(self, agent: str) -> Space:
        """The space of an agent's actions. A dict ``action_spaces`` does as well."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode: observations of the agents that act first, and infos."""

    def step(
        self, action: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, Any]]:
        """Make a step with the actions of exactly those agents that were in the last obs dict; ``{}`` if none was.

        Returns:
            ``(obs, reward, terminated, truncated, info)``, each keyed by agent. Who is not in ``reward`` gets 0, who is
            not in a dict of flags goes on. ``terminated["__all__"]`` or ``truncated["__all__"]`` ends the episode; an
            agent without a flag of its own ends by that one. ``info[agent]["off_policy_action"]`` is the action that
            was taken where it was not the given one; ``info["__common__"]`` may hold what concerns no single agent.
        """


def has_agent_dicts(env: object) -> bool:
    """Whether an env has the looks of a `MultiAgentEnv`."""
    return hasattr(env, "possible_agents") and all(callable(getattr(env, name, None)) for name in ("reset", "step"))


class DictCopy:
    """A copy of an env that keeps to `MultiAgentEnv`. See `Copy`.

    Where nobody acts next, the env is stepped with ``{}`` until somebody does, and an episode that ends before anybody
    acts is passed over.

    Raises:
        EnvError: the env does not say who its agents are, or what their spaces are.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.env_t = 0
        self.over = True
        self.infos: Any = {}
        self._who = Agents(env, type(env).__name__)
        self.agents: tuple[str | None, ...] = self._who.names
        self.obs_spaces, self.action_spaces = self._who.obs_spaces, self._who.action_spaces
        self._is_checked = False

    def reset(self, seed: int | None) -> list[Row]:
        """Begin an episode; the first rows of the agents that act first."""
        who = self._who
        for _ in range(MAX_IDLE):
            given = self.env.reset(seed=seed)
            check_dicts(given, True, who.env_name)
            who.reset()
            self.env_t, self.over = 0, False
            obs, self.infos = given
            rows = [who.show(agent, value) for agent, value in obs.items()]
            if not who.waiting:
                rows = self._step({})
            if who.waiting:
                return rows
            seed = None  # an episode without a step is none
        raise EnvError(f"{who.env_name}: {MAX_IDLE} episodes in a row ended before any agent was shown anything.")

    def step(self, actions: dict[int, Any]) -> list[Row]:
        """Act for the agents that wait; rows of those that act next, and of those that ended."""
        return self._step(self._who.act(actions))

    def _step(self, actions: dict[Any, Any]) -> list[Row]:
        rows: list[Row] = []
        for _ in range(MAX_IDLE):
            given = self.env.step(actions)
            if not self._is_checked:
                check_dicts(given, False, self._who.env_name)
                self._is_checked = True
            self.env_t += 1
            new = self._rows(*given)
            if self._who.waiting or self.over:
                return rows + new
            rows += copy.deepcopy(new)  # the env may write over what it gave
            actions = {}
        raise EnvError(
            f"{self._who.env_name}: nobody acts, and the episode is not over, since {MAX_IDLE} steps. Show an "
            "observation to some agent, or end the episode with terminated['__all__'] or truncated['__all__']."
        )

    def _rows(self, obs: Any, reward: Any, terminated: Any, truncated: Any, infos: Any) -> list[Row]:
        who = self._who
        self.infos = infos
        who.pay(reward)
        who.note(infos)
        all_flags = bool(terminated.get(ALL)), bool(truncated.get(ALL))
        self.over = any(all_flags)
        ending = self._ending(terminated, truncated)
        rows = [who.show(agent, value) for agent, value in obs.items() if agent not in ending]
        for agent in ending:
            flags = bool(terminated.get(agent)), bool(truncated.get(agent))
            rows += who.end(agent, obs.get(agent), *(flags if any(flags) else all_flags))
        self.over = self.over or who.all_ended()
        return rows

    def _ending(self, terminated: Any, truncated: Any) -> Collection[Any]:
        """Whose flags are up: those who end now, and who ended before and are told of again."""
        if self.over:
            return self._who.ids
        if any(terminated.values()) or any(truncated.values()):
            return [agent for agent in {**terminated, **truncated} if terminated.get(agent) or truncated.get(agent)]
        return ()

    def truncate(self, rows: list[Row]) -> list[Row]:
        """See `Copy.truncate`: agents without a row end blind."""
        self.over = True
        return self._who.stop(rows)

    def close(self) -> None:
        """Close the env, if it can be."""
        if callable(close := getattr(self.env, "close", None)):
            close()
