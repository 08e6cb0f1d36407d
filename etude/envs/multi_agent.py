# SPDX-License-Identifier: Apache-2.0
"""Envs of several agents: PettingZoo's and those whose observations and actions are dicts keyed by agent."""

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, Literal, Protocol

import gymnasium as gym

from etude.envs.adapters import (
    NUMBERS,
    OFF_POLICY_ACTION,
    AgentStep,
    EnvAdapter,
    GymAdapter,
    ReducedEnv,
    check_reward,
    reduced_spaces,
)
from etude.errors import EnvError
from etude.settings import foreign_env
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


# -- the agents of one env ------------------------------------------------------------------------------------------

_AWAY, _IN, _ENDED = range(3)  # not yet shown anything; between its first row and its end; after its end


class AgentStates:
    """The agents of one env: who they are, which of them wait for an action, and what each of them is owed.

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
            if isinstance(info, dict) and OFF_POLICY_ACTION in info and agent in self._index:
                self._taken[self._index[agent]] = info[OFF_POLICY_ACTION]

    def show(self, agent: Any, obs: Any) -> AgentStep:
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
            return AgentStep(i, obs, reward, False, False, False, taken)
        if self._state[i] == _ENDED:
            raise EnvError(
                f"{self.env_name}: agent {agent!r} ended and appears again in the same episode. Let it sit out instead "
                "of ending it, or have one more agent in possible_agents for its next life."
            )
        self._state[i] = _IN
        return AgentStep(i, obs, 0.0, False, False, True)  # what it is owed already goes to its first step

    def end(self, agent: Any, obs: Any, terminated: bool, truncated: bool) -> list[AgentStep]:
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
        return [AgentStep(i, obs, self._owed[i], terminated, truncated, False, self._taken.pop(i, None))]

    def stop(self, rows: list[AgentStep]) -> list[AgentStep]:
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
        space, found = None, repr(error)
    else:
        found = f"a {type(space).__name__}"
    if isinstance(space, gym.Space):
        return space
    raise EnvError(
        f"{env_name} has no {name} for agent {agent!r}, but {found}: have a method `{name}(agent)` or a dict `{name}s` "
        "give a Gymnasium space for each of possible_agents."
    )


# -- one adapter for each API ---------------------------------------------------------------------------------------


class ManyAgentsAdapter(EnvAdapter):
    """The adapter of an env with several agents. `reset` first; `step` while it is not ``over``.

    Raises:
        EnvError: the env does not say who its agents are, or what their spaces are.
    """

    def __init__(self, env: Any, name: str) -> None:
        self._who = who = AgentStates(env, name)
        super().__init__(env, who.names, who.obs_spaces, who.action_spaces)
        self._is_checked = False

    def reset(self, seed: int | None) -> list[AgentStep]:
        """Begin an episode: a ``first`` row for each agent that waits. At least one does."""
        raise NotImplementedError

    def step(self, actions: dict[int, Any]) -> list[AgentStep]:
        """Act for exactly those agents whose last row waits; actions are nested as their spaces.

        A row for each agent that waits now, of which there is one unless the env is over, and one for each that ended;
        agents without a row are shown something later.
        """
        raise NotImplementedError

    def _reset_dicts(self, seed: int | None) -> dict[Any, Any]:
        """Reset an env that gives dicts by agent: the observations."""
        obs: dict[Any, Any]
        obs, self.infos = self._dicts("reset", ("obs", "info"), self.env.reset(seed=seed))
        self._who.reset()
        self.env_t, self.over = 0, False
        return obs

    def _step_dicts(self, actions: dict[Any, Any]) -> tuple[Any, Any, Any]:
        """Step an env that gives dicts by agent: the observations, ``terminated`` and ``truncated``."""
        given = self.env.step(actions)
        if not self._is_checked:
            self._dicts("step", ("obs", "reward", "terminated", "truncated", "info"), given)
            self._is_checked = True
        obs, reward, terminated, truncated, self.infos = given
        self.env_t += 1
        self._who.pay(reward)
        self._who.note(self.infos)
        return obs, terminated, truncated

    def _dicts(self, method: str, names: tuple[str, ...], given: Any) -> Any:
        """What a method of the env gave, if it is so many dicts."""
        if isinstance(given, tuple) and len(given) == len(names) and all(isinstance(x, Mapping) for x in given):
            return given
        types = [type(x).__name__ for x in given] if isinstance(given, tuple) else type(given).__name__
        raise EnvError(
            f"{self._who.env_name}: {method} must return ({', '.join(names)}), each a dict keyed by agent, but gave "
            f"{types}."
        )

    def truncate(self, rows: list[AgentStep]) -> list[AgentStep]:
        """Stop the episode after the step that gave ``rows``, since it was long enough; then it is over.

        The same rows, but all of them ends, without those that are ``first``; and an end for each other agent whose
        episode runs, with the reward that it was not yet given, and without an observation.
        """
        self.over = True
        return self._who.stop(rows)


class DictAdapter(ManyAgentsAdapter):
    """The adapter of an env that follows `MultiAgentEnv`.

    Where nobody acts next, the env is stepped with ``{}`` until somebody does, and an episode that ends before anybody
    acts is passed over.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env, type(env).__name__)

    def reset(self, seed: int | None) -> list[AgentStep]:
        """Begin an episode; the first rows of the agents that act first."""
        who = self._who
        for _ in range(MAX_IDLE):
            rows = [who.show(agent, value) for agent, value in self._reset_dicts(seed).items()]
            if not who.waiting:
                rows = self._step({})
            if who.waiting:
                return rows
            seed = None  # an episode without a step is none
        raise EnvError(f"{who.env_name}: {MAX_IDLE} episodes in a row ended before any agent was shown anything.")

    def step(self, actions: dict[int, Any]) -> list[AgentStep]:
        """Act for the agents that wait; rows of those that act next, and of those that ended."""
        return self._step(self._who.act(actions))

    def _step(self, actions: dict[Any, Any]) -> list[AgentStep]:
        rows: list[AgentStep] = []
        for _ in range(MAX_IDLE):
            new = self._rows(*self._step_dicts(actions))
            if self._who.waiting or self.over:
                return rows + new
            rows += copy.deepcopy(new)  # the env may write over what it gave
            actions = {}
        raise EnvError(
            f"{self._who.env_name}: nobody acts, and the episode is not over, since {MAX_IDLE} steps. Show an "
            "observation to some agent, or end the episode with terminated['__all__'] or truncated['__all__']."
        )

    def _rows(self, obs: Any, terminated: Any, truncated: Any) -> list[AgentStep]:
        who = self._who
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


