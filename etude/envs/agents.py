# SPDX-License-Identifier: Apache-2.0
"""The agents of one env copy: which of them wait for an action, and what each of them is owed."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import gymnasium as gym

from etude.envs.copies import TAKEN, Row
from etude.envs.pool_checks import NUMBERS, check_reward
from etude.errors import EnvError
from etude.spaces import Space

_AWAY, _IN, _ENDED = range(3)  # not yet shown anything; between its first row and its end; after its end


class Agents:
    """The agents of one env copy: who they are, which of them wait for an action, and what each of them is owed.

    Args:
        env: Has ``possible_agents``, and ``observation_space(agent)`` or a dict ``observation_spaces``; so for actions.
        env_name: For errors.

    Raises:
        EnvError: ``env`` does not say who its agents are, or what their spaces are.
    """

    def __init__(self, env: Any, env_name: str) -> None:
        self.env_name = env_name
        self.ids: list[Any] = _agent_ids(env, env_name)
        self.names = tuple(str(agent) for agent in self.ids)
        self.obs_spaces = tuple(_space(env, "observation_space", agent, env_name) for agent in self.ids)
        self.action_spaces = tuple(_space(env, "action_space", agent, env_name) for agent in self.ids)
        self.waiting: set[int] = set()
        self._index = {agent: i for i, agent in enumerate(self.ids)}
        self.reset()

    def reset(self) -> None:
        """A new episode: nobody has been shown anything."""
        self.waiting.clear()
        self._state = [_AWAY] * len(self.ids)
        self._owed = [0.0] * len(self.ids)
        self._taken: dict[int, Any] = {}

    def act(self, actions: Mapping[int, Any]) -> dict[Any, Any]:
        """The actions by the env's own ids; from now on nobody waits."""
        if actions.keys() != self.waiting:
            given, wanted = ([self.names[i] for i in sorted(some)] for some in (actions, self.waiting))
            raise EnvError(f"{self.env_name}: actions came for the agents {given}, but {wanted} wait for one.")
        self.waiting.clear()
        ids = self.ids
        return {ids[i]: action for i, action in actions.items()}

    def pay(self, rewards: Mapping[Any, float]) -> None:
        """Keep rewards until the agents' next rows.

        Raises:
            EnvError: an agent is unknown, or has ended, or a reward is not a number.
        """
        for agent, reward in rewards.items():
            if reward.__class__ not in NUMBERS:
                check_reward(reward)
            if reward:
                try:
                    i = self._index[agent]
                except KeyError:
                    raise self._unknown(agent, "a reward") from None
                if self._state[i] == _ENDED:
                    raise EnvError(
                        f"{self.env_name}: agent {agent!r} got the reward {reward} after its end, where no step is "
                        "left to add it to. Give it in the step in which the agent ends."
                    )
                self._owed[i] += float(reward)

    def note(self, infos: Mapping[Any, Any]) -> None:
        """Keep what infos say about the actions that were taken until the agents' next rows."""
        for agent, info in infos.items():
            if isinstance(info, dict) and TAKEN in info and agent in self._index:
                self._taken[self._index[agent]] = info[TAKEN]

    def show(self, agent: Any, obs: Any) -> Row:
        """The row of an agent that acts next.

        Raises:
            EnvError: the agent is unknown, or has ended, or there is no observation for it.
        """
        try:
            i = self._index[agent]
        except KeyError:
            raise self._unknown(agent, "an observation") from None
        if obs is None:
            raise EnvError(f"{self.env_name}: it is the turn of agent {agent!r}, but there is no observation for it.")
        self.waiting.add(i)
        taken = self._taken.pop(i, None) if self._taken else None
        if self._state[i] == _IN:
            reward, self._owed[i] = self._owed[i], 0.0
            return Row(i, obs, reward, False, False, False, taken)
        if self._state[i] == _ENDED:
            raise EnvError(
                f"{self.env_name}: agent {agent!r} ended and appears again in the same episode. Let it sit out instead "
                "of ending it, or have one more agent in possible_agents for its next life."
            )
        self._state[i] = _IN
        return Row(i, obs, 0.0, False, False, True)  # what it is owed already goes to its first step

    def end(self, agent: Any, obs: Any, terminated: bool, truncated: bool) -> list[Row]:
        """The last row of an agent; [] where it has none: it never acted, or its end was told before.

        Raises:
            EnvError: the agent is unknown.
        """
        try:
            i = self._index[agent]
        except KeyError:
            raise self._unknown(agent, "an end") from None
        before, self._state[i] = self._state[i], _ENDED
        if before != _IN:
            return []
        return [Row(i, obs, self._owed[i], terminated, truncated, False, self._taken.pop(i, None))]

    def stop(self, rows: list[Row]) -> list[Row]:
        """Truncate all: ``rows``, which were just given, as ends, and those without a row blindly.

        Agents that begin in these rows have none then, as they never act.
        """
        self.waiting.clear()
        for row in rows:
            self._state[row.agent] = _ENDED
        ends = [row if row.terminated else row._replace(truncated=True) for row in rows if not row.first]
        for agent in self.inside():
            ends += self.end(agent, None, False, True)
        return ends

    def inside(self) -> list[Any]:
        """The ids of those that have begun and not ended."""
        return [agent for agent, state in zip(self.ids, self._state, strict=True) if state == _IN]

    def all_ended(self) -> bool:
        """Whether nobody can appear in this episode any more."""
        return self._state.count(_ENDED) == len(self.ids)

    def _unknown(self, agent: Any, what: str) -> EnvError:
        return EnvError(
            f"{self.env_name} gave {what} for agent {agent!r}, who is not in its possible_agents {self.ids}. "
            "Name there every agent that may ever appear."
        )


