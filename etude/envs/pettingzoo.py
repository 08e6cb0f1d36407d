# SPDX-License-Identifier: Apache-2.0
"""PettingZoo's envs, whose agents act all at once (``ParallelEnv``) or one after the other (``AECEnv``)."""

import copy
from typing import Any, Literal

from etude.envs.agents import Agents, check_dicts
from etude.envs.copies import Row
from etude.errors import EnvError


def api_of(env: object) -> Literal["parallel", "aec"] | None:
    """Which of PettingZoo's two kinds an env is; None: it is none of them. PettingZoo is not imported for this."""
    for cls in type(env).__mro__:
        if cls.__module__.partition(".")[0] == "pettingzoo":
            if cls.__name__ == "ParallelEnv":
                return "parallel"
            if cls.__name__ == "AECEnv":
                return "aec"
    return None


class ParallelCopy:
    """A copy of a PettingZoo ``ParallelEnv``: all its agents act in each step. See `Copy`.

    Raises:
        EnvError: the env does not say who its agents may be, or what their spaces are.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.env_t = 0
        self.over = True
        self.infos: Any = {}
        self._who = Agents(env, _name(env))
        self.agents: tuple[str | None, ...] = self._who.names
        self.obs_spaces, self.action_spaces = self._who.obs_spaces, self._who.action_spaces
        self._is_checked = False

    def reset(self, seed: int | None) -> list[Row]:
        """Begin an episode; the first rows of the agents that are there at its start."""
        who = self._who
        given = self.env.reset(seed=seed)
        check_dicts(given, True, who.env_name)
        who.reset()
        obs, self.infos = given
        rows = [who.show(agent, obs.get(agent)) for agent in self.env.agents]
        if not rows:
            raise _nobody(who.env_name)
        self.env_t, self.over = 0, False
        return rows

    def step(self, actions: dict[int, Any]) -> list[Row]:
        """Act for all agents that are there; rows of those that go on, of those that ended, and of new ones."""
        who = self._who
        acting = who.act(actions)
        given = self.env.step(acting)
        if not self._is_checked:
            check_dicts(given, False, who.env_name)
            self._is_checked = True
        obs, reward, terminated, truncated, self.infos = given
        self.env_t += 1
        who.pay(reward)
        who.note(self.infos)
        rows: list[Row] = []
        there = dict.fromkeys(self.env.agents)
        newcomers = [agent for agent in there if agent not in acting]
        for agent in (*acting, *newcomers):
            flags = bool(terminated.get(agent)), bool(truncated.get(agent))
            if True in flags:
                rows += who.end(agent, obs.get(agent), *flags)
            elif agent in there:
                rows.append(who.show(agent, obs.get(agent)))
            else:
                raise _left(agent, who.env_name)
        self.over = not who.waiting
        return rows

    def truncate(self, rows: list[Row]) -> list[Row]:
        """See `Copy.truncate`."""
        self.over = True
        return self._who.stop(rows)

    def close(self) -> None:
        """Close the env."""
        self.env.close()


class AECCopy:
    """A copy of a PettingZoo ``AECEnv``: its agents act one after the other. See `Copy`.

    A step of the env is one of an agent that lives; those with which ended agents leave are made here and not counted.
    Rewards are summed from ``env.rewards``, after each step, which is what PettingZoo's own test of an env compares
    ``env.last()`` with: so none is lost of agents that leave without another turn, or are stopped.

    Raises:
        EnvError: the env does not say who its agents may be, or what their spaces are.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.env_t = 0
        self.over = True
        self.infos: dict[Any, Any] = {}
        """By agent, of those that have rows."""
        self._who = Agents(env, _name(env))
        self.agents: tuple[str | None, ...] = self._who.names
        self.obs_spaces, self.action_spaces = self._who.obs_spaces, self._who.action_spaces
        self._there: list[Any] = []

    def reset(self, seed: int | None) -> list[Row]:
        """Begin an episode; the first row of the agent whose turn it is."""
        self.env.reset(seed=seed)
        self._who.reset()
        self.env_t = 0
        rows = self._rows()
        if self.over:
            raise _nobody(self._who.env_name)
        return rows

    def step(self, actions: dict[int, Any]) -> list[Row]:
        """Act for the agent that waits; rows of those that ended, then of the one whose turn it is."""
        (action,) = self._who.act(actions).values()
        self.env.step(action)
        self.env_t += 1
        self._who.pay(self.env.rewards)
        return self._rows()

    def truncate(self, rows: list[Row]) -> list[Row]:
        """See `Copy.truncate`: the env is asked what agents see whose turn it is not."""
        env, who = self.env, self._who
        rows = copy.deepcopy(rows)
        shown = {row.agent for row in rows}
        ends: list[Row] = []
        for agent in who.inside():
            if self.agents.index(str(agent)) not in shown:
                terminated, truncated = bool(env.terminations[agent]), bool(env.truncations[agent])
                ends += who.end(agent, copy.deepcopy(env.observe(agent)), terminated, truncated or not terminated)
        self.over = True
        return who.stop(rows) + ends

    def _rows(self) -> list[Row]:
        env, who = self.env, self._who
        rows: list[Row] = []
        self.infos = {}
        while there := env.agents:
            agent = env.agent_selection
            obs, _, terminated, truncated, info = env.last()
            self.infos[agent] = info
            who.note({agent: info})
            if not (terminated or truncated):
                rows.append(who.show(agent, obs))
                break
            rows += who.end(agent, copy.deepcopy(obs), bool(terminated), bool(truncated))  # as envs may write over it
            env.step(None)
            if agent in env.agents:
                raise EnvError(
                    f"{who.env_name}: agent {agent!r} ended and was stepped with None, but is still in env.agents: "
                    "call self._was_dead_step(action) in step() for agents that have ended."
                )
            who.pay(env.rewards)
        if there != self._there:
            self._there = list(there)
            rows += self._vanished()
        self.over = not there
        return rows

    def _vanished(self) -> list[Row]:
        """The ends of agents that are gone without having been selected once more, so that they were shown nothing."""
        env, who = self.env, self._who
        rows: list[Row] = []
        for agent in who.inside():
            if agent not in self._there:
                flags = bool(env.terminations.get(agent)), bool(env.truncations.get(agent))
                if True not in flags:
                    raise _left(agent, who.env_name)
                rows += who.end(agent, None, *flags)
        return rows

    def close(self) -> None:
        """Close the env."""
        self.env.close()


def _name(env: Any) -> str:
    return str((getattr(env, "metadata", None) or {}).get("name") or type(env.unwrapped).__name__)


def _nobody(env_name: str) -> EnvError:
    return EnvError(f"{env_name}: after reset() nobody is in env.agents who could act.")


def _left(agent: Any, env_name: str) -> EnvError:
    return EnvError(
        f"{env_name}: agent {agent!r} is no longer in env.agents, but was neither terminated nor truncated: set one of "
        "these for it in the step in which it leaves."
    )