class ParallelAdapter(ManyAgentsAdapter):
    """The adapter of a PettingZoo ``ParallelEnv``: all its agents act in each step."""

    def __init__(self, env: Any) -> None:
        super().__init__(env, _name(env))

    def reset(self, seed: int | None) -> list[AgentStep]:
        """Begin an episode; the first rows of the agents that are there at its start."""
        who = self._who
        obs = self._reset_dicts(seed)
        rows = [who.show(agent, obs.get(agent)) for agent in self.env.agents]
        if not rows:
            raise _nobody(who.env_name)
        return rows

    def step(self, actions: dict[int, Any]) -> list[AgentStep]:
        """Act for all agents that are there; rows of those that go on, of those that ended, and of new ones."""
        who = self._who
        acting = who.act(actions)
        obs, terminated, truncated = self._step_dicts(acting)
        rows: list[AgentStep] = []
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


class AECAdapter(ManyAgentsAdapter):
    """The adapter of a PettingZoo ``AECEnv``: its agents act one after the other.

    A step of the env is one of an agent that lives; those with which ended agents leave are made here and not counted.
    Rewards are summed from ``env.rewards``, after each step, which is what PettingZoo's own test of an env compares
    ``env.last()`` with: so none is lost of agents that leave without another turn, or are stopped.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env, _name(env))
        self._there: list[Any] = []

    def reset(self, seed: int | None) -> list[AgentStep]:
        """Begin an episode; the first row of the agent whose turn it is."""
        self.env.reset(seed=seed)
        self._who.reset()
        self.env_t = 0
        rows = self._rows()
        if self.over:
            raise _nobody(self._who.env_name)
        return rows

    def step(self, actions: dict[int, Any]) -> list[AgentStep]:
        """Act for the agent that waits; rows of those that ended, then of the one whose turn it is."""
        (action,) = self._who.act(actions).values()
        self.env.step(action)
        self.env_t += 1
        self._who.pay(self.env.rewards)
        return self._rows()

    def truncate(self, rows: list[AgentStep]) -> list[AgentStep]:
        """See `ManyAgentsAdapter.truncate`: the env is asked what agents see whose turn it is not."""
        env, who = self.env, self._who
        rows = copy.deepcopy(rows)
        shown = {row.agent for row in rows}
        ends: list[AgentStep] = []
        for agent in who.inside():
            if self.agents.index(str(agent)) not in shown:
                terminated, truncated = bool(env.terminations[agent]), bool(env.truncations[agent])
                ends += who.end(agent, copy.deepcopy(env.observe(agent)), terminated, truncated or not terminated)
        self.over = True
        return who.stop(rows) + ends

    def _rows(self) -> list[AgentStep]:
        env, who = self.env, self._who
        rows: list[AgentStep] = []
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

    def _vanished(self) -> list[AgentStep]:
        """The ends of agents that are gone without having been selected once more, so that they were shown nothing."""
        env, who = self.env, self._who
        rows: list[AgentStep] = []
        for agent in who.inside():
            if agent not in self._there:
                flags = bool(env.terminations.get(agent)), bool(env.truncations.get(agent))
                if True not in flags:
                    raise _left(agent, who.env_name)
                rows += who.end(agent, None, *flags)
        return rows


def _name(env: Any) -> str:
    return str((getattr(env, "metadata", None) or {}).get("name") or type(env.unwrapped).__name__)


def _nobody(env_name: str) -> EnvError:
    return EnvError(f"{env_name}: after reset() nobody is in env.agents who could act.")


def _left(agent: Any, env_name: str) -> EnvError:
    return EnvError(
        f"{env_name}: agent {agent!r} is no longer in env.agents, but was neither terminated nor truncated: set one of "
        "these for it in the step in which it leaves."
    )


# -- which adapter an env gets ----------------------------------------------------------------------------------------


def adapt_env(env: Any) -> GymAdapter | ManyAgentsAdapter:
    """The adapter of one env object, which may be a `ReducedEnv`.

    Raises:
        EnvError: it is of no kind that Etude knows; the message says what it is.
        SpaceError: it is `ReducedEnv`, and no agent sees such a part.
    """
    if isinstance(env, ReducedEnv):
        adapter = adapt_env(env.env)
        adapter.obs_spaces = reduced_spaces(adapter.obs_spaces, env.drop)
        return adapter
    api = api_of(env)
    if api is not None:
        return ParallelAdapter(env) if api == "parallel" else AECAdapter(env)
    if has_agent_dicts(env):  # before gymnasium.Env, which some frameworks' multi-agent envs inherit
        return DictAdapter(env)
    if isinstance(env, gym.Env):
        return GymAdapter(env)
    if foreign := foreign_env(env):
        raise EnvError(foreign)
    raise EnvError(
        f"{type(env).__module__}.{type(env).__qualname__} is no env: neither a gymnasium.Env, nor a PettingZoo "
        "ParallelEnv or AECEnv, nor has it `possible_agents`, `reset` and `step` as etude's MultiAgentEnv. Let it "
        "inherit from gymnasium.Env, its reset return `(obs, info)`, and its step five values, `(obs, reward, "
        "terminated, truncated, info)`; an env of the old Gym can be wrapped in shimmy.GymV21CompatibilityV0(env=env)."
    )


def has_agent_dicts(env: object) -> bool:
    """Whether an env has the looks of a `MultiAgentEnv`."""
    return hasattr(env, "possible_agents") and all(callable(getattr(env, name, None)) for name in ("reset", "step"))


def api_of(env: object) -> Literal["parallel", "aec"] | None:
    """Which of PettingZoo's two kinds an env is; None: it is none of them. PettingZoo is not imported for this."""
    for cls in type(env).__mro__:
        if cls.__module__.partition(".")[0] == "pettingzoo":
            if cls.__name__ == "ParallelEnv":
                return "parallel"
            if cls.__name__ == "AECEnv":
                return "aec"
    return None