def _agent_ids(env: Any, env_name: str) -> list[Any]:
    agents = getattr(env, "possible_agents", None)
    if not isinstance(agents, Iterable) or not (ids := list(agents)):
        raise EnvError(
            f"{env_name} has no `possible_agents`: set it to the list of all agents that may ever appear, so that each "
            "has its place and its spaces before the first step."
        )
    if len({str(agent) for agent in ids}) < len(ids):
        raise EnvError(f"{env_name}: `possible_agents` names an agent twice: {ids}.")
    return ids


def _space(env: Any, name: str, agent: Any, env_name: str) -> Space:
    of: Callable[[Any], Any] | None = getattr(env, name, None)
    try:
        space = of(agent) if callable(of) else getattr(env, name + "s", {})[agent]
    except (AttributeError, LookupError, NotImplementedError) as error:
        raise _no_space(name, agent, env_name, repr(error)) from error
    if not isinstance(space, gym.Space):
        raise _no_space(name, agent, env_name, f"a {type(space).__name__}")
    return space


def _no_space(name: str, agent: Any, env_name: str, found: str) -> EnvError:
    return EnvError(
        f"{env_name} has no {name} for agent {agent!r}, but {found}: have a method `{name}(agent)` or a dict `{name}s` "
        "give a Gymnasium space for each of possible_agents."
    )


_RESET = ("obs", "info")
_STEP = ("obs", "reward", "terminated", "truncated", "info")


def check_dicts(given: Any, after_reset: bool, env_name: str) -> None:
    """See that an env gave dicts.

    Raises:
        EnvError: something else is among them, or there are more or fewer.
    """
    method, names = ("reset", _RESET) if after_reset else ("step", _STEP)
    if not isinstance(given, tuple) or len(given) != len(names) or not all(isinstance(x, Mapping) for x in given):
        types = [type(x).__name__ for x in given] if isinstance(given, tuple) else type(given).__name__
        raise EnvError(
            f"{env_name}: {method} must return ({', '.join(names)}), each a dict keyed by agent, but gave {types}."
        )
